"""``jaxpar doctor``: is this machine ready for a run?"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpar.cli.exit_codes import DONE, FAILED, INTERRUPTED
from jaxpar.cli.output import output_console
from jaxpar.cli.sizes import readable_bytes
from jaxpar.config import load_config
from jaxpar.config.overrides import in_order, split_path
from jaxpar.experiments.diagnosis import Trouble, diagnose
from jaxpar.experiments.machine import gather

EPILOG = """
Examples:

\b
  jaxpar doctor                              # this machine
  jaxpar doctor configs/llama-3.1-8b.toml    # ... for that run: devices against its mesh, disk against its checkpoints
  srun jaxpar doctor CONFIG runtime.num_processes=$SLURM_NTASKS ... --json

Reads versions, devices, driver and links (with the doctor extra), the launcher's environment, disk and limits; changes
nothing. Each process looks at its own machine.

Exit codes: 0 nothing stops a run (there may be warnings), 1 something does, 2 bad input.
"""


def doctor(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The run to be ready for.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that JAX may take to start.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look for what would stop a run on this machine, and say what to do."""
    file, changes = split_path(in_order(path, overrides))
    if file is None and not any(change.startswith("model.") for change in changes):
        # No run is named: one that fits any number of devices.
        changes = ["model.preset=tiny-bytes", "train.global_batch_size=65536", "data.num_samples=65536", *changes]
        changes += [] if any(change.startswith("mesh.") for change in changes) else ["mesh.data=-1"]
    config = load_config(file, changes)
    try:
        facts = gather(config, nvml=_nvml(), timeout_s=timeout_s)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    troubles = diagnose(facts, config)
    stopped = any(trouble.stops for trouble in troubles)
    if as_json:
        found = [dataclasses.asdict(trouble) for trouble in troubles]
        typer.echo(json.dumps({"ok": not stopped, "problems": found, **facts}))
    else:
        _print(facts, troubles)
    raise typer.Exit(FAILED if stopped else DONE)


def _nvml() -> ModuleType | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _print(facts: Mapping, troubles: list[Trouble]) -> None:
    console = output_console(highlight=False)
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _lines(facts):
        table.add_row(name, Text(value))
    console.print(table)
    nvidia = facts["nvidia"]
    if nvidia and not nvidia["error"] and len(nvidia["gpus"]) > 1:
        _print_links(console, nvidia["links"])
    console.print()
    for trouble in troubles:
        word, style = ("problem", "bold red") if trouble.stops else ("warning", "yellow")
        console.print(Text(f"{word}: ", style=style).append(trouble.what, style="default"), soft_wrap=True)
        console.print(f"    -> {trouble.remedy}", soft_wrap=True, markup=False)
    if not any(trouble.stops for trouble in troubles):
        console.print("nothing here stops a run", style="bold green")


def _lines(facts: Mapping) -> list[tuple[str, str]]:
    """Name and value of everything that is known, for people."""
    jax, nvidia, launcher, files = facts["jax"], facts["nvidia"], facts["launcher"], facts["disk"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    lines = [("host", f"{facts['host']}: {facts['system']}, Python {facts['python']}, {facts['cores']} CPU cores")]
    lines += [("packages", versions)]
    lines += [("JAX", jax["error"] or f"{jax['devices']} x {jax['device_kind']} ({jax['platform']})")]
    lines += [("", note) for note in jax.get("notes", ())]
    if nvidia is None:
        lines += [("NVIDIA", "a device is there" if facts["has_nvidia_device"] else "no device")]
    elif nvidia["error"]:
        lines += [("NVIDIA", nvidia["error"])]
    else:
        lines += [("driver", f"{nvidia['driver']}, CUDA {nvidia['cuda']}")]
        for index, gpu in enumerate(nvidia["gpus"]):
            memory = f"{readable_bytes(gpu['used_bytes'])} of {readable_bytes(gpu['memory_bytes'])} in use"
            lines += [(f"GPU {index}", f"{gpu['name']}, {memory}, {gpu['nvlinks']} NVLinks active")]
    if launcher is not None:
        of = f" of {launcher['num_processes']}" if launcher["num_processes"] is not None else ""
        lines += [("launcher", f"{launcher['name']}: process {launcher['process_id']}{of}")]
    lines += [(name, value) for name, value in facts["variables"].items()]
    free = readable_bytes(files["free_bytes"]) if files["free_bytes"] is not None else "?"
    lines += [("run.dir", f"{files['path']}: {files['file_system'] or 'file system not known'}, {free} free")]
    if facts["infiniband"]:
        lines += [("InfiniBand", ", ".join(facts["infiniband"]))]
    if (shared := facts["shared_memory"]["total_bytes"]) is not None:
        lines += [("/dev/shm", readable_bytes(shared))]
    limits = {name: "unlimited" if value is None else f"{value:,}" for name, value in facts["limits"].items()}
    return [*lines, ("limits", ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.items()))]


def _print_links(console: Console, links: list[list[str]]) -> None:
    table = Table(box=None, title="links", title_justify="left")
    table.add_column("GPU")
    for index in range(len(links)):
        table.add_column(str(index), justify="right")
    for index, row in enumerate(links):
        table.add_row(str(index), *row)
    console.print(table)
