"""Cuts padding off before arrays go to disk, so that a checkpoint does not know how they were padded.

The vocabulary is padded in memory; the padding means nothing and is zero. An array whose true size does not divide by
its mesh axes cannot exist on the mesh with those axes on that dim, so they move to another dim first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec


def leading_box(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``array[:shape[0], :shape[1], ...]``, still sharded over as many devices as the other dims allow.

    Collective: every process calls it.
    """
    shape = tuple(shape)
    if shape == array.shape:
        return array
    if isinstance(array.sharding, NamedSharding):
        spec = _spec_off_cut_dims(array.sharding, array.shape, shape)
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, spec))
    return _cut(array, shape)


@functools.partial(jax.jit, static_argnames="shape")
def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(array, (0,) * array.ndim, shape)


def _spec_off_cut_dims(sharding: NamedSharding, full: tuple[int, ...], cut: tuple[int, ...]) -> PartitionSpec:
    """The spec with the axes of cut dims moved to uncut dims that they divide; an axis that divides none is dropped."""
    axis_sizes = sharding.mesh.shape
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in sharding.spec]
    entries += [()] * (len(full) - len(entries))
    moving: list[str] = []
    for dim in range(len(full)):
        if cut[dim] != full[dim]:
            moving += entries[dim]
            entries[dim] = ()
    for axis in moving:
        for dim in range(len(full)):
            parts = math.prod(axis_sizes[a] for a in entries[dim]) * axis_sizes[axis]
            if cut[dim] == full[dim] and full[dim] % parts == 0:
                entries[dim] += (axis,)
                break
    return PartitionSpec(*entries)
