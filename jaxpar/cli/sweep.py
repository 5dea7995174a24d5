"""``jaxpar sweep``: short trainings of many meshes, measured beside what ``jaxpar plan`` predicts."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxpar.cli.exit_codes import DONE, FAILED, INTERRUPTED
from jaxpar.cli.output import check_writable, output_console
from jaxpar.experiments.machine import NVIDIA_DEVICE

EPILOG = """
A sweep file:

\b
  [sweep]
  base = "configs/quickstart.toml"   # a config
  out = "runs/sweep"                 # results.csv, sweep.png and a folder per trial
  steps = 10                         # of each trial; the first warmup = 3 are not counted
  timeout_s = 1800                   # of each trial
  overrides = ["data.seq_len=128"]   # of every trial
  gpu = "h100"                       # whose predictions are shown; default: the GPU it runs on
\b
  [grid]                             # all combinations
  "mesh" = [{data = 1, fsdp = 8, tensor = 1}, {data = 2, fsdp = 2, tensor = 2}]
  "train.microbatches" = [1, 2]
\b
  [[run]]                            # and these
  overrides = ["mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1"]

Each trial is a process of its own; running out of memory or of time is a row, not the end. Given again, the command
runs what has no result yet. Without an accelerator the trials run on fake CPU devices: only ratios mean something.

Exit codes: 0 done, 1 no trial worked, 2 bad sweep file, 130 interrupted (finished trials are kept).
"""

_GIB = 2**30


def sweep(
    path: Annotated[str, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")],
    best: Annotated[
        Path | None, typer.Option("--best", metavar="FILE", help="Write the config with the most tokens/s here.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed or ran out of memory or time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run short trainings of a list or grid of configs; compare what is measured with what is predicted."""
    file = importlib.import_module("jaxpar.experiments.sweep_file")
    module = importlib.import_module("jaxpar.experiments.sweep")
    plots = importlib.import_module("jaxpar.experiments.sweep_plots")
    check_writable("--best", best)
    asked = file.read_sweep(path, fake_devices=not NVIDIA_DEVICE.exists())
    rows, interrupted = module.run_sweep(asked, retry=retry, say=lambda line: typer.echo(line, err=True))
    picture = asked.out / plots.PLOTS
    drawn = plots.save_plots(rows, picture)
    winner = module.best_of(asked, rows)
    if best is not None and winner is not None and not interrupted:
        best.write_text(module.best_config_text(*winner), encoding="utf-8")
    if as_json:
        report = {
            "out": str(asked.out),
            "results": str(asked.out / module.RESULTS),
            "plots": str(picture) if drawn else None,
            "interrupted": interrupted,
            "best": winner[0]["name"] if winner else None,
            "rows": rows,
        }
        typer.echo(json.dumps(report))
    else:
        _print(rows, winner[0] if winner else None)
        typer.echo(f"{asked.out / module.RESULTS}" + (f", {picture}" if drawn else ""))
    if interrupted:
        typer.echo("interrupted; finished trials are kept: the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(DONE if winner else FAILED)


def _print(rows: list[dict], winner: dict | None) -> None:
    console = output_console(highlight=False)
    first_reason = importlib.import_module("jaxpar.experiments.sweep").first_reason
    table = Table(box=None)
    table.add_column("trial", overflow="fold")
    for column in ("step s", "tokens/s/device", "GiB", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("planned step s", "planned tokens/s/device", "planned GiB"):
        table.add_column(column, justify="right", style="dim")
    table.add_column("status", overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            _shown(row["step_s"], ".3g"),
            _shown(row["tokens_per_s_per_device"], ",.0f"),
            _shown(row["peak_bytes"], ".3g", _GIB),
            _shown(row["loss"], ".4f"),
            _shown(row["predicted_step_s"], ".3g"),
            _shown(row["predicted_tokens_per_s_per_device"], ",.0f"),
            _shown(row["predicted_bytes"], ".3g", _GIB),
            f"{row['status']}: {first_reason(row['reason'])}" if row["reason"] else row["status"],
            style="bold green" if row is winner else None,
        )
    console.print(table)
    done = [row for row in rows if row["step_s"] is not None]
    if done:
        device = (
            "fake CPU devices: only ratios mean something" if done[0]["platform"] == "cpu" else done[0]["device_kind"]
        )
        console.print(f"measured on {device}; planned for {done[0]['predicted_gpu']}", style="dim", markup=False)


def _shown(value: float | None, form: str, unit: int = 1) -> str:
    return "" if value is None or not math.isfinite(value) else format(value / unit, form)
