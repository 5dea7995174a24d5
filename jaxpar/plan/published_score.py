"""How far predictions are from published runs: errors by class, order of layouts, and whether they fit."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence

from jaxpar.plan.calibration import Measured
from jaxpar.plan.published import PublishedLayout
from jaxpar.plan.published_memory import call_fit

CLASSES = ("dense_short", "dense_long_or_blackwell", "moe")
"""dense_short: dense models on Hopper or Ampere with rows up to 16,384 tokens."""

CLEAR = 1.2
"""Pairs of layouts are asked for their order if one is at least this much faster."""


def time_errors(predicted: Sequence[tuple[Measured, float]]) -> dict[str, dict[str, float]]:
    """Per class: runs, median and 90th percentile of |predicted / published - 1|."""
    scores = {}
    for name in CLASSES:
        errors = sorted(abs(p / m.tokens_per_s - 1) for m, p in predicted if m.run.error_class == name)
        scores[name] = {"n": len(errors), "median": _quantile(errors, 0.5), "p90": _quantile(errors, 0.9)}
    return scores


def rank_order(predicted: Sequence[tuple[Measured, float]]) -> dict[str, int]:
    """Pairs of layouts of one task whose published speeds differ clearly, and how many are predicted in that order.

    A task is a group of the table; without one, runs of one source with the same model, GPUs and row length.
    """
    tasks = defaultdict(list)
    for measured, tokens_per_s in predicted:
        run = measured.run
        alike = (run.source, run.shape.name, run.cluster.gpu.name, run.cluster.num_devices, run.layout.seq_len)
        tasks[run.group or alike].append((measured.tokens_per_s, tokens_per_s))
    pairs = right = 0
    for runs in tasks.values():
        for (first, predicted_first), (second, predicted_second) in itertools.combinations(runs, 2):
            if max(first, second) >= CLEAR * min(first, second):
                pairs += 1
                right += (first > second) == (predicted_first > predicted_second)
    return {"pairs": pairs, "right": right}


def fit_calls(runs: Sequence[tuple[PublishedLayout, bool]]) -> dict[str, int]:
    """Runs of which it is known whether they fit, those that are called, and those called rightly."""
    calls = [(call_fit(run), fits) for run, fits in runs]
    called = [(call, fits) for call, fits in calls if call is not None]
    return {"rows": len(calls), "called": len(called), "right": sum(call == fits for call, fits in called)}


def _quantile(values: Sequence[float], share: float) -> float | None:
    """By linear interpolation; None without values."""
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
