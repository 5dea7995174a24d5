"""Grouped matrix product: rows sorted by group, each group times its own matrix.

Shapes: R rows, D inner dim, F outer dim, G groups (the experts of one device). Local to a device; no collective.
``lax.ragged_dot`` is not among the implementations: on CPUs and GPUs alike it becomes a dense product of every row with
every group's matrix, masked (JAX 0.12).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import vary_over, zeros_varying

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [R, D], weights [G, D, F], int32 group sizes [G]) -> [R, F]; rows past the sum of the sizes are 0. Those of x, and
of the gradient of the result, are not used, but must be finite: kernels multiply them by 0."""

Sums = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [R, D], dy [R, F], int32 group sizes [G]) -> x^T dy of each group's rows, [G, D, F]: the gradient of weights."""


def differentiable(multiply: GroupedProduct, sums: Sums) -> GroupedProduct:
    """A grouped product with its two backward products.

    Args:
        multiply: the product; rows past the sum of the sizes may be anything, even what is no number.
        sums: the gradient of the weights.
    """

    def masked(x_rd: jax.Array, w_gdf: jax.Array, sizes_g: jax.Array) -> jax.Array:
        y_rf = multiply(x_rd, w_gdf, sizes_g)
        return jnp.where(jnp.arange(len(y_rf))[:, None] < sizes_g.sum(), y_rf, 0)

    def backward(saved: tuple[jax.Array, ...], dy_rf: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x_rd, w_gdf, sizes_g = saved
        dx_rd = masked(dy_rf, w_gdf.swapaxes(1, 2), sizes_g)
        return dx_rd, sums(x_rd, dy_rf, sizes_g).astype(w_gdf.dtype), None

    product = jax.custom_vjp(masked)
    product.defvjp(lambda *arguments: (masked(*arguments), arguments), backward)
    return product


def zeros_typed_as(shape: tuple[int, ...], dtype: jnp.dtype, *likes: jax.Array) -> jax.Array:
    """Zeros that vary over every mesh axis over which one of ``likes`` does, as a loop's first value must."""
    return zeros_varying(shape, dtype, _varying_axes(*likes))


def _varying_axes(*likes: jax.Array) -> frozenset[str]:
    return frozenset().union(*(jax.typeof(like).mat.varying for like in likes))


def _tiled(tile_rows: int, x_rd: jax.Array, w_gdf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    """The product as a loop over tiles of rows that are there; its time follows the rows, not the buffer."""
    num_rows, num_outer = x_rd.shape[0], w_gdf.shape[2]
    x = jnp.pad(x_rd, ((0, tile_rows), (0, 0)))

    def body(tile: jax.Array, y: jax.Array) -> jax.Array:
        group, row, _ = _place(tile, tile_rows, sizes_g)
        part = lax.dynamic_slice_in_dim(x, row, tile_rows) @ lax.dynamic_index_in_dim(w_gdf, group, keepdims=False)
        # Tiles go upwards: what one writes past the end of its group, the next one overwrites.
        return lax.dynamic_update_slice_in_dim(y, part.astype(y.dtype), row, 0)

    y = zeros_typed_as((num_rows + tile_rows, num_outer), x_rd.dtype, x_rd, w_gdf, sizes_g)
    return lax.fori_loop(0, _num_tiles(tile_rows, sizes_g).sum(), body, y)[:num_rows]


def _tiled_sums(tile_rows: int, x_rd: jax.Array, dy_rf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    """``Sums`` by the same loop, in float32."""
    x, dy = (jnp.pad(a, ((0, tile_rows), (0, 0))) for a in (x_rd, dy_rf))

    def body(tile: jax.Array, dw: jax.Array) -> jax.Array:
        group, row, count = _place(tile, tile_rows, sizes_g)
        is_mine = jnp.arange(tile_rows)[:, None] < count
        x_tile, dy_tile = (jnp.where(is_mine, lax.dynamic_slice_in_dim(a, row, tile_rows), 0) for a in (x, dy))
        part = jnp.einsum("rd,rf->df", x_tile, dy_tile, preferred_element_type=dw.dtype)
        return lax.dynamic_update_index_in_dim(dw, dw[group] + part, group, 0)

    dw = zeros_typed_as((len(sizes_g), x_rd.shape[1], dy_rf.shape[1]), jnp.float32, x_rd, dy_rf, sizes_g)
    return lax.fori_loop(0, _num_tiles(tile_rows, sizes_g).sum(), body, dw)


def _num_tiles(tile_rows: int, sizes_g: jax.Array) -> jax.Array:
    return -(-sizes_g // tile_rows)


def _place(tile: jax.Array, tile_rows: int, sizes_g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group of a tile, its first row, and how many of its rows belong to the group."""
    tiles = _num_tiles(tile_rows, sizes_g)
    ends = jnp.cumsum(tiles)
    group = jnp.searchsorted(ends, tile, side="right")
    done = (tile - (ends - tiles)[group]) * tile_rows
    return group, (jnp.cumsum(sizes_g) - sizes_g)[group] + done, sizes_g[group] - done


def _tokamax(implementation: str, x_rd: jax.Array, w_gdf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    """The product by tokamax. Its kernels leave rows past the last group as they find them."""
    from tokamax import ragged_dot

    y_rf = ragged_dot(x_rd, w_gdf, sizes_g, implementation=implementation)
    # Kernels do not say over which axes their results vary.
    return vary_over(y_rf, _varying_axes(x_rd, w_gdf, sizes_g))


def _tokamax_sums(implementation: str, x_rd: jax.Array, dy_rf: jax.Array, sizes_g: jax.Array) -> jax.Array:
    """``Sums`` by tokamax, in the type of x."""
    from tokamax import ragged_dot_general

    # It reads x transposed, whose rows must begin at multiples of 16 bytes.
    x, dy = (jnp.pad(a, ((0, -len(a) % 8), (0, 0))) for a in (x_rd, dy_rf))
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    dw_gdf = ragged_dot_general(x, dy, sizes_g, dims, implementation=implementation)
    return vary_over(dw_gdf, _varying_axes(x_rd, dy_rf, sizes_g))


def _tiles(tile_rows: int) -> GroupedProduct:
    return differentiable(partial(_tiled, tile_rows), partial(_tiled_sums, tile_rows))


GROUPED_PRODUCTS: Mapping[str, GroupedProduct] = {
    # Large enough for a fast product; small enough that tiles that reach over the end of a group waste little.
    "tiles_64": _tiles(64),
    # A tile adds to a whole matrix, so on a GPU it needs this many rows for memory to keep up with the product.
    "tiles_512": _tiles(512),
    "mosaic_gpu": differentiable(partial(_tokamax, "mosaic_gpu"), partial(_tokamax_sums, "mosaic_gpu")),
    "mosaic_gpu_tiles_512": differentiable(partial(_tokamax, "mosaic_gpu"), partial(_tiled_sums, 512)),
}
"""By the names of ``jaxpar.plan.experts.choose_grouped_product``, all with the same results: loops over tiles of rows,
and tokamax's kernel, with its own gradient of the weights or that of a loop."""
