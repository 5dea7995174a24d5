"""Pieces of a decoder block.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V padded vocabulary, L layers.
Activations between blocks are [B, S, D] with B over the batch axes and S over ``context`` and ``tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import current_mesh, island, spec_of, stage_axes, sum_over, varying
from jaxpar.config.schema import RopeScaling
from jaxpar.sharding import SEQUENCE_AXIS, TOKEN_AXES, axes_of, batch_entry, sequence_entry


def normalise(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last dim (arXiv 1910.07467), in float32, result in the dtype of ``x``."""
    x_f32 = x.astype(jnp.float32)
    return (x_f32 * lax.rsqrt(jnp.mean(x_f32 * x_f32, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def normalise_plus_one(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm that multiplies by 1 + scale (Gemma), in float32, result in the dtype of ``x``."""
    return normalise(x, 1 + scale.astype(jnp.float32), eps)


def layer_normalise(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last dim (arXiv 1607.06450), in float32, result in the dtype of ``x``."""
    x_f32 = x.astype(jnp.float32)
    x_f32 = x_f32 - jnp.mean(x_f32, -1, keepdims=True)
    return (x_f32 * lax.rsqrt(jnp.mean(x_f32 * x_f32, -1, keepdims=True) + eps) * scale + bias).astype(x.dtype)


NORMS: Mapping[str, Callable[..., jax.Array]] = {
    "rms": normalise,
    "rms_plus_one": normalise_plus_one,
    "layer": layer_normalise,
}
"""(x, scale, and bias of a LayerNorm, epsilon) -> x normalised, by ``Family.norm``."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""By ``Family.activation``."""


def norm(kind: str, x: jax.Array, vectors: Sequence[jax.Array], eps: float) -> jax.Array:
    """One of ``NORMS`` on [B, S, D] activations; gradients of the vectors stay partial sums (see ``collectives``)."""
    spec, vector_specs = spec_of(x), [spec_of(vector) for vector in vectors]

    def local(x: jax.Array, *vectors: jax.Array) -> jax.Array:
        return NORMS[kind](x, *(varying(v, s.reduced) for v, s in zip(vectors, vector_specs, strict=True)), eps)

    return island(local, (spec, *vector_specs), spec)(x, *vectors)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a vector over the last dim, sharded like it, in float32; the result has the dtype of ``x``.

    The gradient of the bias is then a float32 sum over tokens.
    """
    spec, bias_spec = spec_of(x), spec_of(bias)

    def local(x: jax.Array, bias: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) + varying(bias, bias_spec.reduced)).astype(x.dtype)

    return island(local, (spec, bias_spec), spec)(x, bias)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Angular frequency of each of the head_dim / 2 rotation planes, in radians per position.

    Source: RoFormer (arXiv 2104.09864) equation 15; scaling as ``_compute_llama3_parameters`` in Hugging Face
    transformers (long wavelengths divided by ``factor``, short ones kept, linear between).
    """
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return frequencies

    def scaled(frequency: float) -> float:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = min(1.0, max(0.0, keep))
        return (1 - keep) * frequency / scaling.factor + keep * frequency

    return [scaled(frequency) for frequency in frequencies]


def rope_angles(positions_bs: jax.Array, frequencies: list[float]) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotation of every position: two float32 [B, S, h/2]."""
    angles = positions_bs.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_bshk: jax.Array, cos_bsk: jax.Array, sin_bsk: jax.Array) -> jax.Array:
    """Rotary embedding, first half of the head against the second (the convention of Hugging Face Llama)."""
    first, second = jnp.split(x_bshk.astype(jnp.float32), 2, -1)
    cos, sin = cos_bsk[:, :, None], sin_bsk[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_bshk.dtype)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Inside an island: ``table[tokens]``, whose gradient is added up in float32 whatever the table's dtype.

    A frequent token has thousands of rows in a microbatch; bfloat16 sums stop growing after some hundred.
    """
    if table.dtype == jnp.float32:
        return table[tokens]
    own = jax.typeof(table).mat.varying
    axes = own | jax.typeof(tokens).mat.varying
    shape, dtype = table.shape, table.dtype

    @jax.custom_vjp
    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    def backward(tokens: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
        zeros = varying(jnp.zeros(shape, jnp.float32), axes)
        return zeros.at[tokens].add(grad.astype(jnp.float32)).astype(dtype), None

    rows.defvjp(lambda table, tokens: (table[tokens], tokens), backward)
    return rows(varying(table, axes - own), tokens)


def embed(table_vd: jax.Array, tokens_bs: jax.Array, compute: jnp.dtype) -> jax.Array:
    """Look tokens up in a table sharded over vocabulary and embed, moving activations instead of the table.

    Each device looks the tokens of its whole gather group up in its own columns; ``psum_scatter`` adds the vocabulary
    shards up and cuts the sequence; an all-to-all trades columns for tokens. The gradient takes the same way back, so
    the table is never gathered and its gradient needs no reduction over the gather axes.

    Args:
        table_vd: [V, D], V over ``tensor`` or whole (a table of positions), D over the gather axes. Inside a pipeline a
            vocabulary is first split over the stages, and all of them look tokens up for the one that needs them.
        tokens_bs: int32 [B, S], B over the batch axes, S over ``context``; rows of the table.
        compute: dtype of the result.

    Returns:
        [B, S, D] as between blocks.
    """
    mesh = current_mesh()
    table_spec = spec_of(table_vd)
    vocab_axes, embed_axes = (axes_of(entry) for entry in table_spec.partitions)
    exchange_axes = tuple(axis for axis in embed_axes if axis in TOKEN_AXES)
    stages, tensor = stage_axes(table_vd), mesh.shape[SEQUENCE_AXIS]
    shard_axes = (*stages, *vocab_axes)

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = varying(table, table_spec.reduced)
        # Members of the group that differ in their part of the sequence are further rows here.
        if exchange_axes:
            tokens = lax.all_gather(tokens, exchange_axes, axis=0, tiled=True)
        if shard_axes:
            tokens = tokens - lax.axis_index(shard_axes) * table.shape[0]
            mine = (tokens >= 0) & (tokens < table.shape[0])
            rows = jnp.where(mine[..., None], _rows(table, jnp.where(mine, tokens, 0)), 0).astype(compute)
        else:
            if tensor > 1:
                length = tokens.shape[1] // tensor
                tokens = lax.dynamic_slice_in_dim(tokens, lax.axis_index(SEQUENCE_AXIS) * length, length, axis=1)
            rows = _rows(table, tokens).astype(compute)
        if vocab_axes:
            rows = lax.psum_scatter(rows, SEQUENCE_AXIS, scatter_dimension=1, tiled=True)
        if exchange_axes:
            rows = lax.all_to_all(rows, exchange_axes, split_axis=0, concat_axis=2, tiled=True)
        return rows

    out_spec = P(batch_entry(mesh), sequence_entry(mesh), None)
    rows = island(local, (table_spec, spec_of(tokens_bs)), out_spec)(table_vd, tokens_bs)
    return sum_over(rows, stages)
