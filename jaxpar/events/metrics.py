"""Metrics of a run: one JSON object per step and line, repeated to TensorBoard and Weights & Biases when asked.

The file is the record; the other sinks are views of it. Values are plain numbers (Python or numpy scalars): a device
array is refused, because writing it would wait for the device in the middle of the training loop.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from jaxpar.config.schema import ObserveConfig
from jaxpar.events.sinks import MetricsSink, open_sinks

TRAIN_KEYS = frozenset({"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "data_wait_s"})
"""Keys of every row of metrics.jsonl; ``step_s`` is the whole step in seconds, ``data_wait_s`` its wait for data.

Runs add the other parts of a step's time (``Stopwatch``), FLOP/s, MFU and memory where they are known."""
EVAL_KEYS = frozenset({"step", "eval_loss", "eval_tokens"})
"""Keys of every row of eval.jsonl."""

type Value = bool | int | float | str | Sequence[int] | None


class MetricsLog:
    """A file of JSON objects, one per line, each with a ``step``; every line is flushed as it is written.

    NaN and infinities are written as ``null``, because JSON has no word for them and strict readers refuse ``NaN``.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None):
        """Opens ``path`` for appending, first dropping what a resumed run will write again.

        Args:
            path: the file; its directory must exist.
            resume_step: the last step that the run keeps: rows of later steps are dropped. None starts an empty file.

        Raises:
            ValueError: a line other than the last is not a row of metrics. (A last line cut off by a crash is dropped.)
        """
        self.path = Path(path)
        self.dropped_rows = _drop_rows_after(self.path, -1 if resume_step is None else resume_step)
        """Rows removed on opening: steps that will be trained again, and a last line cut off by a crash."""
        self._file = self.path.open("ab", buffering=0)  # nothing is left over for closing to fail on

    def write(self, row: Mapping[str, Value]) -> None:
        """Appends one row.

        Raises:
            TypeError: a value is not a plain number, string or sequence of numbers.
            OSError: the disk is full; the line may be cut off.
        """
        assert "step" in row, f"a row of metrics needs a step, got {sorted(row)}"
        text = json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) + "\n"
        line = memoryview(text.encode())
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunMetrics:
    """Everything that a run records in numbers: metrics.jsonl, eval.jsonl and the sinks that the config asks for."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        observe: ObserveConfig,
        *,
        resume_step: int | None,
        config: Mapping[str, object] | None = None,
    ):
        """Opens the files and sinks of the run in ``directory``; only process 0 of a run may do so.

        Args:
            directory: the run's directory, which exists.
            observe: which sinks are wanted.
            resume_step: step of the restored checkpoint; later rows are dropped. None for a run from the start.
            config: the resolved config, shown by Weights & Biases.

        Raises:
            ConfigError: a sink is asked for whose package is not installed.
        """
        directory = Path(directory)
        self._sinks: tuple[MetricsSink, ...] = open_sinks(observe, directory, resume_step=resume_step, config=config)
        self._train = MetricsLog(directory / "metrics.jsonl", resume_step=resume_step)
        self._eval = MetricsLog(directory / "eval.jsonl", resume_step=resume_step)
        self.dropped_rows = self._train.dropped_rows
        """Rows of metrics.jsonl that were dropped because their steps come again."""

    def train(self, row: Mapping[str, Value]) -> None:
        """Records one optimizer step: at least ``TRAIN_KEYS``, and ``ids`` when sample ids are asked for."""
        assert row.keys() >= TRAIN_KEYS, f"missing {sorted(TRAIN_KEYS - row.keys())}"
        self._train.write(row)
        self._repeat("train", row)

    def evaluation(self, row: Mapping[str, Value]) -> None:
        """Records one validation pass; ``row`` has at least ``EVAL_KEYS``."""
        assert row.keys() >= EVAL_KEYS, f"missing {sorted(EVAL_KEYS - row.keys())}"
        self._eval.write(row)
        self._repeat("eval", row)

    def _repeat(self, group: str, row: Mapping[str, Value]) -> None:
        scalars = {f"{group}/{key}": value for key, value in row.items() if key != "step" and _is_scalar(value)}
        for sink in self._sinks:
            sink.write(row["step"], scalars)

    def close(self) -> None:
        for part in (self._train, self._eval, *self._sinks):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def json_number(value: float | None) -> float | None:
    """A number as JSON has it, which has no word for NaN and infinity: None."""
    return value if value is not None and math.isfinite(value) else None


def _is_scalar(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return json_number(float(value))
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    raise TypeError(f"metrics are plain numbers; got a {type(value).__name__}")


def _drop_rows_after(path: Path, last_step: int) -> int:
    """Rewrites the file without rows of steps above ``last_step`` and returns how many lines went.

    The rewritten file takes the place of the old one in a single rename, so that a crash leaves one or the other.
    """
    if not path.exists():
        return 0
    replacement = path.with_name(path.name + ".part")
    dropped = 0
    with open(path, "rb") as old, open(replacement, "wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n") or last_step < 0:
                dropped += 1
            elif _step_of(line, path, number) <= last_step:
                new.write(line)
            else:
                dropped += 1
        new.flush()
        os.fsync(new.fileno())
    if dropped:
        os.replace(replacement, path)
    else:
        replacement.unlink()
    return dropped


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path}, line {number} is not a row of metrics: {line[:80]!r}; "
            "repair or remove that line, or move the file away, and start again"
        ) from None
