"""The commands for checkpoints: their arguments. What they do is imported when one is called."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from jaxpar.cli.exit_codes import FAILED

Step = Annotated[int | None, typer.Option(metavar="N", help="Step; default: the newest complete one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def inspect(
    path: Annotated[str, typer.Argument(help="A run, its checkpoints, one step, or any Orbax checkpoint.")],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Print steps, arrays, data position and config of a checkpoint. Reads no arrays and needs no devices."""
    importlib.import_module("jaxpar.cli.inspect").print_description(path, step, as_json)


def verify_checkpoint(
    path: Annotated[str, typer.Argument(help="A run, its checkpoints, or one step.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Only this step; default: all that are there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read checkpoints whole and compare them with the checksums saved with them; exit 1 if anything is damaged.

    Runs on any machine, in a few hundred MiB of memory, whatever mesh saved the checkpoint.
    """
    whole = importlib.import_module("jaxpar.cli.verify_checkpoint").verify(path, step, as_json)
    if not whole:
        sys.exit(FAILED)


def reshard(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A run, its checkpoints, one step; or a Hugging Face directory."),
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Directory of the copy; nothing is overwritten.")],
    mesh: Annotated[str | None, typer.Option(metavar="A=N,B=M", help="Target mesh, e.g. fsdp=16,tensor=4.")] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Take the target mesh (and, with --key-map, the model) from this config."),
    ] = None,
    to: Annotated[str, typer.Option(metavar="FORM", help="hf: a Hugging Face directory. jaxpar.")] = "jaxpar",
    key_map: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="SRC is another trainer's Orbax checkpoint: docs/key-maps.md."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --to hf: carry these tokenizer files along.")
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="With --to hf: params, or ema for their moving average.")
    ] = "params",
    params_only: Annotated[bool, typer.Option("--params-only", help="Leave the optimizer state behind.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert float arrays: float32 or bfloat16.")] = None,
    step: Step = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Bound on this process's memory.")] = "4GiB",
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="With --dry-run: does the target mesh fit?")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and bring; write nothing.")] = False,
    verify: Annotated[bool, typer.Option(help="Read the finished copy once more and compare checksums.")] = True,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint for another mesh, so that each of its devices reads only what it needs; or convert it.

    From and to Hugging Face safetensors, and from other trainers' Orbax checkpoints with a key map. Streams within
    --max-memory. The copy appears when it is complete; a copy that was interrupted goes on when the same command is
    given again; nothing is ever overwritten.
    """
    command = importlib.import_module("jaxpar.cli.reshard")
    command.run(
        command.Request(
            source=source,
            destination=destination,
            mesh=mesh,
            config=config,
            to=to,
            key_map=key_map,
            tokenizer=tokenizer,
            weights=weights,
            params_only=params_only,
            dtype=dtype,
            step=step,
            max_memory=max_memory,
            gpu=gpu,
            dry_run=dry_run,
            verify=verify,
            as_json=as_json,
        )
    )
