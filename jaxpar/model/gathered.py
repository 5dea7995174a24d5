"""Attention over a sequence that the ``context`` axis splits, by a fused kernel, to gathered keys and values.

A kernel that knows of each query where its keys begin and end needs no more: a member's queries are two chunks of the
row (``jaxpar.model.zigzag``), each query sees its document's keys up to itself, and blocks that none sees are skipped.
(tokamax 0.0.17 skips them forward; its backward pass on Hopper computes and masks them.)

Shapes, all local to a device: B batch, S the whole row, s = S / c for c members, H heads, K kv heads, h head_dim.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.model.kernels import tokamax_attention
from jaxpar.model.zigzag import from_zigzag, to_zigzag
from jaxpar.sharding import CONTEXT_AXIS


def gathered_attention(
    kernel: str, reduce: jnp.dtype, q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array
) -> jax.Array:
    """Softmax attention, causal, inside documents; call it inside an island that is manual over ``context`` (c > 1).

    Args:
        kernel: of ``tokamax_attention``.
        reduce: dtype in which gradients of keys and values are reduce-scattered.
        q: [B, s, H, h], this member's chunks, RoPE applied.
        k: [B, s, K, h].
        v: [B, s, K, h].
        starts: int32 [B, s], index in the row, in natural order, of the first token of each query's document.

    Returns:
        [B, s, H, h].
    """
    members, length = lax.axis_size(CONTEXT_AXIS), q.shape[1]
    indices = to_zigzag(jnp.arange(members * length)[None], members)
    own = lax.dynamic_slice_in_dim(indices, lax.axis_index(CONTEXT_AXIS) * length, length, 1)
    ends = jnp.broadcast_to(own + 1, starts.shape)
    keys_values = _whole_row(reduce, jnp.stack([k, v], 2))  # one collective
    return tokamax_attention(kernel, q, keys_values[:, :, 0], keys_values[:, :, 1], starts, ends)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_row(reduce: jnp.dtype, x: jax.Array) -> jax.Array:  # noqa: ARG001 (of the gradient)
    """[B, s, ...] of each member -> [B, S, ...] in natural order."""
    return from_zigzag(lax.all_gather(x, CONTEXT_AXIS, axis=1, tiled=True), lax.axis_size(CONTEXT_AXIS))


def _scatter(reduce: jnp.dtype, _: None, grad: jax.Array) -> tuple[jax.Array]:
    dtype = grad.dtype
    grad = to_zigzag(grad, lax.axis_size(CONTEXT_AXIS)).astype(reduce)
    return (lax.psum_scatter(grad, CONTEXT_AXIS, scatter_dimension=1, tiled=True).astype(dtype),)


_whole_row.defvjp(lambda reduce, x: (_whole_row(reduce, x), None), _scatter)
