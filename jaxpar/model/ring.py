"""Attention over a sequence that the ``context`` axis splits: ring attention, or gathered keys and values.

Both ways compute the same blocks. A member's queries are chunks i and 2c - 1 - i of the row (``jaxpar.model.zigzag``).
Its own keys need a causal block. Of any other member's two chunks of keys, exactly two pairs (query chunk, key chunk)
are visible, whole: the late queries see the early keys; and besides, if the other member comes before this one, the
early queries see the early keys, else the late queries see the late keys. The second pair is chosen by selects, not
branches, so that every member runs the same program and the same number of products.

- **ring** (arXiv 2310.01889): keys and values pass from member to member, one array, c - 1 permutes per layer. The next
  block is sent before the products with the present one, so that both go on at once; memory is O(S / c).
- **allgather**: keys and values of the whole row are gathered first. One collective, but nothing to hide it behind, and
  O(S) memory for one layer's keys and values.

The backward pass is written by hand: it keeps queries, keys, values, the result and one log-sum per query and head,
and forms the scores of a block again from them. Key and value gradients follow their block and are home after c - 1
permutes of their own.

Shapes, all local to a device: B batch, S the whole row, s = S / c, n = s / 2 the length of a chunk, H heads, K kv
heads, h head_dim. A leading 2 is the early and the late chunk of a member, or two pairs that are computed as one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.model.attention_blocks import NOTHING, Partial, attend_block, attend_block_backward, merge
from jaxpar.sharding import CONTEXT_AXIS


class ContextWay(NamedTuple):
    """How attention over a split sequence is computed; fixed while tracing."""

    mode: str
    """``ring``, ``allgather`` or ``auto``; see ``mesh.context_mode``."""
    reduce: jnp.dtype
    """Key and value gradients are sent in this type, and added up in float32."""


DEFAULT_WAY = ContextWay("auto", jnp.dtype("float32"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def context_attention(way: ContextWay, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention inside documents; call it inside an island that is manual over ``context`` (c > 1).

    Args:
        way: mode "ring" or "allgather".
        q: [B, s, H, h], this member's chunks, RoPE applied.
        k: [B, s, K, h].
        v: [B, s, K, h].
        segment_ids: int32 [B, S], of the whole row in zig-zag order.

    Returns:
        [B, s, H, h].
    """
    return _forward(way, q, k, v, segment_ids)[0]


def _forward(way, q, k, v, segment_ids):
    """The result, and what the backward pass keeps."""
    q, row = _rows_of(q, segment_ids)
    own = attend_block(q, k, v, row.own_segments, row.own_segments, causal=True)
    so_far = Partial(*(_halves(a) for a in own))
    queries = _halves(q)

    def absorb(so_far: Partial, kv: jax.Array, turn: jax.Array | int) -> Partial:
        return _absorb(so_far, queries, kv, row, turn)

    walk = {"ring": _ring, "allgather": _gathered}[way.mode]
    so_far = walk(absorb, so_far, jnp.stack([k, v]))
    out = checkpoint_name(_whole(so_far.out).astype(q.dtype), "attention")
    log_sum = checkpoint_name(_whole(so_far.log_sum), "attention")
    return out, (q, k, v, segment_ids, out, log_sum)


def _ring(absorb, so_far, kv):
    """Visit the other members' keys and values as they come by."""
    members = lax.axis_size(CONTEXT_AXIS)

    def visit(carry, turn):
        so_far, kv = carry
        following = _pass_on(kv)  # before the products, which do not need it
        return (absorb(so_far, kv, turn), following), None

    carry = so_far, _pass_on(kv)
    if members > 2:
        carry, _ = lax.scan(visit, carry, jnp.arange(1, members - 1))
    so_far, kv = carry
    return absorb(so_far, kv, members - 1)


def _gathered(absorb, so_far, kv):
    """Visit the other members' keys and values where they lie in the gathered row."""
    everyones = lax.all_gather(kv, CONTEXT_AXIS)
    members, member = lax.axis_size(CONTEXT_AXIS), lax.axis_index(CONTEXT_AXIS)

    def visit(so_far, turn):
        return absorb(so_far, everyones[(member - turn) % members], turn), None

    return lax.scan(visit, so_far, jnp.arange(1, members))[0]


class _Row:
    """Which documents the queries and keys of the members belong to."""

    def __init__(self, segment_ids: jax.Array, length: int):
        self._segment_ids = segment_ids
        self._length = length
        self.member = lax.axis_index(CONTEXT_AXIS)
        self.members = lax.axis_size(CONTEXT_AXIS)
        self.own_segments = self.segments_of(self.member)

    def segments_of(self, member: jax.Array) -> jax.Array:
        """int32 [B, s]."""
        return lax.dynamic_slice_in_dim(self._segment_ids, member * self._length, self._length, 1)

    def source(self, turn: jax.Array | int) -> jax.Array:
        """Whose keys and values are here after ``turn`` permutes."""
        return (self.member - turn) % self.members


def _rows_of(q: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, _Row]:
    """The queries again, and the row's documents.

    Masks do not depend on the layer. The barrier keeps the compiler from forming those of all blocks ahead of the loop
    over layers, where they would take memory that grows with the square of the row.
    """
    q, segment_ids = lax.optimization_barrier((q, segment_ids))
    return q, _Row(segment_ids, q.shape[1])


def _pass_on(x: jax.Array) -> jax.Array:
    """Every member's array goes to the next member."""
    members = lax.axis_size(CONTEXT_AXIS)
    return lax.ppermute(x, CONTEXT_AXIS, [(member, (member + 1) % members) for member in range(members)])


def _halves(x: jax.Array) -> jax.Array:
    """[B, s, ...] -> [2, B, n, ...]: the early and the late chunk."""
    rows, length, *rest = x.shape
    return jnp.moveaxis(x.reshape(rows, 2, length // 2, *rest), 1, 0)


def _whole(halves: jax.Array) -> jax.Array:
    """The inverse of ``_halves``."""
    _, rows, length, *rest = halves.shape
    return jnp.moveaxis(halves, 0, 1).reshape(rows, 2 * length, *rest)


def _query_pairs(halves: jax.Array, earlier: jax.Array) -> jax.Array:
    """Queries, or what belongs to them, of the two visible pairs as one block [2 B, n, ...]."""
    early, late = halves
    return jnp.concatenate([jnp.where(earlier, early, late), late])


def _key_pairs(halves: jax.Array, earlier: jax.Array) -> jax.Array:
    """Keys, or what belongs to them, of the two visible pairs as one block [2 B, n, ...]."""
    early, late = halves
    return jnp.concatenate([jnp.where(earlier, early, late), early])


def _absorb(so_far: Partial, queries: jax.Array, kv: jax.Array, row: _Row, turn: jax.Array | int) -> Partial:
    """Attention to everything so far and to the keys ``kv`` [2, B, s, K, h] that are here at this turn."""
    source = row.source(turn)
    earlier = source < row.member
    chosen = attend_block(
        _query_pairs(queries, earlier),
        *(_key_pairs(_halves(a), earlier) for a in kv),
        _query_pairs(_halves(row.own_segments), earlier),
        _key_pairs(_halves(row.segments_of(source)), earlier),
        causal=False,
    )
    (first, second) = (Partial(*parts) for parts in zip(*(jnp.split(a, 2) for a in chosen), strict=True))
    nothing = jnp.full_like(first.log_sum, NOTHING)
    early, late = (Partial(*parts) for parts in zip(*so_far, strict=True))
    early = merge(early, Partial(first.out, jnp.where(earlier, first.log_sum, nothing)))
    late = merge(merge(late, second), Partial(first.out, jnp.where(earlier, nothing, first.log_sum)))
    return Partial(*(jnp.stack(pair) for pair in zip(early, late, strict=True)))


def _backward(way, kept, grad_out):
    q, k, v, segment_ids, out, log_sum = kept
    q, row = _rows_of(q, segment_ids)
    correction = jnp.sum(grad_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    of_queries = (log_sum, grad_out, correction)
    own = attend_block_backward(q, k, v, row.own_segments, row.own_segments, *of_queries, causal=True)
    queries = tuple(_halves(a) for a in (q, row.own_segments, *of_queries))

    def gradients(kv: jax.Array, turn: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        return _pair_gradients(queries, kv, row, turn)

    walk = {"ring": _ring_backward, "allgather": _gathered_backward}[way.mode]
    grad_q, grad_kv = walk(gradients, _halves(own[0]), jnp.stack(own[1:]), jnp.stack([k, v]), way.reduce)
    return _whole(grad_q).astype(q.dtype), grad_kv[0].astype(k.dtype), grad_kv[1].astype(v.dtype), None


context_attention.defvjp(_forward, _backward)


def _pair_gradients(queries, kv, row, turn):
    """Gradients of the member's queries [2, B, n, H, h] and of visiting keys and values [2, B, s, K, h], float32."""
    source = row.source(turn)
    earlier = source < row.member
    q, q_segments, *of_queries = (_query_pairs(a, earlier) for a in queries)
    k, v = (_key_pairs(_halves(a), earlier) for a in kv)
    k_segments = _key_pairs(_halves(row.segments_of(source)), earlier)
    grads = attend_block_backward(q, k, v, q_segments, k_segments, *of_queries, causal=False)
    grad_q, grad_k, grad_v = (jnp.split(a, 2) for a in grads)
    share = lambda a: (jnp.where(earlier, a, 0.0), jnp.where(earlier, 0.0, a))  # noqa: E731
    early, late = share(grad_q[0])
    grad_queries = jnp.stack([early, late + grad_q[1]])
    grad_kv = []
    for first, second in (grad_k, grad_v):
        early, late = share(first)
        grad_kv.append(_whole(jnp.stack([early + second, late])))
    return grad_queries, jnp.stack(grad_kv)


def _ring_backward(gradients, grad_q, own, kv, reduce):
    """Keys and values come by once more; from the first visit on, their gradients follow one permute behind."""
    members = lax.axis_size(CONTEXT_AXIS)

    def visit(carry, turn):
        grad_q, kv, following = carry
        # Both ready at once, so that all devices start the two permutes in one order (XLA:CPU waits for all of them).
        kv, following = lax.optimization_barrier((kv, following))
        next_kv, arrived = _pass_on(kv), _pass_on(following)
        more_q, more_kv = gradients(kv, turn)
        return (grad_q + more_q, next_kv, (arrived + more_kv).astype(reduce)), None

    kv = _pass_on(kv)
    next_kv = _pass_on(kv) if members > 2 else None
    more_q, following = gradients(kv, 1)
    grad_q, following = grad_q + more_q, following.astype(reduce)
    if members > 3:
        (grad_q, next_kv, following), _ = lax.scan(visit, (grad_q, next_kv, following), jnp.arange(2, members - 1))
    if members > 2:
        arrived = _pass_on(following)
        more_q, more_kv = gradients(next_kv, members - 1)
        grad_q, following = grad_q + more_q, (arrived + more_kv).astype(reduce)
    return grad_q, own + _pass_on(following)


def _gathered_backward(gradients, grad_q, own, kv, reduce):
    """The gradients of everyone's keys and values, reduce-scattered at the end."""
    everyones = lax.all_gather(kv, CONTEXT_AXIS)
    members, member = lax.axis_size(CONTEXT_AXIS), lax.axis_index(CONTEXT_AXIS)

    def visit(carry, turn):
        grad_q, grad_everyones = carry
        source = (member - turn) % members
        more_q, more_kv = gradients(everyones[source], turn)
        return (grad_q + more_q, grad_everyones.at[source].set(more_kv.astype(reduce))), None

    grad_everyones = jnp.zeros((members, *own.shape), reduce).at[member].set(own.astype(reduce))
    (grad_q, grad_everyones), _ = lax.scan(visit, (grad_q, grad_everyones), jnp.arange(1, members))
    return grad_q, lax.psum_scatter(grad_everyones, CONTEXT_AXIS)
