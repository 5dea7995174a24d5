"""Next-token loss: vocab-parallel cross entropy in token chunks, with its gradient computed on the way forward.

Shapes: B batch, S sequence, T tokens of one device (rows x S / context), C tokens of one chunk, D embed, V padded
vocabulary.

The [T, V] logits of a modern vocabulary are the largest array of a step (2 x 8192 tokens of 128256 ids: 7.8 GiB in
float32). Only [C, V / tensor] of them exist at a time. The softmax is at hand while a chunk's logits are, so the
gradient with respect to hidden states and head is formed there and then: nothing is recomputed, and what is kept for
the backward pass is one [T, D] array and the head's reduce-scattered gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from jaxpar.collectives import current_mesh, island, spec_of, stage_axes, unreduced, varying, zeros_varying
from jaxpar.config.schema import ModelConfig
from jaxpar.mesh import used_axes
from jaxpar.model.decoder import Decoder, Numerics
from jaxpar.model.dropout import KEYS
from jaxpar.model.moe import Routing
from jaxpar.model.zigzag import split_sequence
from jaxpar.sharding import GATHER_AXES, SEQUENCE_AXIS, axes_of

LOGITS_BYTES = 512 * 2**20
"""Largest float32 logits of one chunk on one device when ``train.loss_chunk_tokens`` is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What defines the loss, fixed while tracing."""

    vocab_size: int
    """True vocabulary; logits of padded ids are masked."""
    z_loss: float
    """Coefficient of the squared log-partition term."""
    chunk_tokens: int
    """Tokens per chunk on a device; 0 chooses by ``LOGITS_BYTES``."""
    numerics: Numerics
    tied: bool
    """The head is an embedding [V, D] instead of [D, V]."""
    vocab_axes: tuple[str, ...] = ()
    """Mesh axes that split the vocabulary; filled in where the loss knows them."""


def next_token_loss(
    decoder: Decoder, batch: Mapping[str, jax.Array], *, z_loss: float = 0.0, chunk_tokens: int = 0
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Loss of one microbatch as a sum and a weight, so that microbatches add up exactly.

    Args:
        decoder: the model.
        batch: int32 tokens, labels, positions, segment_ids and float32 weights, each [B, S]; in training with dropout
            also uint32 keys (``jaxpar.model.dropout``).
        z_loss: coefficient of the squared log-partition (PaLM, arXiv 2204.02311, section 5).
        chunk_tokens: see ``LossOptions``.

    Returns:
        The weighted sum over tokens of cross entropy plus z-loss (with experts: plus the router's losses), the sum of
        weights, and sums to report (``cross_entropy``, without the z-loss), all float32 scalars. With experts the last
        holds ``balance_loss`` and ``router_z_loss``, without their coefficients, and ``routing``, see
        ``jaxpar.model.moe.Routing``.
    """
    hidden = decoder.hidden_and_routing(batch["tokens"], batch["positions"], batch["segment_ids"], batch.get(KEYS))
    return hidden_loss(decoder, *hidden, batch, z_loss=z_loss, chunk_tokens=chunk_tokens)


def hidden_loss(
    decoder: Decoder,
    x_bsd: jax.Array,
    routing: Routing,
    batch: Mapping[str, jax.Array],
    *,
    z_loss: float = 0.0,
    chunk_tokens: int = 0,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """``next_token_loss`` of what ``Decoder.hidden_and_routing`` returns; reads only the head of the decoder."""
    head, tied = decoder.head_weight
    options = LossOptions(
        vocab_size=decoder.model.vocab_size,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        numerics=decoder.numerics,
        tied=tied,
    )
    labels, weights = split_sequence(batch["labels"]), split_sequence(batch["weights"])
    objective, cross_entropy = token_cross_entropy(options, x_bsd, head, labels, weights)
    sums = {"cross_entropy": cross_entropy}
    if routing:
        router_loss, router_sums = router_losses(decoder.model, routing, batch["weights"])
        objective, sums = objective + router_loss, sums | router_sums
    return objective, jnp.sum(batch["weights"]), sums


def router_losses(model: ModelConfig, routing: Routing, weights_bs: jax.Array) -> tuple[jax.Array, dict]:
    """Loss terms of blocks with experts, each row as often as it has trained tokens: their mean is then the same
    however rows are spread over microbatches and devices, and blocks over stages.

    Args:
        model: coefficients of the terms.
        routing: of any number of blocks, with a leading L.
        weights_bs: float32 [B, S].

    Returns:
        What to add to the loss of the microbatch, and sums to report, see ``next_token_loss``.
    """
    weight_b = weights_bs.sum(1)
    balance, router_z = (jnp.sum(routing[name].sum(0) * weight_b) for name in ("balance", "router_z"))
    sums = {name: value for name, value in routing.items() if name not in ("balance", "router_z")}
    loss = model.balance_coef * balance + model.router_z_coef * router_z
    return loss, {"balance_loss": balance, "router_z_loss": router_z, "routing": sums}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_cross_entropy(
    options: LossOptions, x_bsd: jax.Array, head: jax.Array, labels_bs: jax.Array, weights_bs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums over all tokens of (cross entropy + z-loss, cross entropy).

    Only the first result is differentiable, with respect to ``x_bsd`` and ``head``.

    Args:
        options: static options.
        x_bsd: final hidden states, S sharded over ``context`` and ``tensor``.
        head: [D, V] or [V, D], V over ``tensor``, D over the gather axes. Inside a pipeline V is first split over the
            stages, all of which have the same ``x_bsd``.
        labels_bs: int32, 0 <= label < vocab_size wherever the weight is not 0; S sharded over ``context``.
        weights_bs: float32, likewise.
    """
    return _island(options, x_bsd, head, labels_bs, weights_bs, with_gradient=False)


def _forward(options, x_bsd, head, labels_bs, weights_bs):
    sums, gradient = _island(options, x_bsd, head, labels_bs, weights_bs, with_gradient=True)
    return sums, gradient


def _backward(_options, gradient, cotangents):
    grad_x, grad_head = gradient
    scale, _ = cotangents
    partial_over = spec_of(grad_head).unreduced
    scale_head = reshard(scale, P(reduced=partial_over)) if partial_over else scale
    return (grad_x * scale.astype(grad_x.dtype), grad_head * scale_head.astype(grad_head.dtype), None, None)


token_cross_entropy.defvjp(_forward, _backward)


def _island(options, x_bsd, head, labels_bs, weights_bs, *, with_gradient):
    """Run ``_local`` with the right specs."""
    token_spec = spec_of(labels_bs)
    x_spec, head_spec = spec_of(x_bsd), spec_of(head)
    vocab_axes = (*stage_axes(head), *used_axes(current_mesh(), (SEQUENCE_AXIS,)))
    token_axes = tuple(axis for entry in token_spec.partitions for axis in axes_of(entry))
    body = partial(_local, dataclasses.replace(options, vocab_axes=vocab_axes), head_spec, token_axes, with_gradient)
    out_specs = (P(), P())
    if with_gradient:
        out_specs = (out_specs, (x_spec, P(*head_spec.partitions, unreduced=head_spec.reduced)))
    return island(body, (x_spec, head_spec, token_spec, token_spec), out_specs)(x_bsd, head, labels_bs, weights_bs)


def _local(options, head_spec, token_axes, with_gradient, x, head, labels, weights):
    """Loss of one device's tokens against one vocabulary shard: gather, chunks, reduce."""
    mesh = current_mesh()
    numerics = options.numerics
    split_vocab, embed_dim = mesh.shape[SEQUENCE_AXIS] > 1, 1 if options.tied else 0
    gather_axes = tuple(a for a in axes_of(head_spec.partitions[embed_dim]) if a in GATHER_AXES)
    if split_vocab:
        x = lax.all_gather(x, SEQUENCE_AXIS, axis=1, tiled=True)
    head_dtype = head.dtype
    head = varying(head, head_spec.reduced).astype(numerics.compute)
    if gather_axes:
        head = lax.all_gather(head, gather_axes, axis=embed_dim, tiled=True)

    sums, (grad_x, grad_head) = _scan_chunks(options, with_gradient, x, head, labels, weights)
    sums = tuple(lax.psum(s, token_axes) if token_axes else s for s in sums)
    if not with_gradient:
        return sums
    if split_vocab:
        # Each vocabulary shard knows its own part of the hidden states' gradient.
        grad_x = lax.psum_scatter(grad_x, SEQUENCE_AXIS, scatter_dimension=1, tiled=True)
    if stages := tuple(axis for axis in options.vocab_axes if axis != SEQUENCE_AXIS):
        grad_x = lax.psum(grad_x, stages)
    if gather_axes:
        grad_head = lax.psum_scatter(grad_head, gather_axes, scatter_dimension=embed_dim, tiled=True)
    return sums, (grad_x, unreduced(grad_head.astype(head_dtype), head_spec.reduced))


def _scan_chunks(options, with_gradient, x, head, labels, weights):
    """Sums and gradients over chunks of the local tokens, padded with weight 0 to a whole number of chunks."""
    rows, length, embed_dim = x.shape
    num_tokens = rows * length
    vocab = head.shape[0 if options.tied else 1]
    chunk = min(num_tokens, options.chunk_tokens or max(1, LOGITS_BYTES // (4 * vocab)))
    num_chunks = math.ceil(num_tokens / chunk)
    padding = num_chunks * chunk - num_tokens

    def split(a: jax.Array) -> jax.Array:
        a = a.reshape(num_tokens, *a.shape[2:])
        return jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))).reshape(num_chunks, chunk, *a.shape[1:])

    def body(carry, inputs):
        sums, grad_head = carry
        chunk_sums, grad_x, grad_head_part = _chunk(options, with_gradient, head, *inputs)
        sums = tuple(a + b for a, b in zip(sums, chunk_sums, strict=True))
        return (sums, grad_head + grad_head_part if with_gradient else grad_head), grad_x

    inputs = (split(x), split(labels), split(weights))
    if num_chunks == 1:
        sums, grad_x, grad_head = _chunk(options, with_gradient, head, *(a[0] for a in inputs))
    else:
        by_tokens = tuple(jax.typeof(labels).mat.varying)
        by_tokens_and_vocab = (*by_tokens, *options.vocab_axes)
        sums = (zeros_varying((), jnp.float32, by_tokens),) * 2
        grad_head = zeros_varying(head.shape, options.numerics.reduce, by_tokens_and_vocab) if with_gradient else None
        (sums, grad_head), grad_x = lax.scan(body, (sums, grad_head), inputs)
    if with_gradient:
        grad_x = grad_x.reshape(-1, embed_dim)[:num_tokens].reshape(rows, length, embed_dim)
    return sums, (grad_x, grad_head)


def _chunk(options, with_gradient, head, x_cd, labels_c, weights_c):
    """Sums of one chunk, and gradients of its first sum with respect to hidden states and head."""
    shard_vocab = head.shape[0 if options.tied else 1]
    axes = options.vocab_axes
    first_id = lax.axis_index(axes) * shard_vocab if axes else 0
    across = (lambda a: lax.psum(a, axes)) if axes else (lambda a: a)

    head_axes = "vd" if options.tied else "dv"
    logits = jnp.einsum(f"cd,{head_axes}->cv", x_cd, head, preferred_element_type=jnp.float32)
    ids = first_id + jnp.arange(shard_vocab)
    logits = jnp.where(ids < options.vocab_size, logits, -jnp.inf)
    highest = lax.stop_gradient(logits.max(-1))
    if axes:
        highest = lax.pmax(highest, axes)
    exps = jnp.exp(logits - highest[:, None])
    total = across(exps.sum(-1))
    log_partition = jnp.log(total) + highest
    local_labels = labels_c - first_id
    mine = (local_labels >= 0) & (local_labels < shard_vocab)
    picked = jnp.take_along_axis(logits, jnp.where(mine, local_labels, 0)[:, None], -1)[:, 0]
    cross_entropy = log_partition - across(jnp.where(mine, picked, 0.0))
    objective = cross_entropy + options.z_loss * log_partition**2
    # A weight of 0 must win over a label whose logit is masked.
    sums = tuple(jnp.sum(jnp.where(weights_c != 0, weights_c * a, 0.0)) for a in (objective, cross_entropy))
    if not with_gradient:
        return sums, None, None

    softmax = exps / total[:, None]
    grad = softmax * (1 + 2 * options.z_loss * log_partition)[:, None] - (ids == labels_c[:, None])
    grad = (grad * weights_c[:, None]).astype(options.numerics.compute)
    grad_x = jnp.einsum(f"cv,{head_axes}->cd", grad, head)
    grad_head = jnp.einsum(f"cv,cd->{head_axes}", grad, x_cd, preferred_element_type=options.numerics.reduce)
    return sums, grad_x, grad_head
