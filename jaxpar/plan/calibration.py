"""From published runs to efficiency constants: one per (GPU, precision), and how well they carry over.

The share of the peak that would make a prediction exact is found for every run; a constant is the median of those of
its GPU and precision. A source counts by the square root of its runs, so that one long table does not decide alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from jaxpar.plan.efficiency import CONSTANTS, Constants, Shares, closest_share
from jaxpar.plan.published import PublishedLayout, predict_tokens_per_s

_LOWEST, _HIGHEST = 0.05, 2.0
"""Shares that are tried; above 1 a run was faster than the structure of the model allows."""

_HALVINGS = 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A published run and what it reached."""

    run: PublishedLayout
    tokens_per_s: float
    """Published tokens per second and GPU."""


def implied_share(measured: Measured, constants: Constants = CONSTANTS) -> float:
    """Share of the peak at which the prediction equals what was published."""
    low, high = _LOWEST, _HIGHEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if predict_tokens_per_s(measured.run, middle, constants) > measured.tokens_per_s:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def fit_shares(runs: Iterable[tuple[Measured, float]]) -> Shares:
    """Constants from runs and their implied shares.

    Only dense runs count: what holds mixtures of experts back (routing, exchanges, small products) is not the speed of
    matrix products, and varies by half between releases of one framework.
    """
    found: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for measured, share in runs:
        if not measured.run.shape.num_experts:
            found[measured.run.efficiency_key].append((measured.run.stack, share))
    return {key: round(_median(shares), 3) for key, shares in found.items()}


def leave_one_source_out(runs: list[Measured], constants: Constants = CONSTANTS) -> list[tuple[Measured, float]]:
    """Predicted tokens per second of every run, from constants fitted to the runs of all other frameworks."""
    implied = [(measured, implied_share(measured, constants)) for measured in runs]
    predicted = []
    for stack in sorted({measured.run.stack for measured in runs}):
        shares = fit_shares(pair for pair in implied if pair[0].run.stack != stack)
        predicted += [(m, _predict(m, shares, constants)) for m in runs if m.run.stack == stack]
    return predicted


def with_shares(runs: list[Measured], shares: Shares, constants: Constants = CONSTANTS) -> list[tuple[Measured, float]]:
    """Predicted tokens per second of every run, from given constants."""
    return [(measured, _predict(measured, shares, constants)) for measured in runs]


def _predict(measured: Measured, shares: Mapping[tuple[str, str], float], constants: Constants) -> float:
    share = closest_share(*measured.run.efficiency_key, shares=shares)
    return predict_tokens_per_s(measured.run, share, constants)


def _median(found: list[tuple[str, float]]) -> float:
    """Median of shares, each weighted so that a source with n runs counts sqrt(n)."""
    counts: dict[str, int] = defaultdict(int)
    for stack, _ in found:
        counts[stack] += 1
    points = sorted((share, 1 / math.sqrt(counts[stack])) for stack, share in found)
    half = sum(weight for _, weight in points) / 2
    seen = 0.0
    for share, weight in points:
        seen += weight
        if seen >= half - 1e-9:
            return share
    raise AssertionError("no runs")
