"""The live display of a run on a terminal, and the choice between it and plain lines."""

from __future__ import annotations

import os
import sys
import time
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxpar.events.progress import (
    NullProgress,
    PlainProgress,
    Progress,
    RemainingTime,
    StepReport,
    describe_loss,
    describe_speed,
    format_duration,
)


class LiveProgress:
    """A bar and two lines of numbers at the bottom of the terminal, drawn twice a second beside the training loop.

    A step only stores its report, so that showing costs the loop nothing. While it is up, what is printed to standard
    output and standard error appears above it.
    """

    def __init__(self, *, title: str, first_step: int, last_step: int, stream: TextIO):
        self._title = title
        self._first_step, self._last_step = first_step, last_step
        self._remaining = RemainingTime(last_step)
        self._report: StepReport | None = None
        self._evaluation = ""
        self._phase = "starting"
        self._started = self._phase_started = time.monotonic()
        self._live = Live(
            console=Console(file=stream),
            get_renderable=self._render,
            refresh_per_second=2,
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def phase(self, text: str) -> None:
        self._phase, self._phase_started = text, time.monotonic()

    def step(self, report: StepReport) -> None:
        self._remaining.update(report)
        self._report, self._phase = report, ""

    def evaluation(self, step: int, loss: float, tokens: int) -> None:  # noqa: ARG002 (tokens: shown by plain progress)
        self._evaluation, self._phase = f"validation loss {loss:.4f} (step {step})", ""

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = ""
        self._live.stop()

    def _render(self) -> RenderableType:
        now = time.monotonic()
        done = self._report.step if self._report else self._first_step - 1
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=self._last_step, completed=done, width=30),
            f"step {done}/{self._last_step}",
            f"{format_duration(now - self._started)} gone, ETA {self._remaining}",
        )
        lines: list[RenderableType] = [head]
        if self._report:
            losses = [*describe_loss(self._report), *([self._evaluation] if self._evaluation else [])]
            speeds = [*describe_speed(self._report), f"step {self._report.step_s:.3g} s"]
            lines += [Text("   ".join(losses)), Text("   ".join(speeds))]
        elif self._evaluation:
            lines.append(Text(self._evaluation))
        if self._phase:
            lines.append(Text(f"{self._phase} ({now - self._phase_started:.0f} s)", style="dim"))
        return Group(*lines)


def open_progress(
    *, title: str, first_step: int, last_step: int, log_every: int, process_id: int = 0, stream: TextIO | None = None
) -> Progress:
    """Chooses how to show a run: live on a terminal, plain lines elsewhere, nothing on processes other than 0.

    Args:
        title: name of the run.
        first_step: number of the first step that this process will train.
        last_step: number of the last one.
        log_every: steps between plain lines.
        process_id: number of this process.
        stream: where to show it; standard output when None.
    """
    if process_id != 0:
        return NullProgress()
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveProgress(title=title, first_step=first_step, last_step=last_step, stream=stream)
    return PlainProgress(first_step=first_step, last_step=last_step, log_every=log_every, stream=stream)
