"""Causal self-attention of packed documents: the one function through which every kernel is reached.

Shapes: B batch, S sequence, H heads, K kv heads, h head_dim. Heads are sharded over ``tensor``, rows over the batch
axes, the sequence over ``context`` in zig-zag order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import current_mesh, island, spec_of, varying
from jaxpar.model.gathered import gathered_attention
from jaxpar.model.kernels import fused_attention
from jaxpar.model.layers import normalise, rotate
from jaxpar.model.ring import DEFAULT_WAY, ContextWay, context_attention
from jaxpar.plan.context import resolved_context_mode
from jaxpar.sharding import CONTEXT_AXIS, batch_entry, context_entry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """What attention needs to know about the rows, computed once per microbatch."""

    cos: jax.Array | None
    """float32 [B, S, h/2]: cosine of every position's rotation; None: no RoPE."""
    sin: jax.Array | None
    """float32 [B, S, h/2]; None: no RoPE."""
    segment_ids: jax.Array
    """int32 [B, S]: which document of the row a token belongs to; 0 is padding. Whole on every member of a context
    group, in zig-zag order: queries meet the keys of all members."""
    segment_starts: jax.Array | None = None
    """int32 [B, S]: index in the row of the first token of its document, natural order; split like the sequence. None:
    computed by nobody, since the kernel is XLA's."""


def attention(
    q_bshk: jax.Array,
    k_bskk: jax.Array,
    v_bskk: jax.Array,
    extras: Mapping[str, jax.Array],
    info: SequenceInfo,
    norm_eps: float,
    context: ContextWay = DEFAULT_WAY,
    kernel: str = "xla",
) -> jax.Array:
    """Biases, qk-norm, RoPE and attention, all local to a device's heads and rows.

    Args:
        q_bshk: [B, S, H, h].
        k_bskk: [B, S, K, h]; K divides H, query head i uses kv head i // (H / K).
        v_bskk: [B, S, K, h].
        extras: of q_bias [H, h], k_bias, v_bias [K, h], q_norm, k_norm [h] those that the family has.
        info: positions and documents; a token attends to earlier tokens of its own document only.
        norm_eps: epsilon of the qk-norm.
        context: how the keys of other context members are met; used when that axis is above 1.
        kernel: see ``jaxpar.plan.attention``; with a context axis "xla", or one of tokamax's on gathered keys.

    Returns:
        [B, S, H, h].
    """
    mesh = current_mesh()
    batch, sequence = batch_entry(mesh), context_entry(mesh)
    members = mesh.shape[CONTEXT_AXIS]
    context = context._replace(mode=resolved_context_mode(context.mode, q_bshk.shape[1] // members))
    assert kernel == "xla" or members == 1 or context.mode == "allgather", "the choice of a kernel knows the ring"
    extra_specs = {name: spec_of(value) for name, value in extras.items()}
    rope_spec = None if info.cos is None else P(batch, sequence, None)
    starts_spec = None if info.segment_starts is None else P(batch, sequence)
    info_specs = SequenceInfo(cos=rope_spec, sin=rope_spec, segment_ids=P(batch, None), segment_starts=starts_spec)

    def prepare(q: jax.Array, k: jax.Array, v: jax.Array, extras: dict[str, jax.Array], info: SequenceInfo) -> tuple:
        extras = {name: varying(value, extra_specs[name].reduced) for name, value in extras.items()}
        q, k, v = (
            x + extras[bias].astype(x.dtype) if bias in extras else x
            for x, bias in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
        )
        if "q_norm" in extras:
            q, k = normalise(q, extras["q_norm"], norm_eps), normalise(k, extras["k_norm"], norm_eps)
        if info.cos is not None:
            q, k = rotate(q, info.cos, info.sin), rotate(k, info.cos, info.sin)
        return q, k, v

    def local(*arguments) -> jax.Array:
        segment_ids = arguments[-1].segment_ids
        if members > 1:
            return context_attention(context, *prepare(*arguments), segment_ids)
        return attend(*prepare(*arguments), segment_ids)

    qkv_specs = (spec_of(q_bshk), spec_of(k_bskk), spec_of(v_bskk))
    arguments = (q_bshk, k_bskk, v_bskk, dict(extras), info)
    specs = (*qkv_specs, extra_specs, info_specs)
    if kernel == "xla":
        mixed_bshk = island(local, specs, qkv_specs[0])(*arguments)
    else:
        # In an island of its own: kernels do not say over which axes their results vary.
        q_bshk, k_bskk, v_bskk = island(prepare, specs, qkv_specs)(*arguments)
        fused = partial(fused_attention, kernel)
        if members > 1:
            fused = partial(gathered_attention, kernel, context.reduce)
        mixed_bshk = island(fused, (*qkv_specs, starts_spec), qkv_specs[0], check_vma=False)(
            q_bshk, k_bskk, v_bskk, info.segment_starts
        )
    # Inside a pipeline stage no policy sees what is named in an island.
    return checkpoint_name(mixed_bshk, "attention") if AxisType.Manual in mesh.axis_types else mixed_bshk


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Softmax attention of local arrays, causal, and only inside a document; softmax in float32."""
    same_document = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = same_document[:, None]
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")
    return checkpoint_name(mixed, "attention")
