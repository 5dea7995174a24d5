"""``jaxpar train``: one command from a config to a run."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxpar.cli.exit_codes import DONE, INTERRUPTED, PREEMPTED
from jaxpar.config import load_with_sources
from jaxpar.config.overrides import split_path


def train(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="TOML file; may be left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    sharding: Annotated[
        bool,
        typer.Option(
            "--sharding", help="Print how every array lies on the mesh, and what is replicated; do not train."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome (or the report) as JSON.")] = False,
) -> None:
    """Train. Resumes by itself when the run directory has a checkpoint; Ctrl-C finishes the step and saves."""
    arguments = [*([path] if path is not None else []), *(overrides or [])]
    loaded = load_with_sources(*split_path(arguments))
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if sharding:
        # These modules import JAX, which takes seconds; bad input must not wait for it.
        importlib.import_module("jaxpar.cli.sharding").print_sharding(loaded.config, as_json)
        return
    trainer = importlib.import_module("jaxpar.trainer")
    outcome = trainer.Trainer(loaded.config).run()
    if as_json:
        typer.echo(json.dumps(outcome.to_dict()))
    else:
        typer.echo(_closing_words(outcome, arguments), err=True)
    reason = outcome.reason.name
    raise typer.Exit({"NONE": DONE, "INTERRUPTED": INTERRUPTED, "PREEMPTED": PREEMPTED}[reason])


def command_name() -> str:
    """How this program was called, so that the commands it prints can be pasted."""
    if Path(sys.argv[0]).name != "__main__.py":
        return sys.argv[0] if os.sep in sys.argv[0] else "jaxpar"
    python = Path(sys.executable)
    return f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python} -m jaxpar"


def _closing_words(outcome: object, arguments: list[str]) -> str:
    """Where things are and what to do next."""
    command = " ".join([command_name(), "train", *arguments])
    losses = [f"training loss {outcome.loss:.4f}"] if outcome.loss is not None else []
    losses += [f"validation loss {outcome.eval_loss:.4f}"] if outcome.eval_loss is not None else []
    ended = {"NONE": "done", "INTERRUPTED": "interrupted", "PREEMPTED": "preempted"}[outcome.reason.name]
    lines = [
        f"{ended} at step {outcome.step}" + (f": {', '.join(losses)}" if losses else ""),
        f"  metrics     {outcome.run_dir}/metrics.jsonl",
        f"  checkpoint  {outcome.checkpoint or 'none was written'}",
    ]
    if outcome.reason.name != "NONE":
        return "\n".join([*lines, f"  go on       {command}"])
    fresh = [argument for argument in arguments if not argument.startswith("run.dir=")]
    other = " ".join([command_name(), "train", *fresh])
    return "\n".join(
        [
            *lines,
            "next:",
            f"  {command} train.steps={2 * outcome.step}    # go on for longer",
            f"  {other} run.dir=runs/fsdp mesh.data=1 mesh.fsdp=-1 mesh.tensor=1    # the same run, another mesh",
            f"  {command} --sharding    # how every array lies on the mesh",
        ]
    )
