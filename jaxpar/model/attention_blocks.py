"""Attention of a block of queries to a block of keys, and the merging of several: what ring attention is made of.

A softmax over many keys is put together from softmaxes over some of them, each with the logarithm of its sum
(arXiv 2205.14135, section 3.1; statistics in float32). The gradient of one block needs only the sum over all of them. A
fused kernel may stand in for ``attend_block`` and ``attend_block_backward``.

Shapes, all local to a device: B batch, t queries, u keys, H heads, K kv heads, h head_dim, G = H / K.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.plan.context import SCORE_BYTES

NOTHING = -1e30
"""Log-sum of no scores at all: finite, so that differences of two are no NaN."""


class Partial(NamedTuple):
    """Attention to some of the keys: what merging with attention to others needs."""

    out: jax.Array
    """float32 [..., H, h]: softmax over these keys only; 0 where there are none."""
    log_sum: jax.Array
    """float32 [..., H]: logarithm of the sum of the exponentials of the scores."""


def merge(a: Partial, b: Partial) -> Partial:
    """Attention to the keys of both; ``a`` has some for every query."""
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    share_a, share_b = (jnp.exp(x.log_sum - log_sum)[..., None] for x in (a, b))
    return Partial(a.out * share_a + b.out * share_b, log_sum)


def attend_block(
    q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array, *, causal: bool
) -> Partial:
    """Attention of one block of queries to one block of keys.

    Args:
        q: [B, t, H, h].
        k: [B, u, K, h].
        v: [B, u, K, h].
        q_segments: int32 [B, t]; a query sees keys of its own segment only, and there may be none.
        k_segments: int32 [B, u].
        causal: query i sees keys 0 to i; else all.
    """

    def attend(q: jax.Array, q_segments: jax.Array, index: jax.Array) -> Partial:
        scores, visible = _scores(q, k, q_segments, k_segments, index if causal else None)
        highest = jnp.max(jnp.where(visible, scores, NOTHING), -1, keepdims=True)
        exps = jnp.where(visible, jnp.exp(scores - highest), 0.0)
        total = jnp.sum(exps, -1)
        safe = jnp.where(total > 0, total, 1.0)
        out = jnp.einsum("bkgtu,bukh->btkgh", exps.astype(v.dtype), v, preferred_element_type=jnp.float32)
        log_sum = jnp.where(total > 0, jnp.log(safe) + highest[..., 0], NOTHING)
        out = out / jnp.moveaxis(safe, -1, 1)[..., None]
        return Partial(out.reshape(q.shape), jnp.moveaxis(log_sum, -1, 1).reshape(q.shape[:-1]))

    parts = _num_parts(q, k)
    if parts == 1:
        return attend(q, q_segments, jnp.arange(q.shape[1]))
    queries = (*(_parts(a, parts) for a in (q, q_segments)), jnp.arange(q.shape[1]).reshape(parts, -1))
    return Partial(*(_whole(a) for a in lax.map(lambda part: attend(*part), queries)))


def attend_block_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    k_segments: jax.Array,
    log_sum: jax.Array,
    grad_out: jax.Array,
    correction: jax.Array,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Float32 gradients of q, k and v through one block (arXiv 2205.14135, algorithm 4).

    Args:
        q: and the other arguments of ``attend_block``.
        k: as there.
        v: as there.
        q_segments: as there.
        k_segments: as there.
        log_sum: float32 [B, t, H], over the keys of all blocks.
        grad_out: [B, t, H, h].
        correction: float32 [B, t, H], inner product of ``grad_out`` and the result over all blocks.
        causal: as there.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    by_score = lambda a: jnp.moveaxis(_grouped(a, k.shape[2]), 1, -1)[..., None]  # noqa: E731

    def gradients(q, q_segments, log_sum, grad_out, correction, index):
        scores, visible = _scores(q, k, q_segments, k_segments, index if causal else None)
        probabilities = jnp.where(visible, jnp.exp(scores - by_score(log_sum)), 0.0)
        grad_out = _grouped(grad_out, k.shape[2])
        grad_v = product("bkgtu,btkgh->bukh", probabilities.astype(v.dtype), grad_out)
        grad_probabilities = product("btkgh,bukh->bkgtu", grad_out, v)
        grad_scores = probabilities * (grad_probabilities - by_score(correction)) * q.shape[-1] ** -0.5
        grad_scores = grad_scores.astype(q.dtype)
        grad_q = product("bkgtu,bukh->btkgh", grad_scores, k)
        return grad_q.reshape(q.shape), product("bkgtu,btkgh->bukh", grad_scores, _grouped(q, k.shape[2])), grad_v

    parts = _num_parts(q, k)
    index = jnp.arange(q.shape[1])
    of_queries = (q, q_segments, log_sum, grad_out, correction)
    if parts == 1:
        return gradients(*of_queries, index)

    def add(carry: tuple[jax.Array, jax.Array], part: tuple) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        grad_q, *more = gradients(*part)
        return tuple(a + b for a, b in zip(carry, more, strict=True)), grad_q

    queries = (*(_parts(a, parts) for a in of_queries), index.reshape(parts, -1))
    (grad_k, grad_v), grad_q = lax.scan(add, tuple(jnp.zeros_like(a, dtype=jnp.float32) for a in (k, v)), queries)
    return _whole(grad_q), grad_k, grad_v


def _scores(q, k, q_segments, k_segments, index):
    """float32 scores [B, K, G, t, u], and which of them count; ``index`` [t] of causal queries among the keys."""
    scores = jnp.einsum(
        "btkgh,bukh->bkgtu", _grouped(q, k.shape[2]), k, preferred_element_type=jnp.float32
    ) * q.shape[-1] ** -0.5  # fmt: skip
    visible = q_segments[:, :, None] == k_segments[:, None, :]
    if index is not None:
        visible &= index[:, None] >= jnp.arange(k.shape[1])
    return scores, visible[:, None, None]


def _grouped(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, t, H, ...] -> [B, t, K, G, ...]."""
    return x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])


def _num_parts(q: jax.Array, k: jax.Array) -> int:
    """The fewest equal parts of the queries whose scores fit into ``SCORE_BYTES`` (or one query each)."""
    rows, length, heads = q.shape[:3]
    whole = 4 * rows * length * heads * k.shape[1]
    return next(
        parts
        for parts in range(1, length + 1)
        if (length % parts == 0 and whole <= parts * SCORE_BYTES) or parts == length
    )


def _parts(x: jax.Array, parts: int) -> jax.Array:
    """[B, t, ...] -> [parts, B, t / parts, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], parts, -1, *x.shape[2:]), 1, 0)


def _whole(x: jax.Array) -> jax.Array:
    """The inverse of ``_parts``."""
    parts, rows, length, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(rows, parts * length, *rest)
