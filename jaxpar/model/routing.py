"""Which experts a token goes to, with which weights, and how evenly: all local to a device's rows, but for the capacity
of rows that the context axis splits.

Shapes: B rows, S sequence (what of it is on the device), D embed, E experts, k experts per token.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import current_mesh
from jaxpar.config.schema import ModelConfig
from jaxpar.model.zigzag import from_zigzag, to_zigzag
from jaxpar.sharding import CONTEXT_AXIS


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the router decided for [B, S] tokens."""

    experts: jax.Array
    """int32 [B, S, k], best first; E where a choice is not used: padding, or an expert that is full."""
    weights: jax.Array
    """float32 [B, S, k]; 0 where a choice is not used."""
    shares: jax.Array
    """float32 [B, S, E]: affinities, scaled to the sum 1 per token."""
    logits: jax.Array
    """float32 [B, S, E]."""
    wanted: jax.Array
    """int32 [B, S, k]: the experts chosen before capacity; E for padding."""


def choose(
    model: ModelConfig, x_bsd: jax.Array, router_de: jax.Array, bias_e: jax.Array | None, valid_bs: jax.Array
) -> Choices:
    """Top-k routing in float32.

    softmax: affinities are a softmax over all experts (Mixtral, arXiv 2401.04088; Qwen3). sigmoid: each expert's own
    sigmoid, and ``bias_e`` counts in the choice but not in the weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    With ``norm_topk`` the weights of the chosen are scaled to the sum 1.

    Args:
        model: its routing options.
        x_bsd: normalised block input.
        router_de: weights of the router.
        bias_e: balance bias of a sigmoid router.
        valid_bs: bool; padding goes nowhere.
    """
    num_experts = model.num_experts
    logits = jnp.einsum("bsd,de->bse", x_bsd.astype(jnp.float32), router_de.astype(jnp.float32))
    if model.router == "sigmoid":
        affinities = jax.nn.sigmoid(logits)
        shares = affinities / affinities.sum(-1, keepdims=True)
        scores = affinities + lax.stop_gradient(bias_e)
    else:
        scores = affinities = shares = jax.nn.softmax(logits, -1)
    if model.num_expert_groups:
        scores = _limit_groups(scores, model.num_expert_groups, model.top_k_groups)
    _, experts = lax.top_k(scores, model.top_k)
    weights = jnp.take_along_axis(affinities, experts, -1)
    if model.norm_topk:
        weights = weights / weights.sum(-1, keepdims=True)
    wanted = jnp.where(valid_bs[..., None], experts, num_experts)
    experts = wanted
    if model.capacity_factor:
        experts = _limit_capacity(wanted, num_experts, capacity(model, wanted.shape[1] * _num_members()))
    weights = jnp.where(experts < num_experts, weights, 0)
    return Choices(experts=experts, weights=weights, shares=shares, logits=logits, wanted=wanted)


def _limit_groups(scores: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    """Scores with the experts of all but the best groups out of reach; a group counts by its two best experts."""
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    _, kept = lax.top_k(best, top_groups)
    is_kept = (kept[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def capacity(model: ModelConfig, seq_len: int) -> int:
    """Tokens of one row that one expert takes when ``capacity_factor`` limits it."""
    return max(1, math.ceil(model.capacity_factor * model.top_k * seq_len / model.num_experts))


def _num_members() -> int:
    """Devices that share a row."""
    return current_mesh().shape.get(CONTEXT_AXIS, 1)


def _limit_capacity(wanted: jax.Array, num_experts: int, limit: int) -> jax.Array:
    """Choices beyond each expert's capacity in a row become E: first choices before second ones, early tokens first.

    The limit is per row, so that who is left out does not depend on the mesh. A context member holds two chunks of the
    row (``jaxpar.model.zigzag``).
    """
    rows, length, top_k = wanted.shape
    num_chunks = 1 if _num_members() == 1 else 2
    by_choice = wanted.reshape(rows, num_chunks, length // num_chunks, top_k).swapaxes(2, 3)
    is_mine = by_choice[..., None] == jnp.arange(num_experts)
    before = _counted_before(is_mine.sum(3))
    place = ((jnp.cumsum(is_mine, 3) + before[:, :, :, None]) * is_mine).sum(-1)
    kept = jnp.where(place <= limit, by_choice, num_experts)
    return kept.swapaxes(2, 3).reshape(wanted.shape)


def _counted_before(counts: jax.Array) -> jax.Array:
    """Of each expert and row, choices that come before those of a chunk: earlier choices of all chunks, and the same
    choice in earlier chunks.

    Args:
        counts: int32 [B, chunks, k, E] of this device's chunks; with a context axis an early and a late one, and the
            members exchange theirs.
    """
    num_members, (rows, num_chunks, top_k, num_experts) = _num_members(), counts.shape
    everyones = counts
    if num_members > 1:
        everyones = from_zigzag(lax.all_gather(counts, CONTEXT_AXIS, axis=1, tiled=True), num_members)
    by_choice = everyones.swapaxes(1, 2).reshape(rows, -1, num_experts)
    before = (jnp.cumsum(by_choice, 1) - by_choice).reshape(rows, top_k, -1, num_experts).swapaxes(1, 2)
    if num_members == 1:
        return before
    first = lax.axis_index(CONTEXT_AXIS) * num_chunks
    return lax.dynamic_slice_in_dim(to_zigzag(before, num_members), first, num_chunks, 1)


def count_by_row(experts_bsk: jax.Array, num_experts: int) -> jax.Array:
    """int32 [B, E]: how often each expert was chosen in each row; unused choices do not count."""
    flat = experts_bsk.reshape(experts_bsk.shape[0], -1)
    rows = jnp.arange(flat.shape[0])[:, None]
    return jnp.zeros((flat.shape[0], num_experts), jnp.int32).at[rows, flat].add(1, mode="drop")
