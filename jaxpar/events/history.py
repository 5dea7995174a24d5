"""What runs have recorded, read back: metrics.jsonl and eval.jsonl, also of runs that were cut off or damaged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.events.stopwatch import PARTS

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"


@dataclasses.dataclass(frozen=True)
class Series:
    """One number over the steps of a run; steps ascend, values are finite."""

    steps: Sequence[int]
    values: Sequence[float]

    def thinned(self, max_points: int) -> Series:
        """At most ``max_points`` points: means of as many stretches of steps."""
        if len(self.steps) <= max_points:
            return self
        cuts = [len(self.steps) * i // max_points for i in range(max_points + 1)]
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        return Series(
            [self.steps[(p.start + p.stop) // 2] for p in parts],
            [math.fsum(self.values[p]) / (p.stop - p.start) for p in parts],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The records of one run."""

    name: str
    """The run as it was asked for."""
    series: Mapping[str, Series]
    """By key of the rows, in the order in which keys first appear; those of eval.jsonl come last."""
    seconds: Mapping[str, float]
    """Seconds of all steps by the keys of ``jaxpar.events.stopwatch.PARTS``, as far as they were recorded."""
    notes: tuple[str, ...]
    """What the reader should know: damaged lines, values that are not finite."""


def read_history(run: str) -> History:
    """The records of a run.

    A last line that a crash cut off is passed over; so are lines that are not rows of metrics, with a note. Where steps
    come again (a resumed run whose rows were not dropped), the later rows count.

    Args:
        run: a run directory, or a file of metrics.

    Raises:
        ConfigError: there are no metrics, or none of a step.
    """
    path = _metrics_file(run)
    notes: list[str] = []
    rows = _rows(path, notes)
    if not rows:
        raise _problem(run, f"{path} has no step yet", "wait for the first step, or name another run")
    evaluations_path = path.with_name(EVALUATIONS)
    has_evaluations = path.name == METRICS and evaluations_path.is_file()
    evaluations = _rows(evaluations_path, notes) if has_evaluations else {}
    seconds = {key: math.fsum(row[key] for row in rows.values() if _is_finite(row.get(key))) for key in PARTS}
    seconds["eval_s"] = math.fsum(row["eval_s"] for row in evaluations.values() if _is_finite(row.get("eval_s")))
    return History(
        name=run,
        series={**_series(rows, notes, path), **_series(evaluations, notes, evaluations_path)},
        seconds=seconds if any("host_s" in row for row in rows.values()) else {},
        notes=tuple(notes),
    )


def _metrics_file(run: str) -> Path:
    path = Path(run)
    if path.is_file():
        return path
    if (path / METRICS).is_file():
        return path / METRICS
    if not path.exists():
        raise _problem(run, "there is no such run", "name the run.dir of a run, or its metrics.jsonl")
    runs = sorted(str(found.parent) for found in path.glob(f"*/{METRICS}")) if path.is_dir() else []
    remedy = f"runs below it: {', '.join(runs[:8])}" if runs else "name the run.dir of a run that has trained a step"
    raise _problem(run, f"it has no {METRICS}", remedy)


def _problem(run: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="RUN", value=run, message=message, remedy=remedy)])


def _rows(path: Path, notes: list[str]) -> dict[int, Mapping[str, object]]:
    """Rows by step, ascending; what cannot be read is left out and noted."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise _problem(str(path), f"it cannot be read: {error.strerror}", "check its permissions") from error
    rows: dict[int, Mapping[str, object]] = {}
    damaged: list[int] = []
    again = 0
    *lines, last = text.split("\n")
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            damaged.append(number)
            continue
        again += row["step"] in rows
        rows[row["step"]] = row
    if last:
        notes.append(f"{path}: the last line was cut off and is left out")
    if damaged:
        where = ", ".join(map(str, damaged[:5])) + (" and others" if len(damaged) > 5 else "")
        notes.append(f"{path}: {_count(len(damaged), 'line')} left out that hold no row of metrics (line {where})")
    if again:
        notes.append(f"{path}: {_count(again, 'step')} recorded more than once; the last row of each counts")
    return dict(sorted(rows.items()))


def _row(line: str) -> Mapping[str, object] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if is_row else None


def _series(rows: Mapping[int, Mapping[str, object]], notes: list[str], path: Path) -> dict[str, Series]:
    points: dict[str, list[tuple[int, float]]] = {}
    missing: dict[str, int] = {}
    for step, row in rows.items():
        for key, value in _numbers(row):
            if _is_finite(value):
                points.setdefault(key, []).append((step, float(value)))
            else:
                missing[key] = missing.get(key, 0) + 1
    for key, count in missing.items():
        notes.append(f"{path}: {key} is not finite in {_count(count, 'row')}")
    return {key: Series(*map(list, zip(*found, strict=True))) for key, found in points.items()}


def _numbers(row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Every number of a row but its step; None stands for one that is not finite."""
    for key, value in row.items():
        if key != "step" and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
            yield key, value


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
