"""Fused attention kernels behind one function: what each needs to know of a row, and how it is called.

Shapes: B batch, S sequence, H heads, K kv heads, h head_dim; all local to a device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """Index of the first token of every token's document.

    With causal attention this says all about packed rows: a token sees the tokens from its document's first to itself.

    Args:
        segment_ids: int32 [B, S]; a document is a run of equal ids, and so is the padding.

    Returns:
        int32 [B, S].
    """
    index = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    is_start = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return lax.cummax(jnp.where(is_start, index, 0), axis=1)


def fused_attention(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
    """Softmax attention, causal, of every token from its document's start on.

    Args:
        kernel: ``cudnn``, or tokamax's ``mosaic_gpu``, ``triton`` or ``xla`` (its reference implementation).
        q: [B, S, H, h].
        k: [B, S, K, h].
        v: [B, S, K, h].
        starts: int32 [B, S], see ``segment_starts``. cuDNN ignores it: rows hold one document, padding at its end,
            and what padding attends to has weight 0.

    Returns:
        [B, S, H, h].
    """
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return tokamax_attention(kernel, q, k, v, starts)


def tokamax_attention(
    kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of each query to the keys from its start to before its end.

    Below tokamax's public function, which cannot be told where each query's keys start (version 0.0.17).

    Args:
        kernel: ``mosaic_gpu``, ``triton`` or ``xla``.
        q: [B, t, H, h].
        k: [B, S, K, h].
        v: [B, S, K, h].
        starts: int32 [B, t].
        ends: int32 [B, t]; None: query i's keys end with key i, and t = S.

    Returns:
        [B, t, H, h].
    """
    from tokamax._src.ops.attention import api, base

    bounds = {"is_causal": True} if ends is None else {"k_end": ends[:, None, :]}
    return api.IMPLEMENTATIONS[kernel](q, k, v, mask=base.Mask(k_start=starts[:, None, :], **bounds))
