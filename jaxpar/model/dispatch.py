"""Tokens to the devices that hold their experts and back: one function, several ways, the same result.

Everything here runs inside an island, on one device's tokens. Shapes: T tokens of this device, k choices of each, D
embed, E experts, n devices on the expert axis, e = E / n experts of one device, R rows that one device computes.

Rows are sent sorted by expert. All devices first tell each other how many rows they have for each expert, so both ends
know where every row lies, and nothing but the rows travels. ``all_to_all`` sends each row to the one device that needs
it: on GPUs with ``ragged_all_to_all``; on CPUs, for which XLA has none (JAX 0.12), with an ``all_to_all`` of buffers
that hold the worst case. ``gather`` shows every device of the axis all tokens, and adds up what comes back: less to
move when the axis is shorter than k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.model.grouped import zeros_typed_as
from jaxpar.plan.experts import exchange_mode, receive_bound
from jaxpar.sharding import EXPERT_AXIS

ExpertsFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows [R, D] sorted by local expert, int32 rows of each [e]) -> [R, D]; 0 past the last row of an expert."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """How rows travel; fixed while tracing."""

    mode: str = "auto"
    """``mesh.expert_exchange``."""
    receive_factor: float = 0.0
    """``mesh.expert_receive_factor``."""
    platform: str = "cpu"
    """Platform that the program is compiled for; decides the collective, never results."""
    product: str = "tiles_64"
    """What multiplies rows with their experts' weights, of ``jaxpar.model.grouped.GROUPED_PRODUCTS``."""


DEFAULT_EXCHANGE = Exchange()


def through_experts(
    exchange: Exchange,
    num_experts: int,
    num_devices: int,
    x_td: jax.Array,
    experts_tk: jax.Array,
    weights_tk: jax.Array,
    experts_fn: ExpertsFn,
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of each token's experts.

    Args:
        exchange: how rows travel.
        num_experts: E.
        num_devices: n.
        x_td: tokens.
        experts_tk: int32 choices; E where one is not used.
        weights_tk: float32; 0 where a choice is not used.
        experts_fn: the experts of this device.

    Returns:
        [T, D], and int32 choices of this device's tokens that found no room in a receiver's buffer (they count as 0 in
        the sum; always 0 without ``receive_factor``).
    """
    num_tokens, top_k = experts_tk.shape
    local_experts = num_experts // num_devices
    room = receive_bound(num_tokens, top_k, num_experts, num_devices, exchange.receive_factor)
    counts = _counts(experts_tk, num_experts, num_devices)
    if room < receive_bound(num_tokens, top_k, num_experts, num_devices, 0.0):
        kept = fit(counts, room)
        mine = lax.axis_index(EXPERT_AXIS)
        experts_tk = keep_first(experts_tk, kept[mine].reshape(-1), num_experts)
        lost = (counts[mine] - kept[mine]).sum()
        weights_tk = jnp.where(experts_tk < num_experts, weights_tk, 0)
        counts = kept
    else:
        lost = jnp.zeros((), jnp.int32)
    if num_devices > 1 and exchange_mode(exchange.mode, top_k, num_devices) == "gather":
        return _gathered(x_td, experts_tk, weights_tk, counts, room, experts_fn), lost
    flat = experts_tk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    rows = x_td[order // top_k]
    if num_devices == 1:
        out = experts_fn(rows, counts[0, 0])
    else:
        is_on_cpu = exchange.platform == "cpu"
        pair = min(num_tokens * min(top_k, local_experts), room)
        out = _dense(rows, counts, pair, experts_fn) if is_on_cpu else _ragged(rows, counts, room, experts_fn)
    out_tkd = out[place].reshape(num_tokens, top_k, -1)
    combined = jnp.einsum("tkd,tk->td", out_tkd, weights_tk, preferred_element_type=jnp.float32)
    return combined.astype(x_td.dtype), lost


def _counts(experts_tk: jax.Array, num_experts: int, num_devices: int) -> jax.Array:
    """int32 [source, destination, e]: rows of every device for every expert."""
    mine = zeros_typed_as((num_experts,), jnp.int32, experts_tk).at[experts_tk.reshape(-1)].add(1, mode="drop")
    counts = mine if num_devices == 1 else lax.all_gather(mine, EXPERT_AXIS)
    return counts.reshape(num_devices, num_devices, -1)


def fit(counts: jax.Array, room: int) -> jax.Array:
    """Of ``counts`` [source, destination, e] what fits into each destination's ``room``: lower sources first."""
    by_destination = counts.transpose(1, 0, 2).reshape(counts.shape[1], -1)
    before = jnp.cumsum(by_destination, 1) - by_destination
    kept = jnp.clip(room - before, 0, by_destination)
    return kept.reshape(counts.shape[1], counts.shape[0], -1).transpose(1, 0, 2)


def keep_first(experts_tk: jax.Array, kept_e: jax.Array, num_experts: int) -> jax.Array:
    """Choices with all but the first ``kept_e`` of each expert turned to E (not used)."""
    flat = experts_tk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ranked = flat[order]
    place_in_expert = jnp.arange(len(flat)) - jnp.searchsorted(ranked, ranked, side="left")
    limit = jnp.append(kept_e, 0)[ranked]
    return (
        jnp.zeros_like(flat)
        .at[order]
        .set(jnp.where(place_in_expert < limit, ranked, num_experts))
        .reshape(experts_tk.shape)
    )


def regrouped(received_se: jax.Array, room: int, starts_s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where received rows go when they are sorted by expert instead of by source.

    Args:
        received_se: int32 [source, e], rows that arrived; each source's are sorted by expert.
        room: R, rows in the buffer.
        starts_s: [source], where each source's rows begin in the buffer, ascending.

    Returns:
        int32 [R] place of each row, R for slots without a row; int32 [e] rows of each expert.
    """
    sizes = received_se.sum(0)
    slot = jnp.arange(room)
    source = jnp.searchsorted(starts_s, slot, side="right") - 1
    offset = slot - starts_s[source]
    ends = jnp.cumsum(received_se, 1)
    expert = (offset[:, None] >= ends[source]).sum(1)
    is_row = expert < received_se.shape[1]
    expert = jnp.where(is_row, expert, 0)
    within = offset - (ends - received_se)[source, expert]
    before_source = (jnp.cumsum(received_se, 0) - received_se)[source, expert]
    place = (jnp.cumsum(sizes) - sizes)[expert] + before_source + within
    return jnp.where(is_row, place, room).astype(jnp.int32), sizes


def _compute_regrouped(rows: jax.Array, place: jax.Array, sizes: jax.Array, experts_fn: ExpertsFn) -> jax.Array:
    """The experts on received rows, results in the slots where the rows were; 0 in slots without a row."""
    grouped = jnp.zeros_like(rows).at[place].set(rows, mode="drop", unique_indices=True)
    return experts_fn(grouped, sizes).at[place].get(mode="fill", fill_value=0)


def _dense(rows: jax.Array, counts: jax.Array, pair: int, experts_fn: ExpertsFn) -> jax.Array:
    """Exchange of buffers with ``pair`` slots for every other device.

    All slots are computed as one buffer, of which only the rows that are there cost time.
    """
    num_devices, mine = counts.shape[0], lax.axis_index(EXPERT_AXIS)
    sent = counts[mine].sum(-1)
    starts = jnp.cumsum(sent) - sent
    slot = jnp.arange(pair)
    index = jnp.where(slot < sent[:, None], starts[:, None] + slot, len(rows))
    buffer = rows.at[index.reshape(-1)].get(mode="fill", fill_value=0)
    arrived = lax.all_to_all(buffer, EXPERT_AXIS, 0, 0, tiled=True)
    place, sizes = regrouped(counts[:, mine], num_devices * pair, jnp.arange(num_devices) * pair)
    back = lax.all_to_all(_compute_regrouped(arrived, place, sizes, experts_fn), EXPERT_AXIS, 0, 0, tiled=True)
    return jnp.zeros_like(rows).at[index.reshape(-1)].set(back, mode="drop", unique_indices=True)


def _ragged(rows: jax.Array, counts: jax.Array, room: int, experts_fn: ExpertsFn) -> jax.Array:
    """Exchange of the rows that there are, into a buffer of ``room`` rows."""
    mine = lax.axis_index(EXPERT_AXIS)
    sent = counts.sum(-1)
    axes = (rows, counts)
    buffer = zeros_typed_as((room, rows.shape[1]), rows.dtype, *axes)
    arrived = lax.ragged_all_to_all(rows, buffer, *ragged_offsets(sent, mine), axis_name=EXPERT_AXIS)
    received = sent[:, mine]
    place, sizes = regrouped(counts[:, mine], room, jnp.cumsum(received) - received)
    out = _compute_regrouped(arrived, place, sizes, experts_fn)
    home = zeros_typed_as(rows.shape, rows.dtype, *axes)
    return lax.ragged_all_to_all(out, home, *ragged_offsets(sent.T, mine), axis_name=EXPERT_AXIS)


def ragged_offsets(sent: jax.Array, mine: jax.Array) -> tuple[jax.Array, ...]:
    """What ``ragged_all_to_all`` wants to know.

    Args:
        sent: int32 [source, destination] rows.
        mine: index of this device.

    Returns:
        int32 [n] each: where rows for each destination begin here, how many they are, where they go in its buffer, and
        how many come from each source.
    """
    begins = (jnp.cumsum(sent, 1) - sent)[mine]
    lands = (jnp.cumsum(sent, 0) - sent)[mine]
    return tuple(a.astype(jnp.int32) for a in (begins, sent[mine], lands, sent[:, mine]))


def _gathered(
    x_td: jax.Array,
    experts_tk: jax.Array,
    weights_tk: jax.Array,
    counts: jax.Array,
    room: int,
    experts_fn: ExpertsFn,
) -> jax.Array:
    """Every device sees the tokens of all, computes what its experts are wanted for, and the sums are scattered."""
    local_experts, top_k = counts.shape[2], experts_tk.shape[1]
    tokens, experts, weights = (
        lax.all_gather(a, EXPERT_AXIS, axis=0, tiled=True) for a in (x_td, experts_tk, weights_tk)
    )
    expert = experts.reshape(-1) - lax.axis_index(EXPERT_AXIS) * local_experts
    expert = jnp.where((expert >= 0) & (expert < local_experts), expert, local_experts)
    order = jnp.argsort(expert, stable=True)[:room]
    sizes = counts[:, lax.axis_index(EXPERT_AXIS)].sum(0)
    out = experts_fn(tokens[order // top_k], sizes)
    weighted = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    sums = zeros_typed_as(tokens.shape, jnp.float32, weighted, tokens).at[order // top_k].add(weighted)
    return lax.psum_scatter(sums.astype(x_td.dtype), EXPERT_AXIS, scatter_dimension=0, tiled=True)
