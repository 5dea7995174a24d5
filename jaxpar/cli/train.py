"""``jaxpar train``: one command from a config to a run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxpar.cli.exit_codes import DONE, INTERRUPTED, PREEMPTED
from jaxpar.cli.output import stdout_to_stderr
from jaxpar.config import Config, ConfigError, load_with_sources
from jaxpar.config.overrides import in_order, split_path
from jaxpar.config.schema import MeshConfig
from jaxpar.plan.resolve import check
from jaxpar.runtime.interrupt import EndOnSigterm

EPILOG = """
Examples:

\b
  jaxpar train configs/quickstart.toml
  jaxpar train configs/quickstart.toml run.dir=runs/b mesh.data=1 mesh.fsdp=4 optim.lr=1e-3
  jaxpar train configs/quickstart.toml --sharding

A run writes RUN/config.toml (all settings), RUN/metrics.jsonl (one object per step), RUN/eval.jsonl, RUN/log.txt and
RUN/checkpoints/. `jaxpar config --reference` explains every key; `jaxpar config CONFIG` shows what a run would use.

Several processes: the same command in each, with runtime.coordinator=HOST:PORT runtime.num_processes=N and its own
runtime.process_id.

Exit codes: 0 done, 1 failed, 2 bad input, 75 preempted (SIGTERM) and saved, 130 interrupted.
"""


def train(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="TOML file; may be left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    sharding: Annotated[
        bool,
        typer.Option(
            "--sharding", help="Print how every array lies on the mesh, and what is replicated; do not train."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the outcome (or the report) as JSON; progress then goes to standard error."),
    ] = False,
) -> None:
    """Train a model. Resumes by itself when the run directory has a checkpoint; Ctrl-C finishes the step and saves."""
    arguments = in_order(path, overrides)
    loaded = load_with_sources(*split_path(arguments))
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    # The modules imported below need JAX, which takes seconds; bad input does not wait for it.
    check(loaded.config)
    if sharding:
        importlib.import_module("jaxpar.cli.sharding").print_sharding(loaded.config, as_json)
        return
    trainer = importlib.import_module("jaxpar.trainer")
    # While steps run, SIGTERM is the trainer's; before and after, there is nothing to save.
    preempted = EndOnSigterm(PREEMPTED, "preempted while no step ran; the same command goes on from what is saved")
    try:
        with preempted, stdout_to_stderr() if as_json else contextlib.nullcontext():
            outcome = trainer.Trainer(loaded.config).run()
    except KeyboardInterrupt:
        # Before the first step, or for the second time. An ordinary exit would wait for threads that read or save.
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    if loaded.config.runtime.process_id == 0:
        if as_json:
            typer.echo(json.dumps(outcome.to_dict()))
        else:
            typer.echo(_closing_words(outcome, loaded.config, arguments), err=True)
    reason = outcome.reason.name
    raise typer.Exit({"NONE": DONE, "INTERRUPTED": INTERRUPTED, "PREEMPTED": PREEMPTED}[reason])


def command_name() -> str:
    """How this program was called, so that the commands it prints can be pasted."""
    if Path(sys.argv[0]).name != "__main__.py":
        return sys.argv[0] if os.sep in sys.argv[0] else "jaxpar"
    python = Path(sys.executable)
    return f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python} -m jaxpar"


def _closing_words(outcome: object, config: Config, arguments: list[str]) -> str:
    """Where things are and what to do next."""
    losses = [f"training loss {outcome.loss:.4f}"] if outcome.loss is not None else []
    losses += [f"validation loss {outcome.eval_loss:.4f}"] if outcome.eval_loss is not None else []
    ended = {"NONE": "done", "INTERRUPTED": "interrupted", "PREEMPTED": "preempted"}[outcome.reason.name]
    lines = [
        f"{ended} at step {outcome.step}" + (f": {', '.join(losses)}" if losses else ""),
        f"  metrics     {outcome.run_dir}/metrics.jsonl",
        f"  checkpoint  {outcome.checkpoint or 'none was written'}",
    ]
    if outcome.reason.name != "NONE":
        return "\n".join([*lines, f"  go on       {_command(arguments)}"])
    if outcome.step < config.train.steps:
        longer = _command(arguments, "train.stop_at=none"), f"go on to step {config.train.steps}"
    else:
        longer = _command(arguments, f"train.steps={2 * outcome.step}"), "go on for longer"
    steps = [longer, *_on_another_mesh(config, arguments)]
    steps.append((_command(arguments) + " --sharding", "how every array lies on the mesh"))
    return "\n".join([*lines, "next:", *(f"  {command}    # {what}" for command, what in steps)])


def _on_another_mesh(config: Config, arguments: list[str]) -> list[tuple[str, str]]:
    """The same run with all devices on the fsdp axis, where that is another mesh and a legal one."""
    mesh = MeshConfig(fsdp=-1)
    changes = [
        f"mesh.{field.name}={getattr(mesh, field.name)}"
        for field in dataclasses.fields(mesh)
        if getattr(mesh, field.name) != getattr(config.mesh, field.name)
    ]
    fewer = [change for change in changes if not change.startswith("mesh.fsdp=")]
    if not fewer:
        return []
    try:
        check(dataclasses.replace(config, mesh=mesh))
    except ConfigError:
        return []
    return [(_command(arguments, "run.dir=runs/fsdp", *changes), "the same run, another mesh")]


def _command(arguments: list[str], *changes: str) -> str:
    """The command that was given, with some overrides changed, ready to be pasted: each key is there once."""
    changed = {change.partition("=")[0] for change in changes}
    kept = [argument for argument in arguments if argument.partition("=")[0].strip() not in changed]
    return f"{command_name()} train {shlex.join([*kept, *changes])}"
