"""Global batches of the order as sharded arrays, prepared ahead of the step by Grain's threads.

Every process computes the same row ids for a batch and reads the rows that its own devices hold, as the batch sharding
says. So a batch is the same, row for row, on every mesh and process count, and there is no per-process state.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Hashable, Iterator, Mapping

import grain
import jax
import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.data.order import PADDED, GlobalOrder, LastBatch, Order, Position
from jaxpar.data.packing import ROW_DTYPES
from jaxpar.data.rows import Rows

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One global batch: B rows of S tokens as M microbatches; microbatch m holds rows m B / M to (m + 1) B / M."""

    arrays: dict[str, jax.Array]
    """tokens, labels, positions, segment_ids (int32) and weights (float32), each ``[M, B / M, S]``, sharded."""
    ids: np.ndarray
    """Row ids of the dataset, permuted, in row order, int64 ``[B]``; -1 for a padded row (weight 0, segment 0)."""
    before: Position
    """Where the first row is."""
    after: Position
    """Where the next batch goes on; what a checkpoint stores."""


def rows_of_devices(index_map: Mapping[Hashable, Index], num_microbatches: int, rows_per_microbatch: int) -> np.ndarray:
    """Returns which rows of a global batch a set of devices holds, int64, sorted, each once.

    Args:
      index_map: what each of the devices holds of an array ``[num_microbatches, rows_per_microbatch, seq_len]``, as
        ``Sharding.devices_indices_map`` gives it.
      num_microbatches: size of the first dim.
      rows_per_microbatch: size of the second dim.
    """
    held = np.zeros((num_microbatches, rows_per_microbatch), bool)
    for microbatches, rows, *_ in index_map.values():
        held[microbatches, rows] = True
    return np.flatnonzero(held)


class Loader(Iterator[Batch]):
    """Iterates over global batches, from ``position`` on, for ever or for ``num_steps`` batches.

    Args:
      dataset: rows by index; read by several threads at once.
      order: which row comes when; as many rows as ``dataset``.
      position: where to go on.
      global_batch_size: rows per batch over all devices and microbatches (B).
      microbatches: M.
      sharding: of arrays ``[M, B / M, S]``, over any mesh; devices and processes may hold the same rows.
      last_batch: what happens at the end of an epoch.
      num_threads: threads that prepare batches, at most one per batch of ``prefetch``.
      prefetch: batches that are prepared, and on the devices, ahead of their use.
      num_steps: number of batches; None for no end.
      repeat: whether rows may come again; needs ``num_steps`` if not.

    Raises:
      ConfigError: the batch does not divide by the microbatches or by the sharding, an epoch does not fill a batch, or
        ``num_steps`` batches would repeat rows that must not be.
    """

    def __init__(
        self,
        dataset: Rows,
        *,
        order: Order,
        position: Position,
        global_batch_size: int,
        microbatches: int,
        sharding: jax.sharding.Sharding,
        last_batch: LastBatch,
        num_threads: int,
        prefetch: int,
        num_steps: int | None = None,
        repeat: bool = True,
    ):
        assert len(dataset) == order.num_rows
        order.check(global_batch_size, last_batch)
        row_types = _row_types(dataset)
        shape = _batch_shape(global_batch_size, microbatches, row_types, sharding)
        assembler = _Assembler(dataset, row_types, shape, sharding)

        # Holds no reference to the loader: dropping the loader drops the iterator, and with it Grain's threads.
        def load(step: int) -> Batch:
            ids, before, after = order.batch(position, step, global_batch_size, last_batch)
            return Batch(assembler.arrays(ids), ids, before, after)

        # Fails here and not in a thread where position does not belong to this order.
        order.batch(position, 0, global_batch_size, last_batch)
        if not repeat:
            assert num_steps is not None
            order.check_enough(position, num_steps, global_batch_size, last_batch)
        options = grain.ReadOptions(num_threads=min(num_threads, prefetch), prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(sys.maxsize if num_steps is None else num_steps)
        self._batches = iter(steps.map(load).to_iter_dataset(options))
        self.wait_s = 0.0
        """Seconds that the last ``next`` waited for its batch."""
        self.notes = order.notes(position, num_steps, global_batch_size, last_batch)
        """What the user should be told about rows that are left out, padded or repeated."""

    def __next__(self) -> Batch:
        """Returns the next batch. What a thread raised while preparing it is raised here, and the loader is closed."""
        start = time.perf_counter()
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception:
            # Grain would go on after the batch that failed, which would then be missing without a word.
            self.close()
            raise
        finally:
            self.wait_s = time.perf_counter() - start

    def close(self) -> None:
        """Stops preparing batches; a later ``next`` is an error. May be called twice."""
        self._batches.close()


def validation_loader(
    dataset: Rows,
    *,
    global_batch_size: int,
    microbatches: int,
    sharding: jax.sharding.Sharding,
    num_threads: int,
    prefetch: int,
    num_batches: int = 0,
    last_batch: LastBatch = "pad",
) -> Loader:
    """Returns one pass over ``dataset`` in order: every row exactly once, the last batch padded with weight 0.

    ``num_batches`` ends the pass early; 0 means the whole dataset. Rows that have no weight to be padded with are left
    out with ``last_batch`` drop. The other arguments are those of ``Loader``.
    """
    order = GlobalOrder(len(dataset), seed=0, shuffle=False)
    whole = order.batches_per_epoch(global_batch_size, last_batch)
    return Loader(
        dataset,
        order=order,
        position=Position(),
        global_batch_size=global_batch_size,
        microbatches=microbatches,
        sharding=sharding,
        last_batch=last_batch,
        num_threads=num_threads,
        prefetch=prefetch,
        num_steps=min(num_batches, whole) if num_batches else whole,
    )


RowTypes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of every array of a row."""


def _row_types(dataset: Rows) -> RowTypes:
    """Those of tokens, unless the dataset has rows of its own kind."""
    own = getattr(dataset, "row_types", None)
    return own or {name: ((dataset.seq_len,), dtype) for name, dtype in ROW_DTYPES.items()}


class _Assembler:
    """Reads this process's rows of a batch and lays them out on its devices. Has no state that a batch changes."""

    def __init__(self, dataset: Rows, row_types: RowTypes, shape: tuple[int, int], sharding: jax.sharding.Sharding):
        self._dataset = dataset
        self._row_types = row_types
        self._shape = shape
        self._sharding = sharding
        row_shape = next(iter(row_types.values()))[0]
        index_map = sharding.addressable_devices_indices_map((*shape, *row_shape))
        self._local_rows = rows_of_devices(index_map, *shape)
        # Where each row of the batch is among the local ones; rows of other processes are never looked up.
        places = np.full(shape[0] * shape[1], -1)
        places[self._local_rows] = np.arange(len(self._local_rows))
        self._places = places.reshape(shape)

    def arrays(self, ids: np.ndarray) -> dict[str, jax.Array]:
        """Returns the arrays of a batch with row ids ``[B]``; each row that this process holds is read once."""
        rows = [self._read(ids[place]) for place in self._local_rows]

        def array(name: str, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            local = np.stack([row[name] for row in rows])
            whole = slice(None)
            # Cached, so that devices that hold the same rows share one block.
            block = functools.cache(lambda index: local[self._places[index[:2]]][(whole, whole, *index[2:])])
            return jax.make_array_from_callback((*self._shape, *shape), self._sharding, block, dtype=dtype)

        return {name: array(name, shape, dtype) for name, (shape, dtype) in self._row_types.items()}

    def _read(self, row: int) -> dict[str, np.ndarray]:
        if row == PADDED:
            return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._row_types.items()}
        try:
            return self._dataset[int(row)]
        except Exception as error:
            error.add_note(f"while reading row {row} of the dataset")
            raise


def _batch_shape(
    global_batch_size: int, microbatches: int, row_types: RowTypes, sharding: jax.sharding.Sharding
) -> tuple[int, int]:
    rows_per_microbatch, remainder = divmod(global_batch_size, microbatches)
    key = "train.global_batch_size"
    if remainder:
        message = f"does not divide by train.microbatches = {microbatches}, remainder {remainder}"
        remedy = f"set it to a multiple of {microbatches}"
        raise ConfigError([Problem(key=key, value=global_batch_size, message=message, remedy=remedy)])
    lead = (microbatches, rows_per_microbatch)
    shape = (*lead, *next(iter(row_types.values()))[0])
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        message = f"a batch of [microbatches, rows, seq_len] = {list(shape)} does not divide over {sharding}: {error}"
        remedy = "change train.global_batch_size, train.microbatches or data.seq_len, or the mesh axes that shard them"
        raise ConfigError([Problem(key=key, value=global_batch_size, message=message, remedy=remedy)]) from error
    return lead
