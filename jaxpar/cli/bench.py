"""``jaxpar bench``: measures the links between the devices that are there."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxpar.cli.exit_codes import FAILED, INTERRUPTED
from jaxpar.cli.output import check_writable, output_console, stdout_to_stderr
from jaxpar.cli.sizes import parse_bytes, readable_bytes
from jaxpar.config import ConfigError, Problem, load_config
from jaxpar.config.overrides import in_order, split_path
from jaxpar.experiments.links import OPS, Measured, Measurement, cluster_text, link_bandwidths

EPILOG = """
Examples:

\b
  jaxpar bench collectives mesh.fsdp=-1 --out cluster.toml
  jaxpar bench collectives mesh.data=2 mesh.fsdp=-1 --out cluster.toml     # two nodes: data crosses the network
  jaxpar bench collectives mesh.fsdp=8 runtime.cpu_devices=8 --max 1MiB    # fake devices, to try it

Several processes: the same command in each, with runtime.coordinator=HOST:PORT runtime.num_processes=N and its own
runtime.process_id, as in `jaxpar train`.

Sizes and bandwidths are those of nccl-tests. `jaxpar plan CONFIG --cluster FILE` then uses what was measured.
"""

bench = typer.Typer(help="Measure the links between devices.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure the links between devices."""


@bench.command("collectives", epilog=EPILOG)
def collectives(
    path: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="Its mesh and runtime are used.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. mesh.fsdp=8.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a cluster file for plan.")] = None,
    smallest: Annotated[str, typer.Option("--min", metavar="SIZE", help="Smallest message.")] = "64KiB",
    largest: Annotated[str, typer.Option("--max", metavar="SIZE", help="Largest message.")] = "256MiB",
    factor: Annotated[int, typer.Option("--factor", min=2, help="Between one size and the next.")] = 8,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Calls per size that are timed.")] = 20,
    only: Annotated[list[str] | None, typer.Option("--op", help=f"One of {', '.join(OPS)}; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time all-reduce, all-gather, reduce-scatter, all-to-all and permute over every axis of the mesh."""
    arguments = in_order(path, overrides)
    file, changes = split_path(arguments)
    if file is None and not any(change.startswith("model.") for change in changes):
        changes.append("model.preset=tiny-bytes")  # a config needs some model; it plays no part here
    config = load_config(file, changes)
    sizes = _sizes(smallest, largest, factor)
    ops = _ops(only)
    check_writable("--out", out)
    module = importlib.import_module("jaxpar.experiments.bench_collectives")
    try:
        with stdout_to_stderr():
            measured = module.bench(
                config,
                sizes=sizes,
                iterations=iterations,
                ops=ops,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except KeyboardInterrupt:
        # An ordinary exit would wait for the other processes.
        os._exit(INTERRUPTED)
    if config.runtime.process_id != 0:
        return
    if out is not None:
        out.write_text(cluster_text(measured), encoding="utf-8")
    if as_json:
        report = {
            "by": measured.by,
            "device_kind": measured.device_kind,
            "devices": measured.num_devices,
            "nodes": measured.num_nodes,
            "links_bytes_per_s": link_bandwidths(measured),
            "collectives": [_as_json(found) for found in measured.measurements],
            "cluster_file": str(out) if out is not None else None,
        }
        typer.echo(json.dumps(report))
    else:
        _print(measured, link_bandwidths(measured))
        if out is not None:
            typer.echo(f"{out}: use it with jaxpar plan CONFIG --cluster {out}")
    if not measured.measurements:
        raise typer.Exit(FAILED)


def _sizes(smallest: str, largest: str, factor: int) -> list[int]:
    sizes = {}
    for option, text in (("--min", smallest), ("--max", largest)):
        try:
            sizes[option] = parse_bytes(text)
        except ValueError as error:
            raise ConfigError([_problem(option, text, str(error), "e.g. 64KiB, 256MiB")]) from None
    if not 0 < sizes["--min"] <= sizes["--max"]:
        message = f"is below --min {smallest}, or 0"
        raise ConfigError([_problem("--max", largest, message, "e.g. --min 64KiB --max 1GiB")])
    found = [sizes["--min"]]
    while found[-1] * factor <= sizes["--max"]:
        found.append(found[-1] * factor)
    return found if found[-1] == sizes["--max"] else [*found, sizes["--max"]]


def _ops(only: list[str] | None) -> tuple[str, ...]:
    for op in only or ():
        if op not in OPS:
            raise ConfigError([_problem("--op", op, "no such collective", f"one of {', '.join(OPS)}")])
    return tuple(only or OPS)


def _problem(key: str, value: str, message: str, remedy: str) -> Problem:
    return Problem(key=key, value=value, message=message, remedy=remedy)


def _as_json(found: Measurement) -> dict:
    return {
        "axis": found.axis,
        "op": found.op,
        "devices": found.devices,
        "stride": found.stride,
        "bytes": found.bytes,
        "seconds": found.seconds,
        "algorithm_bytes_per_s": found.algorithm_bandwidth,
        "bus_bytes_per_s": found.bus_bandwidth,
    }


def _print(measured: Measured, bandwidths: dict[str, float]) -> None:
    console = output_console(highlight=False)
    table = Table(box=None, title=measured.by, title_justify="left")
    for column in ("axis", "collective"):
        table.add_column(column)
    for column in ("devices", "message", "microseconds", "algorithm GB/s", "bus GB/s"):
        table.add_column(column, justify="right")
    for found in measured.measurements:
        table.add_row(
            found.axis,
            found.op,
            str(found.devices),
            readable_bytes(found.bytes),
            f"{found.seconds * 1e6:,.1f}",
            f"{found.algorithm_bandwidth / 1e9:.4g}",
            f"{found.bus_bandwidth / 1e9:.4g}",
        )
    console.print(table)
    for name, bandwidth in bandwidths.items():
        console.print(f"{name.replace('_', ' ')}: {bandwidth / 1e9:.4g} GB/s per device", markup=False)
