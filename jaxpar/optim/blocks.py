"""Runs a function over the blocks of a stacked, sharded parameter, each of them whole on one device."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import current_mesh, island, spec_of
from jaxpar.sharding import axes_of


def map_blocks(function: Callable[[jax.Array], jax.Array], x: jax.Array, num_stacked: int) -> jax.Array:
    """``function`` of every block ``x[i, ...]``, for functions that need a whole block, such as a matrix's singular
    vectors. Shapes, shardings and dtypes stay.

    N devices that hold a part of every one of B blocks can either gather all blocks on each (B blocks received per
    device, and each device computes all of them), or exchange parts so that each device gets ceil(B / N) whole blocks,
    computes those, and gives the results back (2 ceil(B / N) blocks). The one that moves fewer bytes is taken: the
    exchange, but for one or two blocks. Devices that hold copies of the same parts compute the same.

    Args:
        function: Block -> block of the same shape and dtype.
        x: [stacked..., block...].
        num_stacked: Leading dims that stack blocks; 0: ``x`` is one block.
    """
    mesh = current_mesh()
    if mesh.empty:
        return _over_blocks(function, x, num_stacked)
    spec = spec_of(x)
    parts = [(dim - num_stacked + 1, axes_of(entry)) for dim, entry in enumerate(spec.partitions)]
    parts = [(dim, axes) for dim, axes in parts if dim > 0 and axes]
    num_devices = math.prod(mesh.shape[axis] for _, axes in parts for axis in axes)

    def body(local: jax.Array) -> jax.Array:
        blocks = local.reshape(-1, *local.shape[num_stacked:])
        num_blocks = blocks.shape[0]
        if num_devices == 1:
            done = jax.vmap(function)(blocks)
        elif moves_less(num_blocks, num_devices):
            done = _exchanged(function, blocks, parts, num_devices)[:num_blocks]
        else:
            done = _gathered(function, blocks, parts)
        return done.reshape(local.shape)

    return island(body, (spec,), spec)(x)


def moves_less(num_blocks: int, num_devices: int) -> bool:
    """Whether exchanging whole blocks moves fewer bytes than gathering them all on each device."""
    return 2 * -(-num_blocks // num_devices) < num_blocks


def _over_blocks(function: Callable, x: jax.Array, num_stacked: int) -> jax.Array:
    blocks = x.reshape(-1, *x.shape[num_stacked:])
    return jax.vmap(function)(blocks).reshape(x.shape)


def _exchanged(
    function: Callable, blocks: jax.Array, parts: list[tuple[int, tuple[str, ...]]], num_devices: int
) -> jax.Array:
    """Parts of all blocks -> some whole blocks, and back; blocks of zeros fill up what does not divide."""
    missing = -blocks.shape[0] % num_devices
    blocks = jnp.pad(blocks, [(0, missing), *[(0, 0)] * (blocks.ndim - 1)])
    for dim, axes in parts:
        blocks = lax.all_to_all(blocks, axes, split_axis=0, concat_axis=dim, tiled=True)
    blocks = jax.vmap(function)(blocks)
    for dim, axes in reversed(parts):
        blocks = lax.all_to_all(blocks, axes, split_axis=dim, concat_axis=0, tiled=True)
    return blocks


def _gathered(function: Callable, blocks: jax.Array, parts: list[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """All blocks whole on each device, which keeps its part of the results."""
    sizes = {dim: blocks.shape[dim] for dim, _ in parts}
    for dim, axes in parts:
        blocks = lax.all_gather(blocks, axes, axis=dim, tiled=True)
    blocks = jax.vmap(function)(blocks)
    for dim, axes in parts:
        blocks = lax.dynamic_slice_in_dim(blocks, lax.axis_index(axes) * sizes[dim], sizes[dim], dim)
    return blocks
