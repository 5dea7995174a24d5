"""A decoder-only Transformer as Flax NNX modules, layers stacked on a leading dim and run by one scan.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V padded vocabulary, L layers.
Parameters are written as ``q_ldhk`` = [L, D, H, h]; inside the scan the L is gone. Which mesh axes shard a dim follows
from its logical axis (``jaxpar.sharding.RULES``).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import current_mesh, enter_block, gather_weight, row_parallel
from jaxpar.config import FAMILIES
from jaxpar.config.schema import ModelConfig, PrecisionConfig
from jaxpar.model.attention import SequenceInfo, attention
from jaxpar.model.layers import embed, rms_norm, rope_angles, rope_frequencies
from jaxpar.plan.parameters import padded_vocab_size
from jaxpar.sharding import batch_entry

EXTRAS = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
"""Parameters of a block that only some families have; attention takes them by name."""

PRODUCT = "product"
"""Name, for recomputation, of what matrix products and attention return."""

KEPT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}
"""What a block keeps for its backward pass besides its input, by kind of recomputation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Number formats and recomputation, fixed while tracing."""

    compute: jnp.dtype
    """Products, activations and weight gathers."""
    reduce: jnp.dtype
    """Gradient reduce-scatters."""
    remat: str
    """``none`` or ``full``, see ``train.remat``; ``products`` keeps matrix products and attention, and does the rest
    again."""

    @classmethod
    def of(cls, precision: PrecisionConfig, remat: str) -> Numerics:
        """Numerics that a config asks for."""
        return cls(compute=jnp.dtype(precision.compute), reduce=jnp.dtype(precision.reduce), remat=remat)


def _param(value: jax.Array, *logical_axes: str) -> nnx.Param:
    return nnx.Param(value, logical_axes=logical_axes)


class Block(nnx.Module):
    """All L blocks: attention and gated MLP, each behind an RMSNorm, added to the residual stream."""

    def __init__(self, model: ModelConfig, numerics: Numerics, dtype: jnp.dtype, rngs: nnx.Rngs):
        L, D, F = model.num_layers, model.embed_dim, model.mlp_dim
        H, K, h = model.num_heads, model.num_kv_heads, model.head_dim
        family = FAMILIES[model.family]
        self.norm_eps = model.norm_eps
        self.numerics = numerics
        into = nnx.initializers.normal(model.init_std)
        # Two products per block add into the residual stream; this keeps its variance independent of depth (GPT-2).
        back = nnx.initializers.normal(model.init_std / math.sqrt(2 * L))

        def weight(init: nnx.Initializer, shape: tuple[int, ...], *logical_axes: str) -> nnx.Param:
            return _param(init(rngs.params(), (L, *shape), dtype), "layers", *logical_axes)

        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        self.attention_norm = weight(ones, (D,), "norm")
        self.q = weight(into, (D, H, h), "embed", "heads", "head_dim")
        self.k = weight(into, (D, K, h), "embed", "kv_heads", "head_dim")
        self.v = weight(into, (D, K, h), "embed", "kv_heads", "head_dim")
        self.o = weight(back, (H, h, D), "heads", "head_dim", "embed")
        if family.qkv_bias:
            self.q_bias = weight(zeros, (H, h), "heads", "head_dim")
            self.k_bias = weight(zeros, (K, h), "kv_heads", "head_dim")
            self.v_bias = weight(zeros, (K, h), "kv_heads", "head_dim")
        if family.qk_norm:
            self.q_norm = weight(ones, (h,), "head_dim")
            self.k_norm = weight(ones, (h,), "head_dim")
        self.mlp_norm = weight(ones, (D,), "norm")
        self.gate = weight(into, (D, F), "embed", "mlp")
        self.up = weight(into, (D, F), "embed", "mlp")
        self.down = weight(back, (F, D), "mlp", "embed")

    def __call__(self, x_bsd: jax.Array, info: SequenceInfo) -> jax.Array:
        """One block: [B, S, D] -> [B, S, D]. The parameters have lost their L dim."""
        y_bsd = enter_block(rms_norm(x_bsd, self.attention_norm[...], self.norm_eps))
        q_bshk = self._product("bsd,dhk->bshk", y_bsd, self.q)
        k_bshk = self._product("bsd,dhk->bshk", y_bsd, self.k)
        v_bshk = self._product("bsd,dhk->bshk", y_bsd, self.v)
        extras = {name: getattr(self, name)[...] for name in EXTRAS if hasattr(self, name)}
        mixed_bshk = checkpoint_name(attention(q_bshk, k_bshk, v_bshk, extras, info, self.norm_eps), PRODUCT)
        x_bsd = x_bsd + self._product("bshk,hkd->bsd", mixed_bshk, self.o, row_parallel)

        y_bsd = enter_block(rms_norm(x_bsd, self.mlp_norm[...], self.norm_eps))
        gate_bsf = self._product("bsd,df->bsf", y_bsd, self.gate)
        up_bsf = self._product("bsd,df->bsf", y_bsd, self.up)
        return x_bsd + self._product("bsf,fd->bsd", jax.nn.silu(gate_bsf) * up_bsf, self.down, row_parallel)

    def _product(self, equation: str, x: jax.Array, param: nnx.Param, einsum=jnp.einsum) -> jax.Array:
        """Gather a weight and multiply by it."""
        numerics = self.numerics

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return einsum(equation, x, gather_weight(weight, numerics.compute, numerics.reduce))

        # Without this, autodiff would keep every gathered weight until the backward pass: the whole model per device.
        # With remat = full, the block's own checkpoint already forgets them.
        result = (jax.checkpoint(product) if numerics.remat == "none" else product)(x, param[...])
        return checkpoint_name(result, PRODUCT)


class Decoder(nnx.Module):
    """Token embedding, L blocks, final norm and output head (absent when tied)."""

    def __init__(self, model: ModelConfig, precision: PrecisionConfig, remat: str, rngs: nnx.Rngs):
        self.model = model
        self.numerics = Numerics.of(precision, remat)
        dtype = jnp.dtype(precision.params)
        V, D = model.vocab_size, model.embed_dim
        padding = padded_vocab_size(model) - V
        init = nnx.initializers.normal(model.init_std)
        # Random values for the true vocabulary only: they do not depend on the padding.
        table = jnp.pad(init(rngs.params(), (V, D), dtype), ((0, padding), (0, 0)))
        self.embedding = _param(table, "vocab", "embed")
        self.layers = Block(model, self.numerics, dtype, rngs)
        self.final_norm = _param(jnp.ones((D,), dtype), "norm")
        if not model.tie_embeddings:
            head = jnp.pad(init(rngs.params(), (D, V), dtype), ((0, 0), (0, padding)))
            self.head = _param(head, "embed", "vocab")

    def hidden(self, tokens_bs: jax.Array, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> jax.Array:
        """Final hidden states [B, S, D], normalised, laid out as between blocks.

        Args:
            tokens_bs: int32 [B, S].
            positions_bs: int32 [B, S], position of each token in its document.
            segment_ids_bs: int32 [B, S], see ``SequenceInfo``.
        """
        info = self.sequence_info(positions_bs, segment_ids_bs)
        return self.finish(self.run_layers(self.begin(tokens_bs), info))

    def sequence_info(self, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> SequenceInfo:
        """What every block needs to know about the rows."""
        model = self.model
        frequencies = rope_frequencies(model.head_dim, model.rope_theta, model.rope_scaling)
        cos, sin = rope_angles(positions_bs, frequencies)
        return SequenceInfo(cos=cos, sin=sin, segment_ids=segment_ids_bs)

    def begin(self, tokens_bs: jax.Array) -> jax.Array:
        """What enters the first block, [B, S, D]. Reads only the embedding."""
        return embed(self.embedding[...], tokens_bs, self.numerics.compute)

    def run_layers(self, x_bsd: jax.Array, info: SequenceInfo, present_l: jax.Array | None = None) -> jax.Array:
        """All blocks in turn, [B, S, D] -> [B, S, D]. Reads only ``layers``.

        Args:
            x_bsd: as between blocks.
            info: of the rows.
            present_l: bool [L]; where it is False there is no block, and whatever lies there changes nothing.
        """
        graph, weights = nnx.split(self.layers)

        def layer(x: jax.Array, inputs: tuple[nnx.State, jax.Array | None]) -> tuple[jax.Array, None]:
            weights, present = inputs
            y = nnx.merge(graph, weights)(x, info)
            return (y if present is None else jnp.where(present, y, x)), None

        if self.numerics.remat in KEPT:
            # A scan body cannot be merged with its recomputation, so the barrier against that is not needed.
            layer = jax.checkpoint(layer, policy=KEPT[self.numerics.remat], prevent_cse=False)
        return jax.lax.scan(layer, x_bsd, (weights, present_l))[0]

    def finish(self, x_bsd: jax.Array) -> jax.Array:
        """The final norm of what leaves the last block."""
        return rms_norm(x_bsd, self.final_norm[...], self.model.norm_eps)

    @property
    def head_weight(self) -> tuple[jax.Array, bool]:
        """The head, and whether it is the tied embedding [V, D] rather than [D, V]."""
        return (self.embedding[...], True) if self.model.tie_embeddings else (self.head[...], False)

    def logits(self, tokens_bs: jax.Array, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> jax.Array:
        """float32 logits [B, S, vocab_size]: whole on every device but for the rows. For inspection, not training."""
        x_bsd = enter_block(self.hidden(tokens_bs, positions_bs, segment_ids_bs))
        head, tied = self.head_weight
        head = gather_weight(head, self.numerics.compute, self.numerics.reduce)
        equation = "bsd,vd->bsv" if tied else "bsd,dv->bsv"
        logits = jnp.einsum(equation, x_bsd, head, preferred_element_type=jnp.float32)
        whole = jax.sharding.reshard(logits, P(batch_entry(current_mesh()), None, None))
        return whole[..., : self.model.vocab_size]
