"""Rows of several sources in fixed proportions: which source each sample of a run is from, by its index alone.

Nothing is drawn at random. The order of sources repeats with the period of the weights, and every prefix of it has each
source within one row of its share. Each source has epochs of its own: its rows come once, in a permutation of the
epoch, before any of them comes again. So a position is one number, the index of the next sample, and a run goes on from
it with another global batch size, mesh or process count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.data.order import LastBatch, Position, not_enough_rows, order_of_epoch

MAX_PERIOD = 100_000
"""Samples after which the order of sources repeats, at most; a table of this length is kept."""


def exact_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest integers in the proportion of ``weights``, which are taken as the decimals they print as.

    Raises:
      ConfigError: they add up to more than ``MAX_PERIOD``.
    """
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * denominator) for fraction in fractions]
    shares = tuple(share // math.gcd(*shares) for share in shares)
    if sum(shares) > MAX_PERIOD:
        message = f"are {' : '.join(map(str, shares))} in integers, which add up to more than {MAX_PERIOD:,}"
        remedy = "write them with fewer digits, e.g. [0.7, 0.3] or [7, 3]"
        raise ConfigError([Problem(key="data.weights", value=tuple(weights), message=message, remedy=remedy)])
    return shares


def interleave(shares: Sequence[int]) -> np.ndarray:
    """Returns the source of each sample of a period, int64 ``[sum(shares)]``: source k comes ``shares[k]`` times.

    Of the first n samples, source k has n shares[k] / sum(shares), rounded one way or the other: the algorithm of
    Tijdeman, "The chairman assignment problem" (1980), whose deviation is below 1 - 1 / (2 K - 2) for K sources.
    """
    if len(shares) == 1:
        return np.zeros(shares[0], np.int64)
    period, unit = sum(shares), 2 * len(shares) - 2
    # Exact: urgencies are divided by the shares, and so multiplied by what the shares lack to a common multiple.
    multiple = math.lcm(*shares)
    inverses = [multiple // share for share in shares]
    # What each source is behind, in units of 1 / (period unit) of a sample.
    behind = [0] * len(shares)
    sources = np.zeros(period, np.int64)
    for n in range(period):
        behind = [deficit + unit * share for deficit, share in zip(behind, shares, strict=True)]
        due = [k for k, deficit in enumerate(behind) if deficit >= period]
        # The one that would soonest be behind by all that is allowed.
        chosen = min(due, key=lambda k: (period * (unit - 1) - behind[k]) * inverses[k])
        behind[chosen] -= unit * period
        sources[n] = chosen
    return sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources whose rows lie one after the other in a dataset, and their proportions."""

    names: tuple[str, ...]
    """For people."""
    num_rows: tuple[int, ...]
    """Rows of each."""
    shares: tuple[int, ...]
    """Of the samples, as integers without a common factor."""


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """The global order of a mixture: endless, and one function of these fields and the sample's index.

    Positions are ``Position(0, index of the next sample)``.
    """

    mixture: Mixture
    seed: int
    shuffle: bool

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(self.mixture.num_rows)

    def batch(
        self, position: Position, index: int, global_batch_size: int, last_batch: LastBatch
    ) -> tuple[np.ndarray, Position, Position]:
        """Returns batch ``index`` counted from ``position``: its row ids, where its first row is, and where it ends.

        ``last_batch`` does nothing: a mixture has no end.

        Raises:
          ValueError: ``position`` is not one of a mixture.
        """
        del last_batch
        if position.epoch or position.offset < 0:
            raise ValueError(f"{position} is not a place in a mixture, which has one endless epoch")
        start = position.offset + index * global_batch_size
        stop = start + global_batch_size
        return self.rows(start, stop), Position(0, start), Position(0, stop)

    def next_batch(
        self, position: Position, global_batch_size: int, last_batch: LastBatch
    ) -> tuple[np.ndarray, Position]:
        """Returns the row ids of the batch at ``position``, int64 ``[global_batch_size]``, and where it ends."""
        ids, _, after = self.batch(position, 0, global_batch_size, last_batch)
        return ids, after

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the row ids of samples ``start`` to ``stop`` (excluded), int64 ``[stop - start]``."""
        cycles, places = np.divmod(np.arange(start, stop), len(self._sources))
        sources = self._sources[places]
        rows = np.empty(stop - start, np.int64)
        for k, (size, share) in enumerate(zip(self.mixture.num_rows, self.mixture.shares, strict=True)):
            mine = sources == k
            epochs, offsets = np.divmod(cycles[mine] * share + self._earlier[places[mine]], size)
            found = np.empty(len(epochs), np.int64)
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                key = (self.seed, epoch, k) if self.shuffle else None
                found[here] = order_of_epoch(offsets[here], size, key)
            rows[mine] = sum(self.mixture.num_rows[:k]) + found
        return rows

    def samples_of_sources(self, index: int) -> tuple[int, ...]:
        """Returns how many of the samples before ``index`` each source has given."""
        cycles, place = divmod(index, len(self._sources))
        counts = np.bincount(self._sources[:place], minlength=len(self.mixture.shares)).tolist()
        return tuple(cycles * share + count for share, count in zip(self.mixture.shares, counts, strict=True))

    def check(self, global_batch_size: int, last_batch: LastBatch) -> None:
        """Any batch can be filled."""

    def check_enough(self, position: Position, num_steps: int, global_batch_size: int, last_batch: LastBatch) -> None:
        """Raises ConfigError where a row would have to come again within ``num_steps`` batches from ``position``."""
        del last_batch
        needed = self.samples_of_sources(position.offset + num_steps * global_batch_size)
        problems = []
        for k, (name, size) in enumerate(zip(self.mixture.names, self.mixture.num_rows, strict=True)):
            if needed[k] > size:
                last = self._index_of(k, size) - position.offset
                problems.append(not_enough_rows(name, size, needed[k], max(0, last) // global_batch_size, num_steps))
        if problems:
            raise ConfigError(problems)

    def notes(
        self, position: Position, num_steps: int | None, global_batch_size: int, last_batch: LastBatch
    ) -> list[str]:
        """What the user should be told before the run: proportions, and the epochs of each source."""
        del last_batch
        period, mixture = len(self._sources), self.mixture
        parts = [
            f"{share / period:.4g} {name} ({size:,} rows)"
            for name, size, share in zip(mixture.names, mixture.num_rows, mixture.shares, strict=True)
        ]
        notes = [f"mixture: {', '.join(parts)}; exact over every {period:,} samples"]
        if num_steps:
            end = Position(0, position.offset + num_steps * global_batch_size)
            notes.append(f"at the end of this run: {self.progress(end)}")
        return notes

    def progress(self, position: Position) -> str:
        """How often each source has been seen, in words."""
        counts = self.samples_of_sources(position.offset)
        parts = [
            f"{count / size:.2f} epochs of {name}"
            for count, size, name in zip(counts, self.mixture.num_rows, self.mixture.names, strict=True)
        ]
        return f"sample {position.offset:,}: {', '.join(parts)}"

    def _index_of(self, source: int, sample: int) -> int:
        """Index of a source's sample number ``sample``, from 0."""
        cycles, nth = divmod(sample, self.mixture.shares[source])
        return cycles * len(self._sources) + int(np.flatnonzero(self._sources == source)[nth])

    @functools.cached_property
    def _sources(self) -> np.ndarray:
        return interleave(self.mixture.shares)

    @functools.cached_property
    def _earlier(self) -> np.ndarray:
        """How many samples of its source come before each sample of a period."""
        earlier = np.empty(len(self._sources), np.int64)
        for k, share in enumerate(self.mixture.shares):
            earlier[self._sources == k] = np.arange(share)
        return earlier
