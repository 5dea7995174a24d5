"""The global order of rows: what a position means, and which rows come next. The same on every mesh and process count.

Positions count global samples (rows), not batches, microbatches or anything per process: so a run may go on with
another global batch size, accumulation, mesh or process count at exactly the next row.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.data.permutation import permuted

LastBatch = Literal["drop", "pad"]
"""What happens to rows at the end of an epoch that do not fill a batch: left out, or padded with rows of weight 0."""

PADDED = -1
"""Row id of a padded row."""


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """A place in the order: ``offset`` samples into ``epoch``."""

    epoch: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class GlobalOrder:
    """One seeded permutation of all rows per epoch; it depends on nothing but these fields and the epoch.

    Raises:
      ConfigError: there are no rows.
    """

    num_rows: int
    seed: int
    shuffle: bool

    def __post_init__(self):
        if self.num_rows == 0:
            remedy = "check data.paths, data.num_samples and data.validation_fraction"
            raise ConfigError([Problem(key="data", value=0, message="the dataset has 0 rows", remedy=remedy)])

    def row(self, epoch: int, i: int) -> int:
        """Returns the row at place ``i`` of ``epoch``."""
        return int(self.rows(epoch, i, i + 1)[0])

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the rows at places ``start`` to ``stop`` (excluded) of ``epoch``, int64 ``[stop - start]``."""
        assert 0 <= start <= stop <= self.num_rows
        places = np.arange(start, stop)
        return permuted(places, self.num_rows, (self.seed, epoch)) if self.shuffle else places

    def batches_per_epoch(self, global_batch_size: int, last_batch: LastBatch) -> int:
        """Returns the batches of an epoch that is begun at its start."""
        return _num_batches(self.num_rows, global_batch_size, last_batch)

    def next_batch(
        self, position: Position, global_batch_size: int, last_batch: LastBatch
    ) -> tuple[np.ndarray, Position]:
        """Returns the row ids of the batch at ``position``, int64 ``[global_batch_size]``, and the position after it.

        Rows left of the epoch that do not fill a batch are left out (drop: the batch is the first of the next epoch),
        or followed by ``PADDED`` ids (pad: the batch ends the epoch).

        Raises:
          ConfigError: drop, and an epoch does not fill a batch.
          ValueError: ``position`` is beyond the rows.
        """
        ids, _, after = self.batch(position, 0, global_batch_size, last_batch)
        return ids, after

    def batch(
        self, position: Position, index: int, global_batch_size: int, last_batch: LastBatch
    ) -> tuple[np.ndarray, Position, Position]:
        """Returns batch ``index`` counted from ``position``: its row ids, where its first row is, and where it ends.

        The same as ``index + 1`` calls of ``next_batch``, in constant time, so that threads can prepare batches in any
        order.
        """
        self.check(global_batch_size, last_batch)
        before = self._batch_start(position, index, global_batch_size, last_batch)
        stop = min(before.offset + global_batch_size, self.num_rows)
        ids = np.full(global_batch_size, PADDED, np.int64)
        ids[: stop - before.offset] = self.rows(before.epoch, before.offset, stop)
        after = Position(before.epoch, stop) if stop < self.num_rows else Position(before.epoch + 1, 0)
        return ids, before, after

    def check(self, global_batch_size: int, last_batch: LastBatch) -> None:
        """Raises ConfigError where no batch would ever come: drop, and fewer rows than a batch."""
        if last_batch == "pad" or self.num_rows >= global_batch_size:
            return
        message = (
            f"{self.num_rows} < {global_batch_size}: an epoch has {self.num_rows} rows, less than one global batch"
        )
        remedy = f'lower it to at most {self.num_rows}, give more data, or pad with data.last_batch = "pad"'
        key = "train.global_batch_size"
        raise ConfigError([Problem(key=key, value=global_batch_size, message=message, remedy=remedy)])

    def _batch_start(self, position: Position, index: int, global_batch_size: int, last_batch: LastBatch) -> Position:
        remaining = self.num_rows - position.offset
        if position.epoch < 0 or not 0 <= remaining <= self.num_rows:
            raise ValueError(f"{position} is not within epochs of {self.num_rows} rows: the data has changed")
        left_in_epoch = _num_batches(remaining, global_batch_size, last_batch)
        if index < left_in_epoch:
            return Position(position.epoch, position.offset + index * global_batch_size)
        epochs, index = divmod(index - left_in_epoch, self.batches_per_epoch(global_batch_size, last_batch))
        return Position(position.epoch + 1 + epochs, index * global_batch_size)


def _num_batches(num_rows: int, global_batch_size: int, last_batch: LastBatch) -> int:
    return num_rows // global_batch_size if last_batch == "drop" else -(num_rows // -global_batch_size)
