"""``jaxpar verify``: does the layout of a config change the answer? Runs it, shrunk, on fake devices."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from jaxpar.cli.exit_codes import DONE, FAILED, INTERRUPTED
from jaxpar.cli.output import output_console
from jaxpar.config import ConfigError, config_to_toml, load_with_sources
from jaxpar.config.overrides import in_order, split_path
from jaxpar.config.schema import AXES
from jaxpar.experiments.children import Ended, environment, run_child
from jaxpar.experiments.shrink import MAX_DEVICES, Shrunk, shrink
from jaxpar.plan import support_rules
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.rules import LAYOUT_RULES, RULES, find_problems
from jaxpar.plan.search import mesh_words

EPILOG = """
Examples:

\b
  jaxpar verify configs/llama-3.1-8b.toml
  jaxpar verify configs/llama-3.1-8b.toml mesh.data=2 mesh.fsdp=4 mesh.tensor=2 --json

The model is made small, its structure is kept (family, ratio of heads, ties, dims that do or do not divide, layers per
stage, packing, remat, microbatches, strategy, optimizer). Three steps on the mesh, in float32 on fake CPU devices, are
compared with the same steps on one device: loss, gradient norm, every gradient, every updated parameter.

Exit codes: 0 equal within rounding, 1 not, or the run failed; 2 bad input.
"""

_SHOWN = ("model.", "data.seq_len", "train.global_batch_size", "train.microbatches")
"""What of the changes is printed for people; --json has all."""


def verify(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="TOML file; may be left out.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Devices of the run, where an axis of the mesh is -1.")
    ] = None,
    max_devices: Annotated[
        int, typer.Option("--max-devices", min=1, help="Fake devices; the axes of a larger mesh are halved.")
    ] = MAX_DEVICES,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that it may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Prove that the config's mesh computes what one device computes, on a shrunk model and fake CPU devices."""
    arguments = in_order(path, overrides)
    config = load_with_sources(*split_path(arguments)).config
    facts = gather_facts(config, num_devices=devices)
    support = tuple(rule for rule in RULES if rule.__module__ == support_rules.__name__)
    if problems := find_problems(facts, LAYOUT_RULES + support):
        raise ConfigError(problems)
    shrunk = shrink(facts, max_devices=max_devices)
    started = time.monotonic()
    try:
        found, ended = _run(shrunk, timeout_s)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    report = {
        "ok": bool(found and found["equal"]),
        "config": path if path is not None and "=" not in path else None,
        "mesh": dict(shrunk.mesh),
        "devices": math.prod(shrunk.mesh.values()),
        "shrunk": {key: list(values) for key, values in shrunk.changes.items()},
        "seconds": round(time.monotonic() - started, 1),
        **(found or {"error": ended.reason}),
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report, shrunk, ended)
    raise typer.Exit(DONE if report["ok"] else FAILED)


def _run(shrunk: Shrunk, timeout_s: float) -> tuple[dict | None, Ended]:
    with tempfile.TemporaryDirectory(prefix="jaxpar-verify-") as directory:
        folder = Path(directory)
        (folder / "config.toml").write_text(config_to_toml(shrunk.config), encoding="utf-8")
        result = folder / "result.json"
        ended = run_child(
            ["jaxpar.experiments.verify", str(folder / "config.toml"), str(result)],
            environment=environment(fake_devices=True, fast_compile=True),
            timeout_s=timeout_s,
            log=folder / "log.txt",
        )
        return (json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None), ended


def _print(report: Mapping, shrunk: Shrunk, ended: Ended) -> None:
    console = output_console(highlight=False)
    shown = [(key, values) for key, values in shrunk.changes.items() if key.startswith(_SHOWN)]
    sizes = [f"{key.rpartition('.')[2]} {given} -> {tried}" for key, (given, tried) in shown if type(tried) is int]
    console.print(f"shrunk: {', '.join(sizes)}", style="dim", soft_wrap=True, markup=False)
    halved = [f"{axis} {shrunk.changes[f'mesh.{axis}'][0]}" for axis in AXES if f"mesh.{axis}" in shrunk.changes]
    where = f"{mesh_words(shrunk.mesh)} on {report['devices']} fake devices"
    where += f" (made smaller: {', '.join(halved)})" if halved else ""
    if "error" in report:
        console.print(f"failed: {where}: {report['error']}", style="bold red", soft_wrap=True, markup=False)
        console.print(ended.error[-3000:], style="dim", soft_wrap=True, markup=False)
        return
    worst = report["worst"]
    difference = "not finite" if worst["difference"] is None else f"{worst['difference']:.1e}"
    limit = f"{worst['what']} differs by {difference} (limit {report['tolerance']:.0e})"
    if report["ok"]:
        console.print(
            f"verified: {where} computes what one device computes in {report['steps']} steps: loss, gradient norm, "
            f"{len(report['grads'])} gradients, {len(report['params'])} updated parameters; worst: {limit}",
            style="bold green",
            soft_wrap=True,
            markup=False,
        )
        if report["not_compared"]:
            names = ", ".join(report["not_compared"])
            console.print(f"updates not compared, their true gradient is 0: {names}", style="dim", soft_wrap=True)
        return
    console.print(f"NOT EQUAL: {where}: {limit}", style="bold red", soft_wrap=True, markup=False)
    for name, value in report["grads"].items():
        if value is None or value > report["tolerance"]:
            console.print(f"  gradient of {name}: {value}", soft_wrap=True, markup=False)
