"""``jaxpar schedule``: draws a pipeline schedule and says what it costs. Starts without JAX."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxpar.cli.schedule_drawing import draw, save_png
from jaxpar.config import ConfigError
from jaxpar.schedule import (
    KINDS,
    Schedule,
    build_schedule,
    closed_form_idle_share,
    microbatches_below,
    schedule_problems,
)

_NAMES = {
    "kind": "schedule",
    "num_stages": "--stages",
    "num_microbatches": "--microbatches",
    "num_chunks": "--chunks",
}
_GOOD_IDLE_SHARE = Fraction(1, 10)


def schedule(
    kind: Annotated[str, typer.Argument(metavar="SCHEDULE", help=f"One of {', '.join(KINDS)}.")],
    stages: Annotated[int, typer.Option("--stages", help="Stages of the pipeline.")],
    microbatches: Annotated[int, typer.Option("--microbatches", help="Microbatches of an optimizer step.")],
    chunks: Annotated[int, typer.Option("--chunks", help="Layer chunks per stage; interleaved, breadth_first.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The whole table and its numbers as JSON.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw it to this file too (needs the plots extra).")] = None,
) -> None:
    """Draw a pipeline schedule; print its idle share, ticks and buffer slots."""
    sizes = {"num_stages": stages, "num_microbatches": microbatches, "num_chunks": chunks}
    if problems := schedule_problems(kind, **sizes, names=_NAMES):
        raise ConfigError(problems)
    built = build_schedule(kind, **sizes)
    if png is not None:
        save_png(built, png)
    if as_json:
        typer.echo(json.dumps(_report(built)))
        return
    console = Console()
    console.print(draw(built, width=console.width), soft_wrap=True)
    console.print(_summary(built), soft_wrap=True, highlight=False)


def _report(built: Schedule) -> dict[str, object]:
    """Everything about a schedule, for programs."""
    return {
        "schedule": built.kind,
        "stages": built.num_stages,
        "microbatches": built.num_microbatches,
        "chunks": built.num_chunks,
        "ticks": built.num_ticks,
        "forward_ticks": int(built.forward_runs.sum()),
        "backward_ticks": int(built.backward_runs.sum()),
        "idle_share": float(built.idle_share()),
        "closed_form_idle_share": float(_closed_form(built)),
        "activation_slots": built.num_activation_slots,
        "gradient_slots": built.num_gradient_slots,
        "peak_in_flight": built.peak_in_flight(),
        "tables": {name: table.tolist() for name, table in (built.stage_tables() | built.tick_tables()).items()},
    }


def _closed_form(built: Schedule) -> Fraction:
    return closed_form_idle_share(built.num_stages, built.num_microbatches, built.num_chunks)


def _summary(built: Schedule) -> str:
    """The numbers of a schedule, one a line."""
    idle, closed_form = built.idle_share(), _closed_form(built)
    verdict = "as" if idle == closed_form else f"not {closed_form} as"
    in_flight = " ".join(map(str, built.peak_in_flight()))
    lines = [
        (
            "ticks",
            f"{built.num_ticks}; forward lane in {built.forward_runs.sum()}, backward in {built.backward_runs.sum()}",
        ),
        ("idle share", f"{float(idle):.1%} = {idle}, {verdict} (p-1)/(vM+p-1) says"),
        ("in flight", f"at most {in_flight} on stages 0 to {built.num_stages - 1}"),
        ("slots per stage", f"{built.num_activation_slots} activations, {built.num_gradient_slots} gradients"),
    ]
    if idle >= _GOOD_IDLE_SHARE:
        enough = microbatches_below(_GOOD_IDLE_SHARE, built.num_stages, built.num_chunks)
        lines.append((f"below {float(_GOOD_IDLE_SHARE):.0%} idle", f"from {enough} microbatches on"))
    return "\n".join(f"{name:<17}{value}" for name, value in lines)
