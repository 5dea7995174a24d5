"""Where the time of the training loop goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

Part = Literal["data_wait", "device_wait", "save", "eval"]

PARTS: dict[str, str] = {
    "device_wait_s": "device",
    "data_wait_s": "data",
    "host_s": "host",
    "save_s": "saving",
    "eval_s": "validation",
}
"""Keys of the parts of a run's time, and what they are called."""


class Stopwatch:
    """Splits the time of the loop's thread into parts, per step and in all.

    A step's time goes from the end of the step before to its own end, validation left out: ``step_s``. It is spent in
    waiting for a batch (``data_wait_s``), waiting for the devices (``device_wait_s``), waiting for a checkpoint
    (``save_s``), and in everything else that the thread does, dispatching the step above all (``host_s``). While the
    thread waits for the devices the run is as fast as they are.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._started = self._row_started = clock()
        self._row: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """The block is one of the parts."""
        started = self._clock()
        try:
            yield
        finally:
            self.add(part, self._clock() - started)

    def add(self, part: Part, seconds: float) -> None:
        """``seconds`` that have just gone by were one of the parts."""
        key = f"{part}_s"
        self._row[key] = self._row.get(key, 0.0) + seconds
        self._totals[key] = self._totals.get(key, 0.0) + seconds

    def row(self) -> dict[str, float]:
        """Seconds since the last row: ``step_s`` and its parts, which add up to it."""
        now = self._clock()
        step_s = now - self._row_started - self._row.pop("eval_s", 0.0)
        parts = {key: self._row.get(key, 0.0) for key in ("data_wait_s", "device_wait_s", "save_s")}
        self._row_started, self._row = now, {}
        return {"step_s": step_s, **parts, "host_s": max(0.0, step_s - sum(parts.values()))}

    def totals(self) -> dict[str, float]:
        """Seconds since the start: ``total_s`` and its parts, by the keys of ``PARTS``."""
        total_s = self._clock() - self._started
        parts = {key: self._totals.get(key, 0.0) for key in PARTS if key != "host_s"}
        return {"total_s": total_s, **parts, "host_s": max(0.0, total_s - sum(parts.values()))}


def describe_shares(seconds: dict[str, float]) -> str:
    """Parts of a run's time as shares of their sum: "device 95.1%, data 1.2%"; parts below 0.05% are left out."""
    whole = sum(seconds.get(key, 0.0) for key in PARTS)
    shares = {name: seconds.get(key, 0.0) / whole for key, name in PARTS.items()} if whole > 0 else {}
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)
