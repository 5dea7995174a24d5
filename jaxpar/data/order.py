"""The global order of rows: what a position means, and which rows come next. The same on every mesh and process count.

Positions count global samples (rows), not batches, microbatches or anything per process: so a run may go on with
another global batch size, accumulation, mesh or process count at exactly the next row.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

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


class Order(Protocol):
    """Which row comes when."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""

    def batch(
        self, position: Position, index: int, global_batch_size: int, last_batch: LastBatch
    ) -> tuple[np.ndarray, Position, Position]:
        """Returns batch ``index`` counted from ``position``: its row ids, where its first row is, and where it ends."""

    def check(self, global_batch_size: int, last_batch: LastBatch) -> None:
        """Raises ConfigError where no batch would ever come."""

    def check_enough(self, position: Position, num_steps: int, global_batch_size: int, last_batch: LastBatch) -> None:
        """Raises ConfigError where a row would have to come again within ``num_steps`` batches from ``position``."""

    def notes(
        self, position: Position, num_steps: int | None, global_batch_size: int, last_batch: LastBatch
    ) -> list[str]:
        """What the user should be told before the run."""

    def progress(self, position: Position) -> str:
        """How often the data has been seen, in words."""


def order_of_epoch(places: np.ndarray, num_rows: int, key: tuple[int, ...] | None) -> np.ndarray:
    """Returns the rows at ``places`` of an epoch, int64 ``[n]``; ``key`` names its permutation, None is no shuffle."""
    return places if key is None else permuted(places, num_rows, key)


def not_enough_rows(name: str, num_rows: int, needed: int, enough_for: int, num_steps: int) -> Problem:
    """The problem of a source that ends before the run, where ``data.repeat`` is off."""
    message = f"{name} has {num_rows:,} rows, and this run would take {needed:,}: enough for {enough_for:,} steps"
    remedy = f"let its rows come again with data.repeat=true, or take {enough_for:,} steps instead of {num_steps:,}"
    return Problem(key="data.repeat", value=False, message=message, remedy=remedy)


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
        return order_of_epoch(places, self.num_rows, (self.seed, epoch) if self.shuffle else None)

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

    def check_enough(self, position: Position, num_steps: int, global_batch_size: int, last_batch: LastBatch) -> None:
        """Raises ConfigError where a row would have to come again within ``num_steps`` batches from ``position``."""
        left = _num_batches(self.num_rows - position.offset, global_batch_size, last_batch)
        enough_for = left if position.epoch == 0 else 0
        if num_steps > enough_for:
            needed = position.offset + num_steps * global_batch_size
            raise ConfigError([not_enough_rows("the data", self.num_rows, needed, enough_for, num_steps)])

    def notes(
        self, position: Position, num_steps: int | None, global_batch_size: int, last_batch: LastBatch
    ) -> list[str]:
        """What the user should be told before the run: rows that are left out, or padded."""
        del position, num_steps
        remainder = self.num_rows % global_batch_size
        if not remainder:
            return []
        batches = f"{self.num_rows:,} rows are not a multiple of the global batch size {global_batch_size:,}"
        if last_batch == "drop":
            which = "different ones each epoch" if self.shuffle else "the same ones each epoch"
            return [f"{batches}: {remainder:,} rows ({which}) are left out of each epoch"]
        padded = global_batch_size - remainder
        return [f"{batches}: the last batch of each epoch is padded with {padded:,} rows of weight 0"]

    def progress(self, position: Position) -> str:
        """How often the data has been seen, in words."""
        epochs = position.epoch + position.offset / self.num_rows
        return f"{epochs:.2f} epochs of the data ({self.num_rows:,} rows)"

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
