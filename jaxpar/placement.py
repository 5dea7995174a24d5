"""Moves layers between the devices that keep them and the stages that run them.

Parameters and optimizer lie in natural layer order, [L, ...] with L over ``pipeline``, so that nothing that reads them
(checkpoints, exports, another mesh) knows of schedules. A schedule with chunks, or layers that are shared out unevenly,
needs another order: chunk 1 of stage 0 is far down the model. Layers then travel once per optimizer step, and their
gradients back; with one chunk and even layers every layer is where it is needed already, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import island, spec_of
from jaxpar.schedule import LayerSplit
from jaxpar.sharding import PIPELINE_AXIS

NOTHING = -1


class Placement:
    """Layers as they are kept, and as the stages of a pipeline hold them."""

    def __init__(self, split: LayerSplit, num_kept: int):
        """From a split, and the number of layers that arrays keep: those of the model and padding at the end.

        Raises:
            ValueError: The stages do not divide ``num_kept``.
        """
        self.split = split
        self.num_chunks, self.num_stages, self.num_places = split.layer_of_place.shape
        if num_kept % self.num_stages:
            raise ValueError(f"{num_kept} layers are kept, which {self.num_stages} stages do not divide")
        self._kept_per_stage = num_kept // self.num_stages
        # [stages, chunks x places]: index in the kept array.
        self._wanted = split.layer_of_place.transpose(1, 0, 2).reshape(self.num_stages, -1)
        # [stages, kept per stage]: index among all places, stage by stage.
        place_of = np.full(num_kept, NOTHING, np.int32)
        mask = split.mask.transpose(1, 0, 2).reshape(self.num_stages, -1)
        place_of[self._wanted[mask]] = np.flatnonzero(mask)
        self._origin = place_of.reshape(self.num_stages, -1)

    def to_stages(self, kept: jax.Array) -> jax.Array:
        """[L, ...] as kept -> [chunks, stages, places, ...], both split over ``pipeline``."""
        spec = spec_of(kept)

        def local(kept: jax.Array) -> jax.Array:
            placed = _redistribute(kept, self._wanted)
            return placed.reshape(self.num_chunks, 1, self.num_places, *kept.shape[1:])

        return island(local, spec, P(None, PIPELINE_AXIS, None, *spec.partitions[1:]))(kept)

    def from_stages(self, placed: jax.Array) -> jax.Array:
        """The way back, for gradients: what lies in padded places is dropped, and padded layers get zeros."""
        spec = spec_of(placed)

        def local(placed: jax.Array) -> jax.Array:
            return _redistribute(placed.reshape(-1, *placed.shape[3:]), self._origin)

        return island(local, spec, P(PIPELINE_AXIS, *spec.partitions[3:]))(placed)


def _redistribute(held: jax.Array, source: np.ndarray) -> jax.Array:
    """Row ``source[stage][i]``, counted over all stages, as row i of every stage; zeros where that is ``NOTHING``.

    One permute around the ring for each distance that a row has to go, of as many rows as the busiest stage sends that
    far. No stage ever holds what it does not need but for that.

    Args:
        held: [rows of a stage, ...], inside an island.
        source: int32 [stages, rows wanted].
    """
    num_stages = len(source)
    here = len(held)
    stages = np.arange(num_stages)[:, None]
    distance = np.where(source == NOTHING, NOTHING, (stages - source // here) % num_stages)
    if np.array_equal(source, np.arange(source.size).reshape(source.shape)):
        return held
    received, position, offset = [], np.zeros_like(source), 0
    for hops in sorted(set(distance[distance != NOTHING].tolist())):
        rows, width = _rows_to_send(source % here, distance == hops, hops)
        sent = held if hops == 0 else held[_own(rows)]
        if hops:
            ring = [(stage, (stage + hops) % num_stages) for stage in range(num_stages)]
            sent = lax.ppermute(sent, PIPELINE_AXIS, ring)
            order = np.cumsum(distance == hops, axis=1) - 1
        else:
            order, width = source % here, here
        position = np.where(distance == hops, offset + order, position)
        received.append(sent)
        offset += width
    result = jnp.concatenate(received)[_own(position)]
    present = _own(source != NOTHING).reshape(-1, *(1,) * (held.ndim - 1))
    return result if (source != NOTHING).all() else jnp.where(present, result, 0)


def _rows_to_send(rows: np.ndarray, chosen: np.ndarray, hops: int) -> tuple[np.ndarray, int]:
    """[stages, width]: which of its rows each stage sends ``hops`` on, in the order of those who want them."""
    num_stages, width = len(rows), int(chosen.sum(1).max())
    sent = np.zeros((num_stages, width), np.int32)
    for stage in range(num_stages):
        wanted: Sequence[int] = rows[stage][chosen[stage]]
        sent[(stage - hops) % num_stages, : len(wanted)] = wanted
    return sent, width


def _own(table: np.ndarray) -> jax.Array:
    return lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(PIPELINE_AXIS), 0, keepdims=False)
