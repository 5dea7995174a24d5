"""Mixture-of-experts MLP: router, exchange over the expert axis, experts, and what is said about their load.

Shapes: B batch, S sequence, D embed, E experts, F expert mlp, k experts per token, L layers. Parameters as in
``decoder``: ``router`` [L, D, E], ``gate`` and ``up`` [L, E, D, F], ``down`` [L, E, F, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import current_mesh, island, opened, spec_of, vary_over
from jaxpar.config.schema import ModelConfig
from jaxpar.mesh import used_axes
from jaxpar.model.dispatch import Exchange, through_experts
from jaxpar.model.grouped import GROUPED_PRODUCTS
from jaxpar.model.routing import Choices, choose, count_by_row
from jaxpar.sharding import CONTEXT_AXIS, EXPERT_AXIS, GATHER_AXES, PIPELINE_AXIS, SEQUENCE_AXIS, axes_of

BIAS = "balance_bias"
"""Name of the parameter that balances a sigmoid router: moved by ``rebalance``, never by gradients."""

Routing = dict[str, jax.Array]
"""What a block says about its router, per microbatch. float32 [B]: ``balance`` and ``router_z``, loss terms of each
row. Without gradient: ``load`` int32 [E] choices per expert, before any was left out; ``dropped`` and ``overflow``
int32 choices left out by capacity and by full receive buffers; ``tokens`` int32; ``logit_square`` float32, summed over
tokens and experts."""


class MixtureOfExperts(nnx.Module):
    """Routed experts of a stack of blocks. Shared ones, which every token uses, are a dense MLP of the block.

    Args:
        model: the whole model.
        exchange: how tokens reach their experts.
        into: makes a projection out of the residual stream from its logical axes; see ``decoder.Stacked``.
        back: makes a projection into it.
        full: makes a constant.
    """

    def __init__(
        self,
        model: ModelConfig,
        exchange: Exchange,
        into: Callable[..., nnx.Param],
        back: Callable[..., nnx.Param],
        full: Callable[..., nnx.Param],
    ):
        self.model = model
        self.exchange = exchange
        self.router = into("norm", "router")
        if model.router == "sigmoid":
            self.balance_bias = full(0, "router")
        self.gate = into("experts", "expert_embed", "expert_mlp")
        self.up = into("experts", "expert_embed", "expert_mlp")
        self.down = back("experts", "expert_mlp", "expert_embed")

    def __call__(
        self, y_bsd: jax.Array, x_spec: P, segment_ids_bs: jax.Array, compute: jnp.dtype, reduce: jnp.dtype, remat: str
    ) -> tuple[jax.Array, Routing]:
        """What the experts add to the residual stream, and the routing.

        Args:
            y_bsd: normalised block input, the sequence whole over ``tensor``.
            x_spec: of activations between blocks; the result has it.
            segment_ids_bs: int32; tokens of segment 0 are padding and go to no expert.
            compute: dtype of products and gathers.
            reduce: dtype of the gradients' reduce-scatters.
            remat: ``train.remat``; with none, backward passes gather the weights again.
        """
        weights = {name: opened(getattr(self, name)[...], reduce) for name in ("router", "gate", "up", "down")}
        if self.model.router == "sigmoid":
            weights[BIAS] = getattr(self, BIAS)[...]
        specs = {name: spec_of(weight) for name, weight in weights.items()}
        token_spec = spec_of(segment_ids_bs)
        row_spec = P(token_spec.partitions[0])
        # Without axes that are manual around this: the rows of a microbatch are then one replica's.
        token_axes = tuple(axis for entry in token_spec.partitions for axis in axes_of(entry))
        routing_specs = dict.fromkeys(("load", "dropped", "overflow", "tokens", "logit_square"), P())
        routing_specs |= {"balance": row_spec, "router_z": row_spec}
        body = partial(_local, self.model, self.exchange, specs, token_axes, compute, reduce, remat)
        in_specs = (spec_of(y_bsd), specs, token_spec)
        return island(body, in_specs, (x_spec, routing_specs))(y_bsd, weights, segment_ids_bs)


def _local(
    model: ModelConfig,
    exchange: Exchange,
    specs: Mapping[str, P],
    token_axes: tuple[str, ...],
    compute: jnp.dtype,
    reduce: jnp.dtype,
    remat: str,
    y_bsd: jax.Array,
    weights: Mapping[str, jax.Array],
    segment_ids_bs: jax.Array,
) -> tuple[jax.Array, Routing]:
    """One device: its rows (whole sequence over ``tensor``), its experts, its part of their width."""
    mesh = current_mesh()
    everywhere = used_axes(mesh, [axis for axis in mesh.axis_names if axis != PIPELINE_AXIS])
    # Cotangents are then added up over those axes over which a value did not vary.
    y_bsd, segment_ids_bs = vary_over(y_bsd, everywhere), vary_over(segment_ids_bs, everywhere)
    weights = {name: vary_over(weight, everywhere) for name, weight in weights.items()}
    choices = choose(model, y_bsd, weights["router"], weights.get(BIAS), segment_ids_bs != 0)
    product = GROUPED_PRODUCTS[exchange.product]

    def multiply(rows: jax.Array, name: str, sizes: jax.Array) -> jax.Array:
        def gathered_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
            return product(rows, _gather_local(weight, specs[name], compute, reduce), sizes)

        # As for dense weights: without remat, autodiff would keep every gathered weight.
        return (jax.checkpoint(gathered_product) if remat == "none" else gathered_product)(rows, weights[name])

    def experts(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(multiply(rows, "gate", sizes)) * multiply(rows, "up", sizes)
        return multiply(hidden, "down", sizes)

    rows, length, embed_dim = y_bsd.shape
    flat = (rows * length, model.top_k)
    out_td, overflow = through_experts(
        exchange,
        model.num_experts,
        mesh.shape[EXPERT_AXIS],
        y_bsd.reshape(-1, embed_dim),
        choices.experts.reshape(flat),
        choices.weights.reshape(flat),
        experts,
    )
    out_bsd = out_td.reshape(rows, length, embed_dim)
    if mesh.shape[SEQUENCE_AXIS] > 1:
        # Each tensor device has the part of the sum that its width gives.
        out_bsd = lax.psum_scatter(out_bsd, SEQUENCE_AXIS, scatter_dimension=1, tiled=True)
    return out_bsd, _routing(model, choices, segment_ids_bs != 0, overflow, token_axes)


def _gather_local(weight: jax.Array, spec: P, compute: jnp.dtype, reduce: jnp.dtype) -> jax.Array:
    """``collectives.gather_weight`` inside an island: the experts stay where they are, only their dims are gathered."""
    sharded = [
        (dim, axes_of(entry))
        for dim, entry in enumerate(spec.partitions)
        if set(axes_of(entry)) & (set(GATHER_AXES) - {EXPERT_AXIS})
    ]
    if not sharded:
        return weight.astype(compute)
    ((dim, axes),) = sharded

    @jax.custom_vjp
    def gathered(w: jax.Array) -> jax.Array:
        return lax.all_gather(w.astype(compute), axes, axis=dim, tiled=True)

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        g = lax.psum_scatter(g.astype(reduce), axes, scatter_dimension=dim, tiled=True)
        return (g.astype(weight.dtype),)

    gathered.defvjp(lambda w: (gathered(w), None), backward)
    return gathered(weight)


def _routing(
    model: ModelConfig, choices: Choices, valid_bs: jax.Array, overflow: jax.Array, token_axes: tuple[str, ...]
) -> Routing:
    """Loss terms per row, and sums over the whole microbatch, which ``token_axes`` split.

    The balance term of a row is sum over experts of f P, f an expert's share of the row's choices times E, P its mean
    share of affinity: 1 when even, E at worst (Switch Transformer, arXiv 2101.03961, equation 4; per sequence as in
    DeepSeek-V3, arXiv 2412.19437, equation 17). The z term is the mean squared log-partition of the router's logits
    (ST-MoE, arXiv 2202.08906, equation 5).
    """
    mesh = current_mesh()
    copies = mesh.shape[SEQUENCE_AXIS]

    def over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Sum over axes that hold different tokens; the tensor axis holds copies, whose gradients add up to one."""
        axes = tuple(axis for axis in (*axes, SEQUENCE_AXIS) if axis in jax.typeof(x).mat.varying)
        x = lax.psum(x, axes) if axes else x
        return x / copies if jnp.issubdtype(x.dtype, jnp.floating) else x // copies

    row_axes = (CONTEXT_AXIS,)
    valid = valid_bs.astype(jnp.float32)
    counts_be = over(count_by_row(choices.wanted, model.num_experts), row_axes)
    length_b = jnp.maximum(over(valid.sum(1), row_axes), 1)
    share_be = over((choices.shares * valid[..., None]).sum(1), row_axes) / length_b[:, None]
    frequency_be = counts_be * (model.num_experts / model.top_k) / length_b[:, None]
    z_bs = jax.nn.logsumexp(choices.logits, -1) ** 2
    dropped = (choices.wanted < model.num_experts).sum() - (choices.experts < model.num_experts).sum()
    squares = lax.stop_gradient((choices.logits**2 * valid[..., None]).sum())
    return {
        "balance": (frequency_be * share_be).sum(-1),
        "router_z": over((z_bs * valid).sum(1), row_axes) / length_b,
        "load": over(count_by_row(choices.wanted, model.num_experts).sum(0), token_axes),
        "dropped": over(dropped, token_axes),
        "overflow": over(overflow, token_axes),
        "tokens": over(valid_bs.sum(), token_axes),
        "logit_square": over(squares, token_axes),
    }


def rebalance(params: dict, load_le: jax.Array, rate: float) -> dict:
    """Parameters with the balance biases moved towards an even load, if there are any.

    The bias of an expert with more choices than the mean of its block falls by ``rate``, that of one with fewer rises
    (arXiv 2408.15664, algorithm 1).

    Args:
        params: nested dict, its experts in ``layers.moe``.
        load_le: int32 [L, E], choices of the whole step.
        rate: ``model.balance_rate``.
    """
    moe = params["layers"]["moe"]
    if BIAS not in moe:
        return params
    load = load_le.astype(jnp.float32)
    bias = moe[BIAS] + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
    return params | {"layers": params["layers"] | {"moe": moe | {BIAS: bias.astype(moe[BIAS].dtype)}}}


def load_metrics(routing: Routing) -> dict[str, jax.Array]:
    """What the sums of a step say, as float32 scalars.

    Returns:
        ``load_entropy``, of the shares of the experts, mean over blocks, 1 when even and 0 when one gets all;
        ``load_max``, the fullest expert's load over the mean, of the worst block; ``dropped`` and ``overflow``, shares
        of all choices; ``router_logits``, root mean square of the router's logits. A block without a token (padding of
        the stack) does not count.
    """
    load = routing["load"].astype(jnp.float32)
    num_experts = load.shape[-1]
    total = jnp.maximum(load.sum(-1, keepdims=True), 1)
    share = load / total
    entropy = -(share * jnp.log(jnp.where(share > 0, share, 1))).sum(-1) / math.log(max(2, num_experts))
    choices = jnp.maximum(load.sum(), 1)
    num_logits = jnp.maximum(routing["tokens"].sum(), 1).astype(jnp.float32) * num_experts
    return {
        "load_entropy": entropy.sum() / jnp.maximum((routing["tokens"] > 0).sum(), 1),
        "load_max": (share.max(-1) * num_experts).max(),
        "dropped": routing["dropped"].sum() / choices,
        "overflow": routing["overflow"].sum() / choices,
        "router_logits": jnp.sqrt(routing["logit_square"].sum() / num_logits),
    }
