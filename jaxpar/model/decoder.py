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
from jax.sharding import reshard

from jaxpar.collectives import current_mesh, enter_block, gather_weight, island, opened, row_parallel, spec_of
from jaxpar.config.schema import ModelConfig, PrecisionConfig
from jaxpar.families import FAMILIES
from jaxpar.model.attention import SequenceInfo, attention
from jaxpar.model.dispatch import DEFAULT_EXCHANGE, Exchange
from jaxpar.model.dropout import ATTENTION, EMBEDDING, MLP, dropped, layer_keys
from jaxpar.model.kernels import segment_starts
from jaxpar.model.layers import ACTIVATIONS, add_bias, embed, norm, rope_angles, rope_frequencies
from jaxpar.model.moe import MixtureOfExperts, Routing
from jaxpar.model.remat import KEEP_ALL, Remat
from jaxpar.model.ring import ContextWay
from jaxpar.model.zigzag import natural_order, split_sequence, zigzag
from jaxpar.plan.parameters import dim_sizes, padded_vocab_size
from jaxpar.sharding import batch_entry

FLOAT32 = jnp.dtype("float32")

NORM_START = {"rms": 1, "rms_plus_one": 0, "layer": 1}
"""Initial norm scales, by ``Family.norm``."""

EXTRAS = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
"""Parameters of a block that only some families have; attention takes them by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """How a decoder is computed: all that its model does not say. Fixed while tracing."""

    compute: jnp.dtype
    """Products, activations and weight gathers."""
    reduce: jnp.dtype
    """Gradient reduce-scatters."""
    params: jnp.dtype = FLOAT32
    """Parameters at rest."""
    remat: Remat = KEEP_ALL
    """What the backward pass of a block computes again."""
    context_mode: str = "auto"
    """See ``mesh.context_mode``."""
    exchange: Exchange = DEFAULT_EXCHANGE
    """How tokens reach their experts, if there are any."""
    attention: str = "xla"
    """Attention kernel, see ``jaxpar.plan.attention``."""
    dropout: float = 0.0
    """See ``train.dropout``; nothing is dropped where no keys are given."""

    @classmethod
    def of(cls, precision: PrecisionConfig, **ways: object) -> Numerics:
        """With the number formats that a config asks for; ``ways`` are the other fields."""
        formats = {name: jnp.dtype(getattr(precision, name)) for name in ("params", "compute", "reduce")}
        return cls(**formats, **ways)


def _param(value: jax.Array, *logical_axes: str) -> nnx.Param:
    return nnx.Param(value, logical_axes=logical_axes)


class Stacked:
    """Makes the parameters of a stack of blocks on a leading dim; shapes follow from their logical axes."""

    def __init__(self, model: ModelConfig, num_layers: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        others = {"norm": model.embed_dim, "expert_embed": model.embed_dim, "router": model.num_experts}
        self._sizes = {**dim_sizes(model), **others}
        self._num_layers = num_layers
        self._std, self._back_std = model.init_std, model.init_std / math.sqrt(2 * model.num_layers)
        self._dtype, self._rngs = dtype, rngs

    def into(self, *logical_axes: str) -> nnx.Param:
        """A projection out of the residual stream."""
        return self._make(nnx.initializers.normal(self._std), logical_axes)

    def back(self, *logical_axes: str) -> nnx.Param:
        """A projection into the residual stream.

        Two products per block add into it; this keeps its variance independent of depth (GPT-2, section 2.3).
        """
        return self._make(nnx.initializers.normal(self._back_std), logical_axes)

    def full(self, value: float, *logical_axes: str) -> nnx.Param:
        """Norm scales and biases."""
        return self._make(nnx.initializers.constant(value), logical_axes)

    def _make(self, init: nnx.Initializer, logical_axes: tuple[str, ...]) -> nnx.Param:
        shape = (self._num_layers, *(self._sizes[axis] for axis in logical_axes))
        return _param(init(self._rngs.params(), shape, self._dtype), "layers", *logical_axes)


class Block(nnx.Module):
    """A stack of L blocks: attention and MLP or experts, each behind a norm, added to the residual stream.

    The family's options (``jaxpar.families``) choose the parameters and the functions.

    Args:
        model: the whole model.
        numerics: how it is computed.
        new: makes the parameters of this stack.
        is_dense: whether the blocks have a dense MLP instead of experts.
    """

    def __init__(self, model: ModelConfig, numerics: Numerics, new: Stacked, *, is_dense: bool):
        self.model = model
        self.numerics = numerics
        self._new_norm("attention_norm", new)
        self._new_attention(new)
        self._new_norm("mlp_norm", new)
        if is_dense:
            self._new_mlp(new, "mlp")
            return
        self.moe = MixtureOfExperts(model, numerics.exchange, new.into, new.back, new.full)
        if model.num_shared_experts:  # together they are a dense MLP
            self._new_mlp(new, "shared_mlp")

    def _new_norm(self, name: str, new: Stacked) -> None:
        kind = FAMILIES[self.model.family].norm
        setattr(self, name, new.full(NORM_START[kind], "norm"))
        if kind == "layer":
            setattr(self, f"{name}_bias", new.full(0, "norm"))

    def _new_attention(self, new: Stacked) -> None:
        family = FAMILIES[self.model.family]
        self.q = new.into("embed", "heads", "head_dim")
        self.k = new.into("embed", "kv_heads", "head_dim")
        self.v = new.into("embed", "kv_heads", "head_dim")
        self.o = new.back("heads", "head_dim", "embed")
        if family.qkv_bias:
            self.q_bias = new.full(0, "heads", "head_dim")
            self.k_bias = new.full(0, "kv_heads", "head_dim")
            self.v_bias = new.full(0, "kv_heads", "head_dim")
        if family.qk_norm:
            self.q_norm = new.full(1, "head_dim")
            self.k_norm = new.full(1, "head_dim")
        if family.linear_bias:
            self.o_bias = new.full(0, "norm")

    def _new_mlp(self, new: Stacked, width: str) -> None:
        family = FAMILIES[self.model.family]
        if family.gated_mlp:
            self.gate = new.into("embed", width)
        self.up = new.into("embed", width)
        self.down = new.back(width, "embed")
        if family.linear_bias:
            self.up_bias = new.full(0, width)
            self.down_bias = new.full(0, "norm")

    def __call__(
        self, x_bsd: jax.Array, info: SequenceInfo, keys_bs: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """One block: [B, S, D] -> [B, S, D], and what its router says. The parameters have lost their L dim.

        ``keys_bs`` are this layer's keys of dropout; None: nothing is dropped.
        """
        rate = self.numerics.dropout
        attended_bsd = self._attention(normalised(self, "attention_norm", x_bsd), info)
        x_bsd = x_bsd + dropped(attended_bsd, keys_bs, ATTENTION, rate)
        y_bsd = normalised(self, "mlp_norm", x_bsd)
        if not hasattr(self, "moe"):
            return x_bsd + dropped(self._mlp(y_bsd), keys_bs, MLP, rate), {}
        numerics = self.numerics
        formats = (numerics.compute, numerics.reduce, numerics.remat.mode)
        entered_bsd = enter_block(y_bsd)
        segment_ids_bs = reshard(info.segment_ids, P(*spec_of(entered_bsd).partitions[:2]))
        routed_bsd, routing = self.moe(entered_bsd, spec_of(x_bsd), segment_ids_bs, *formats)
        if self.model.num_shared_experts:
            routed_bsd = routed_bsd + self._mlp(y_bsd)
        return x_bsd + dropped(routed_bsd, keys_bs, MLP, rate), routing

    def _attention(self, y_bsd: jax.Array, info: SequenceInfo) -> jax.Array:
        """What attention adds to the residual stream; in and out laid out as between blocks."""
        y_bsd = enter_block(y_bsd)
        q_bshk = checkpoint_name(self._product("bsd,dhk->bshk", y_bsd, self.q), "query")
        k_bshk = checkpoint_name(self._product("bsd,dhk->bshk", y_bsd, self.k), "key")
        v_bshk = checkpoint_name(self._product("bsd,dhk->bshk", y_bsd, self.v), "value")
        extras = {name: getattr(self, name)[...] for name in EXTRAS if hasattr(self, name)}
        numerics = self.numerics
        context = ContextWay(numerics.context_mode, numerics.reduce)
        mixed_bshk = attention(q_bshk, k_bshk, v_bshk, extras, info, self.model.norm_eps, context, numerics.attention)
        out_bsd = self._biased("o_bias", self._product("bshk,hkd->bsd", mixed_bshk, self.o, row_parallel))
        return checkpoint_name(out_bsd, "attention_out")

    def _mlp(self, y_bsd: jax.Array) -> jax.Array:
        """What the MLP adds to the residual stream; in and out laid out as between blocks."""
        family = FAMILIES[self.model.family]
        activate = ACTIVATIONS[family.activation]
        y_bsd = enter_block(y_bsd)
        if family.gated_mlp:
            gate_bsf = checkpoint_name(self._product("bsd,df->bsf", y_bsd, self.gate), "gate")
        up_bsf = checkpoint_name(self._biased("up_bias", self._product("bsd,df->bsf", y_bsd, self.up)), "up")
        hidden_bsf = activate(gate_bsf) * up_bsf if family.gated_mlp else activate(up_bsf)
        return self._biased("down_bias", self._product("bsf,fd->bsd", hidden_bsf, self.down, row_parallel))

    def _biased(self, name: str, x: jax.Array) -> jax.Array:
        """``x`` plus a bias, where the family has it."""
        return add_bias(x, getattr(self, name)[...]) if hasattr(self, name) else x

    def _product(self, equation: str, x: jax.Array, param: nnx.Param, einsum=jnp.einsum) -> jax.Array:
        """Gather a weight and multiply by it."""
        numerics = self.numerics

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return einsum(equation, x, gather_weight(weight, numerics.compute, numerics.reduce))

        # Without this, autodiff would keep every gathered weight until the backward pass: the whole model per device.
        # With any other remat, the block's own checkpoint already forgets them.
        return (jax.checkpoint(product) if numerics.remat.mode == "none" else product)(x, param[...])


def normalised(module: Block | Decoder, name: str, x_bsd: jax.Array) -> jax.Array:
    """Activations through a norm of the family, of which ``module`` has the vectors."""
    names = [name for name in (name, f"{name}_bias") if hasattr(module, name)]
    vectors = [getattr(module, name)[...] for name in names]
    return norm(FAMILIES[module.model.family].norm, x_bsd, vectors, module.model.norm_eps)


class Decoder(nnx.Module):
    """Embedding of tokens (and positions), L blocks, final norm and output head (absent when tied)."""

    def __init__(self, model: ModelConfig, numerics: Numerics, rngs: nnx.Rngs):
        self.model = model
        self.numerics = numerics
        dtype = numerics.params
        V, D = model.vocab_size, model.embed_dim
        padding = padded_vocab_size(model) - V
        init = nnx.initializers.normal(model.init_std)
        # Random values for the true vocabulary only: they do not depend on the padding.
        table = jnp.pad(init(rngs.params(), (V, D), dtype), ((0, padding), (0, 0)))
        self.embedding = _param(table, "vocab", "embed")
        family = FAMILIES[model.family]
        if family.learned_positions:
            self.positions = _param(init(rngs.params(), (model.max_positions, D), dtype), "positions", "embed")
        num_dense = model.first_dense_layers if model.num_experts else 0
        if num_dense:
            self.dense_layers = Block(model, numerics, Stacked(model, num_dense, dtype, rngs), is_dense=True)
        new = Stacked(model, model.num_layers - num_dense, dtype, rngs)
        self.layers = Block(model, numerics, new, is_dense=not model.num_experts)
        self.final_norm = _param(jnp.full((D,), NORM_START[family.norm], dtype), "norm")
        if family.norm == "layer":
            self.final_norm_bias = _param(jnp.zeros((D,), dtype), "norm")
        if not model.tie_embeddings:
            head = jnp.pad(init(rngs.params(), (D, V), dtype), ((0, 0), (0, padding)))
            self.head = _param(head, "embed", "vocab")

    def hidden(self, tokens_bs: jax.Array, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> jax.Array:
        """``hidden_and_routing`` without the routing."""
        return self.hidden_and_routing(tokens_bs, positions_bs, segment_ids_bs)[0]

    def hidden_and_routing(
        self,
        tokens_bs: jax.Array,
        positions_bs: jax.Array,
        segment_ids_bs: jax.Array,
        keys_bs: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Final hidden states [B, S, D], normalised, laid out as between blocks (with a context axis in zig-zag order),
        and the routing of all blocks.

        Args:
            tokens_bs: int32 [B, S], natural order, S whole; so are the others.
            positions_bs: int32 [B, S], position of each token in its document; below ``max_positions`` if learned.
            segment_ids_bs: int32 [B, S], see ``SequenceInfo``.
            keys_bs: uint32 [B, S], keys of dropout, see ``jaxpar.model.dropout``; None: nothing is dropped.

        Returns:
            The states, and ``Routing`` with a leading L (blocks with experts); empty for a dense model.
        """
        info = self.sequence_info(positions_bs, segment_ids_bs)
        x_bsd = self.embedded(tokens_bs, positions_bs, keys_bs)
        num_dense = 0
        if hasattr(self, "dense_layers"):
            num_dense = self.model.first_dense_layers
            x_bsd, _ = self.run_layers(self.dense_layers, x_bsd, info, keys_bs, jnp.arange(num_dense))
        numbers_l = jnp.arange(num_dense, self.model.num_layers)
        x_bsd, routing = self.run_layers(self.layers, x_bsd, info, keys_bs, numbers_l)
        return self.finish(x_bsd), routing

    def run_layers(
        self,
        blocks: Block,
        x_bsd: jax.Array,
        info: SequenceInfo,
        keys_bs: jax.Array | None,
        numbers_l: jax.Array,
        present_l: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Stacked blocks in turn: [B, S, D] -> [B, S, D], and their routing. Reads no parameters but theirs.

        Args:
            blocks: ``layers``, or ``dense_layers``.
            x_bsd: as between blocks.
            info: of the rows.
            keys_bs: as in ``hidden_and_routing``.
            numbers_l: int32 [L], number of each block in the model.
            present_l: bool [L]; where it is False there is no block, and whatever lies there adds nothing to either.
        """
        graph, weights = nnx.split(blocks)
        keys_bs = None if keys_bs is None else split_sequence(keys_bs)

        # Closed over, not carried: what a scan carries is kept for the backward pass once per layer.
        def layer(x: jax.Array, inputs: tuple[nnx.State, jax.Array | None, jax.Array]) -> tuple[jax.Array, Routing]:
            weights, present, number = inputs
            keys = None if keys_bs is None else layer_keys(keys_bs, number)
            y, routing = nnx.merge(graph, weights)(x, info, keys)
            if present is not None:
                y = jnp.where(present, y, x)
                routing = {name: jnp.where(present, value, 0) for name, value in routing.items()}
            return y, routing

        return jax.lax.scan(self.numerics.remat.wrap(layer), x_bsd, (weights, present_l, numbers_l))

    def finish(self, x_bsd: jax.Array) -> jax.Array:
        """The final norm of what leaves the last block."""
        return normalised(self, "final_norm", x_bsd)

    def embedded(self, tokens_bs: jax.Array, positions_bs: jax.Array, keys_bs: jax.Array | None) -> jax.Array:
        """What enters the first block: [B, S, D]. Reads only the embeddings. Arguments as in ``hidden_and_routing``."""
        family, compute = FAMILIES[self.model.family], self.numerics.compute
        reduce = self.numerics.reduce
        x_bsd = embed(opened(self.embedding[...], reduce), split_sequence(tokens_bs), compute)
        if family.scaled_embedding:
            x_bsd = x_bsd * jnp.asarray(math.sqrt(self.model.embed_dim), compute)
        if family.learned_positions:
            x_bsd = x_bsd + embed(opened(self.positions[...], reduce), split_sequence(positions_bs), compute)
        keys_bs = None if keys_bs is None else split_sequence(keys_bs)
        return dropped(x_bsd, keys_bs, EMBEDDING, self.numerics.dropout)

    def sequence_info(self, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> SequenceInfo:
        """What attention needs to know about the rows."""
        model, segment_ids, starts = self.model, zigzag(segment_ids_bs), None
        if self.numerics.attention != "xla":
            rows = P(batch_entry(current_mesh()), None)
            starts = split_sequence(island(segment_starts, rows, rows)(segment_ids_bs))
        if FAMILIES[model.family].learned_positions:
            return SequenceInfo(cos=None, sin=None, segment_ids=segment_ids, segment_starts=starts)
        frequencies = rope_frequencies(model.head_dim, model.rope_theta, model.rope_scaling)
        cos, sin = rope_angles(split_sequence(positions_bs), frequencies)
        return SequenceInfo(cos=cos, sin=sin, segment_ids=segment_ids, segment_starts=starts)

    @property
    def head_weight(self) -> tuple[jax.Array, bool]:
        """The head, and whether it is the tied embedding [V, D] rather than [D, V]."""
        tied = self.model.tie_embeddings
        return opened((self.embedding if tied else self.head)[...], self.numerics.reduce), tied

    def logits(self, tokens_bs: jax.Array, positions_bs: jax.Array, segment_ids_bs: jax.Array) -> jax.Array:
        """float32 logits [B, S, vocab_size]: whole on every device but for the rows. For inspection, not training."""
        x_bsd = enter_block(self.hidden(tokens_bs, positions_bs, segment_ids_bs))
        head, tied = self.head_weight
        head = gather_weight(head, self.numerics.compute, self.numerics.reduce)
        equation = "bsd,vd->bsv" if tied else "bsd,dv->bsv"
        logits = jnp.einsum(equation, x_bsd, head, preferred_element_type=jnp.float32)
        whole = jax.sharding.reshard(logits, P(batch_entry(current_mesh()), None, None))
        return natural_order(whole)[..., : self.model.vocab_size]
