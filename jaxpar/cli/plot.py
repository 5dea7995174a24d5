"""``jaxpar plot``: the curves of runs, in the terminal and as a picture. Starts without JAX."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from jaxpar.cli import plot_file
from jaxpar.cli.plot_terminal import COLOURS, LETTERS, POINT, Curve, chart
from jaxpar.config import ConfigError, Problem
from jaxpar.config.keys import nearest_name
from jaxpar.events.history import History, Series, read_history
from jaxpar.events.progress import format_duration
from jaxpar.events.stopwatch import PARTS, describe_shares

EPILOG = """
Examples:

\b
  jaxpar plot runs/a
  jaxpar plot runs/a runs/b --out curves.png
  jaxpar plot runs/a --metrics loss,grad_norm,save_s
  jaxpar plot runs/a --json

Reads RUN/metrics.jsonl and RUN/eval.jsonl while the run goes on or after it; lines that are cut off or damaged are left
out and said.
"""

PANELS = (
    ("loss", ("loss", "eval_loss")),
    ("tokens per second", ("tokens_per_s",)),
    ("highest memory of a device, bytes", ("memory_peak_bytes",)),
    ("learning rate", ("lr",)),
)
"""What is drawn unless metrics are named: (title, keys), where a run has recorded them; a second key as points."""

_HEIGHT = 9
_MIN_WIDTH = 40
_PIPED_WIDTH = 100


def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or files of metrics.")],
    metrics: Annotated[
        str | None, typer.Option("--metrics", help="Keys of the rows to draw instead, with commas between.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Draw a picture to this file (.png, .svg, .pdf; the plots extra).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of drawing.")] = False,
) -> None:
    """Draw loss, throughput, memory and learning rate of runs over their steps, several runs in the same charts."""
    if out is not None:
        plot_file.check_out(out)
    histories = [read_history(run) for run in runs]
    panels = _panels(histories, metrics)
    for history in histories:
        for note in history.notes:
            typer.echo(f"note: {note}", err=True)
    if out is not None:
        plot_file.save(out, histories, panels)
        typer.echo(f"drawn to {out}", err=True)
    if as_json:
        typer.echo(json.dumps({"runs": [_report(history, panels) for history in histories]}))
    elif out is None:
        _draw(histories, panels)


def _panels(histories: Sequence[History], metrics: str | None) -> list[tuple[str, Sequence[str]]]:
    """Those that some run has numbers for.

    Raises:
        ConfigError: a metric that was asked for is in no run; names the nearest.
    """
    known = dict.fromkeys(key for history in histories for key in history.series)
    if metrics is None:
        return [(title, keys) for title, keys in PANELS if any(key in known for key in keys)]
    asked = [key for part in metrics.split(",") if (key := part.strip())]
    if wrong := [key for key in asked if key not in known] or ([] if asked else [metrics]):
        nearest = nearest_name(wrong[0], known)
        remedy = (f"did you mean {nearest}? " if nearest else "") + f"recorded: {', '.join(known)}"
        raise ConfigError([Problem(key="--metrics", value=wrong[0], message="no run has recorded this", remedy=remedy)])
    return [(key, (key,)) for key in asked]


def _report(history: History, panels: Sequence[tuple[str, Sequence[str]]]) -> dict[str, object]:
    """The numbers of a run, for programs: every point of what would be drawn."""
    keys = [key for _, keys in panels for key in keys if key in history.series]
    series = {key: {"step": list(s.steps), "value": list(s.values)} for key in keys for s in [history.series[key]]}
    return {"run": history.name, "series": series, "seconds": dict(history.seconds), "notes": list(history.notes)}


def _draw(histories: Sequence[History], panels: Sequence[tuple[str, Sequence[str]]]) -> None:
    console = Console(highlight=False)
    in_colour = console.is_terminal and console.color_system is not None and not console.no_color
    width = max(_MIN_WIDTH, min(console.width, 160) if console.is_terminal else _PIPED_WIDTH)
    for title, keys in panels:
        drawn = [(run, key) for key in keys for run, history in enumerate(histories) if key in history.series]
        curves = [Curve(run=run, series=histories[run].series[key], joined=key == keys[0]) for run, key in drawn]
        points = "capitals" if len(histories) > 1 and not in_colour else POINT
        shown = title + (f"  ({points}: {keys[1]})" if any(not curve.joined for curve in curves) else "")
        console.print(chart(shown, curves, width=width, height=_HEIGHT, in_colour=in_colour), soft_wrap=True)
    for run, history in enumerate(histories):
        console.print(_legend(run, history, len(histories) > 1, in_colour), soft_wrap=True)


def _legend(run: int, history: History, several: bool, in_colour: bool) -> Text:
    """A run's name, its last numbers and where its time went."""
    mark = "" if not several else "■ " if in_colour else f"{LETTERS[run % len(LETTERS)]}  "
    text = Text(mark, style=COLOURS[run % len(COLOURS)] if in_colour else "")
    text.append(history.name, style="bold" if in_colour else "")
    series = history.series
    last = [f"step {_last_step(series['loss'])}" if "loss" in series else ""]
    last += [f"{name} {series[key].values[-1]:.4f}" for key, name in _LOSSES if key in series]
    text.append("  " + ", ".join(filter(None, last)), style="")
    if history.seconds:
        whole = sum(history.seconds.get(key, 0.0) for key in PARTS)
        text.append(f"\n   time of the steps {format_duration(whole)}: {describe_shares(dict(history.seconds))}")
    return text


_LOSSES = (("loss", "training loss"), ("eval_loss", "validation loss"))


def _last_step(series: Series) -> int:
    return series.steps[-1]
