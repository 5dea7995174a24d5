"""Grouped matrix product: rows sorted by group, each group times its own matrix.

Shapes: R rows, D inner dim, F outer dim, G groups (the experts of one device). Local to a device; no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import zeros_varying

TILE_ROWS = 64
"""Rows of one product of ``tiled_product``: large enough for a fast product, small enough that tiles that reach over
the end of a group waste little."""

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [R, D], weights [G, D, F], int32 group sizes [G]) -> [R, F]; rows past the sum of the sizes are 0."""


def zeros_typed_as(shape: tuple[int, ...], dtype: jnp.dtype, *likes: jax.Array) -> jax.Array:
    """Zeros that vary over every mesh axis over which one of ``likes`` does, as a loop's first value must."""
    return zeros_varying(shape, dtype, frozenset().union(*(jax.typeof(like).mat.varying for like in likes)))


@jax.custom_vjp
def tiled_product(x_rd: jax.Array, w_gdf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    """A ``GroupedProduct`` as a loop over tiles of rows that are there; its time follows the rows, not the buffer.

    ``lax.ragged_dot`` becomes a dense product of every row with every group on the CPU (JAX 0.12: nine times the time
    for eight groups), which this is for.
    """
    return _tiled(x_rd, w_gdf, sizes_g)


def _tiled(x_rd: jax.Array, w_gdf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    num_rows, num_outer = x_rd.shape[0], w_gdf.shape[2]
    x = jnp.pad(x_rd, ((0, TILE_ROWS), (0, 0)))

    def body(tile: jax.Array, y: jax.Array) -> jax.Array:
        group, row, _ = _place(tile, sizes_g)
        part = lax.dynamic_slice_in_dim(x, row, TILE_ROWS) @ lax.dynamic_index_in_dim(w_gdf, group, keepdims=False)
        # Tiles go upwards: what one writes past the end of its group, the next one overwrites.
        return lax.dynamic_update_slice_in_dim(y, part.astype(y.dtype), row, 0)

    y = zeros_typed_as((num_rows + TILE_ROWS, num_outer), x_rd.dtype, x_rd, w_gdf, sizes_g)
    y = lax.fori_loop(0, _num_tiles(sizes_g).sum(), body, y)[:num_rows]
    return jnp.where(jnp.arange(num_rows)[:, None] < sizes_g.sum(), y, 0)


def _num_tiles(sizes_g: jax.Array) -> jax.Array:
    return -(-sizes_g // TILE_ROWS)


def _place(tile: jax.Array, sizes_g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group of a tile, its first row, and how many of its rows belong to the group."""
    tiles = _num_tiles(sizes_g)
    ends = jnp.cumsum(tiles)
    group = jnp.searchsorted(ends, tile, side="right")
    done = (tile - (ends - tiles)[group]) * TILE_ROWS
    return group, (jnp.cumsum(sizes_g) - sizes_g)[group] + done, sizes_g[group] - done


def _tiled_forward(x_rd, w_gdf, sizes_g):
    return _tiled(x_rd, w_gdf, sizes_g), (x_rd, w_gdf, sizes_g)


def _tiled_backward(saved, dy_rf):
    x_rd, w_gdf, sizes_g = saved
    dx = _tiled(dy_rf, w_gdf.swapaxes(1, 2), sizes_g)
    x, dy = (jnp.pad(a, ((0, TILE_ROWS), (0, 0))) for a in (x_rd, dy_rf))

    def body(tile: jax.Array, dw: jax.Array) -> jax.Array:
        group, row, count = _place(tile, sizes_g)
        is_mine = jnp.arange(TILE_ROWS)[:, None] < count
        x_tile, dy_tile = (jnp.where(is_mine, lax.dynamic_slice_in_dim(a, row, TILE_ROWS), 0) for a in (x, dy))
        part = jnp.einsum("rd,rf->df", x_tile, dy_tile, preferred_element_type=dw.dtype)
        return lax.dynamic_update_index_in_dim(dw, dw[group] + part, group, 0)

    dw = zeros_typed_as(w_gdf.shape, jnp.float32, x_rd, w_gdf, dy_rf, sizes_g)
    dw = lax.fori_loop(0, _num_tiles(sizes_g).sum(), body, dw)
    return dx, dw.astype(w_gdf.dtype), None


tiled_product.defvjp(_tiled_forward, _tiled_backward)

GROUPED_PRODUCTS: Mapping[str, GroupedProduct] = {"cpu": tiled_product}
"""By platform; ``lax.ragged_dot`` where none is named."""


def grouped_product(platform: str) -> GroupedProduct:
    """The implementation for a platform ("cpu", "gpu"), all with the same results."""
    return GROUPED_PRODUCTS.get(platform, lax.ragged_dot)
