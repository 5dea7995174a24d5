"""What a run shows while it trains: the protocol, and plain lines for logs and pipes.

The live display of a terminal is in ``jaxpar.events.live``, where ``open_progress`` chooses between the two.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self, TextIO

from jaxpar.events.log import Terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """One finished optimizer step, in plain numbers."""

    step: int
    """Number of the step, from 1."""
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    """Tokens of the whole run per second."""
    step_s: float
    """Seconds from the end of the step before to the end of this one, waiting for data included."""
    data_wait_s: float
    """Part of ``step_s`` spent waiting for data."""
    device_wait_s: float = 0.0
    """Part of ``step_s`` spent waiting for the devices."""
    save_s: float = 0.0
    """Part of ``step_s`` spent waiting for a checkpoint."""
    host_s: float = 0.0
    """The rest of ``step_s``: what the loop's thread does itself, dispatching the step above all."""
    tflops: float | None = None
    """Model TFLOP/s of one device, or None where FLOPs are not counted."""
    mfu: float | None = None
    """``tflops`` as a share of the device's peak; None where the peak is not known."""
    memory_peak_bytes: int | None = None
    """Highest memory use of a local device so far; None where the backend does not report it."""
    memory_limit_bytes: int | None = None
    """Memory that the device's allocator may use."""


class Progress(Protocol):
    """Shows a run while it goes on; a context manager that ends the display."""

    def phase(self, text: str) -> None:
        """Says what happens between steps, such as compiling."""

    def step(self, report: StepReport) -> None:
        """Shows a finished step."""

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Shows a finished validation pass: mean loss over ``tokens`` tokens after ``step`` steps."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class NullProgress:
    """Shows nothing: for tests, and for processes other than 0."""

    def phase(self, text: str) -> None:
        pass

    def step(self, report: StepReport) -> None:
        pass

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PlainProgress:
    """One line per ``log_every`` steps, and for the first and the last, without control characters."""

    def __init__(self, *, first_step: int, last_step: int, log_every: int, stream: TextIO):
        self._first_step, self._last_step, self._log_every = first_step, last_step, log_every
        self._remaining = RemainingTime(last_step)
        self._terminal = Terminal(stream)

    def phase(self, text: str) -> None:
        self._terminal.line(text)

    def step(self, report: StepReport) -> None:
        self._remaining.update(report)
        if report.step % self._log_every and report.step not in (self._first_step, self._last_step):
            return
        parts = [f"step {report.step}/{self._last_step}", *describe_loss(report), *describe_speed(report)]
        self._terminal.line("  ".join([*parts, f"ETA {self._remaining}"]))

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        self._terminal.line(f"step {step}/{self._last_step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class RemainingTime:
    """Estimate of the time until the last step, from a running mean of step times.

    The first step is left out once a second one is there, since it compiles.
    """

    _WEIGHT = 0.1

    def __init__(self, last_step: int):
        self._last_step = last_step
        self._reports = 0
        self._mean_s = 0.0
        self._step = 0

    def update(self, report: StepReport) -> None:
        self._reports += 1
        self._step = report.step
        weight = 1.0 if self._reports <= 2 else self._WEIGHT
        self._mean_s += weight * (report.step_s - self._mean_s)

    def seconds(self) -> float | None:
        """Seconds left, or None until a step has shown how long steps take."""
        return None if self._reports < 2 else (self._last_step - self._step) * self._mean_s

    def __str__(self) -> str:
        seconds = self.seconds()
        return "-" if seconds is None else format_duration(seconds)


def describe_loss(report: StepReport) -> list[str]:
    """Loss, gradient norm and learning rate, one string each."""
    return [f"loss {report.loss:.4f}", f"grad norm {report.grad_norm:.3g}", f"lr {report.lr:.2e}"]


def describe_speed(report: StepReport) -> list[str]:
    """Tokens per second, TFLOP/s, MFU, share of time waiting for data, memory; the unknown is "n/a" or left out."""
    parts = [f"{report.tokens_per_s:,.0f} tokens/s"]
    if report.tflops is not None:
        small = report.tflops < 0.1
        parts.append(f"{report.tflops * 1000:.3g} GFLOP/s" if small else f"{report.tflops:.3g} TFLOP/s")
    parts.append("MFU n/a" if report.mfu is None else f"MFU {report.mfu:.1%}")
    waited = report.data_wait_s / report.step_s if report.step_s > 0 else 0.0
    parts.append(f"data wait {waited:.1%}")
    if report.memory_peak_bytes is not None:
        memory = f"memory {report.memory_peak_bytes / 2**30:.1f}"
        parts.append(
            f"{memory} GiB"
            if not report.memory_limit_bytes
            else f"{memory}/{report.memory_limit_bytes / 2**30:.1f} GiB"
        )
    return parts


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days in front where there are any."""
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {text}" if days else text
