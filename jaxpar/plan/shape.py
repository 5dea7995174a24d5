"""What the arithmetic needs to know of a model: sizes, whatever the trainer can or cannot build of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

from jaxpar.config.dims import with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.keys import nearest_name
from jaxpar.config.schema import ModelConfig
from jaxpar.families import FAMILIES
from jaxpar.plan.flops import Convention
from jaxpar.plan.parameters import count_parameters, padded_vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, keys and values."""

    query_dim: int
    """Width of the compressed queries."""
    latent_dim: int
    """Width of the compressed keys and values; with ``rope_dim`` it is what the KV cache holds."""
    rope_dim: int
    """Rotated part of each query and key head; one key part for all heads."""
    nope_dim: int
    """Part of each query and key head that is not rotated."""
    value_dim: int
    """Width of each value head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only Transformer, dense or a mixture of experts."""

    name: str
    vocab_size: int
    padded_vocab_size: int
    """Rows of the embedding in memory."""
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    """Width of a dense MLP."""
    gated_mlp: bool = True
    tie_embeddings: bool = False
    num_experts: int = 0
    """Routed experts of a block; 0 for a dense model."""
    top_k: int = 0
    expert_mlp_dim: int = 0
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    latent: LatentAttention | None = None
    """Instead of query, key and value projections of whole heads."""
    window: int = 0
    """Every other layer attends to this many tokens only; 0: all layers attend to all."""
    vector_params: int = 0
    """Norm scales, biases and learned positions of the whole model: small, and whole on every device."""
    position_params: int = 0
    """Learned positions, which are part of ``vector_params``."""

    @property
    def heads_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads; values are as wide."""
        return self.num_kv_heads * self.head_dim

    @functools.cached_property
    def attention_params(self) -> int:
        """Matrices of one attention block, in elements."""
        if self.latent is None:
            return self.embed_dim * (2 * self.heads_width + 2 * self.kv_width)
        latent, heads = self.latent, self.num_heads
        queries = self.embed_dim * latent.query_dim + latent.query_dim * heads * (latent.nope_dim + latent.rope_dim)
        keys = self.embed_dim * (latent.latent_dim + latent.rope_dim)
        values = latent.latent_dim * heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + values + heads * latent.value_dim * self.embed_dim

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: gate, up and down, or up and down."""
        return 3 if self.gated_mlp else 2

    @functools.cached_property
    def moe_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers - self.first_dense_layers if self.num_experts else 0

    @property
    def dense_layers(self) -> int:
        """Blocks with a dense MLP."""
        return self.num_layers - self.moe_layers

    @functools.cached_property
    def expert_params(self) -> int:
        """Matrices of one expert, in elements."""
        return self.mlp_matrices * self.embed_dim * self.expert_mlp_dim

    @functools.cached_property
    def routed_params(self) -> int:
        """All routed experts of all blocks."""
        return self.moe_layers * self.num_experts * self.expert_params

    @functools.cached_property
    def block_params(self) -> int:
        """All blocks without their routed experts: attention, dense MLPs, shared experts and routers."""
        dense = self.dense_layers * self.mlp_matrices * self.embed_dim * self.mlp_dim
        beside = self.num_shared_experts * self.expert_params + self.embed_dim * self.num_experts
        return self.num_layers * self.attention_params + dense + self.moe_layers * beside

    @functools.cached_property
    def embedding_params(self) -> int:
        """Token embedding and head; once if tied. The vocabulary is unpadded."""
        return self.vocab_size * self.embed_dim * (1 if self.tie_embeddings else 2)

    @functools.cached_property
    def total_params(self) -> int:
        """All parameters."""
        return self.block_params + self.routed_params + self.embedding_params + self.vector_params

    @functools.cached_property
    def active_params(self) -> int:
        """Parameters that one token uses; the embedding and the head count."""
        return self.total_params - self.moe_layers * (self.num_experts - self.top_k) * self.expert_params

    @property
    def score_width(self) -> int:
        """Multiply-adds of one (query, key) pair over all heads: query x key, and weight x value."""
        if self.latent is None:
            return 2 * self.heads_width
        return self.num_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)

    def attention_flops(self, seq_len: int, *, causal: bool = True) -> float:
        """Forward FLOPs of scores and weighted values per token, all layers; causal: each pair counted once.

        2 FLOPs per multiply-add x S keys (S/2 on average if causal) x ``score_width``. Layers with a window see at
        most ``window`` keys.
        """
        full = 2 * self.score_width * seq_len * (0.5 if causal else 1.0)
        if not self.window:
            return self.num_layers * full
        windowed = 2 * self.score_width * min(self.window, seq_len)
        return self.num_layers / 2 * (full + windowed)

    def training_flops_per_token(self, seq_len: int, convention: Convention = "A") -> float:
        """See :func:`jaxpar.plan.flops.training_flops_per_token`; also for models that no config can say."""
        if convention == "A":
            looked_up = self.position_params + (0 if self.tie_embeddings else self.vocab_size * self.embed_dim)
            return 6 * (self.active_params - looked_up) + 3 * self.attention_flops(seq_len)
        return 6 * self.active_params + 12 * self.num_layers * seq_len * self.embed_dim

    def kv_cache_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Keys and values that decoding keeps per token of context, all layers."""
        width = self.latent.latent_dim + self.latent.rope_dim if self.latent else 2 * self.kv_width
        return self.num_layers * width * bytes_per_value


def shape_of(model: ModelConfig) -> ModelShape:
    """The sizes of a config's model, with exact parameter counts.

    Raises:
        ConfigError: A dimension is missing.
    """
    count = count_parameters(model)
    model = with_derived_dims(model)
    family = FAMILIES[model.family]
    shape = ModelShape(
        name=model.preset or f"{model.family} {count.total / 1e9:.3g}B",
        vocab_size=model.vocab_size,
        padded_vocab_size=padded_vocab_size(model),
        embed_dim=model.embed_dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        mlp_dim=model.mlp_dim,
        gated_mlp=family.gated_mlp,
        tie_embeddings=model.tie_embeddings,
        num_experts=model.num_experts,
        top_k=model.top_k,
        expert_mlp_dim=model.expert_mlp_dim,
        num_shared_experts=model.num_shared_experts,
        first_dense_layers=model.first_dense_layers,
        position_params=count.positions,
    )
    # Whatever is not a matrix: the exact count is the one of every array.
    return dataclasses.replace(shape, vector_params=count.total - shape.total_params)


_DEEPSEEK_LATENT = LatentAttention(query_dim=1536, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)


def _deepseek(name: str, vocab: int, heads: int, experts: int, dense_layers: int) -> ModelShape:
    # Per layer two norms over embed_dim and one each over the compressed queries and keys; one final norm.
    return ModelShape(
        name=name,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // 128) * 128,
        embed_dim=7168,
        num_layers=61,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=18432,
        num_experts=experts,
        top_k=8,
        expert_mlp_dim=2048,
        num_shared_experts=1,
        first_dense_layers=dense_layers,
        latent=_DEEPSEEK_LATENT,
        vector_params=61 * (2 * 7168 + 1536 + 512) + 7168,
    )


PUBLIC_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "deepseek-v3": _deepseek("deepseek-v3", 129280, 128, 256, 3),
        "kimi-k2": _deepseek("kimi-k2", 163840, 64, 384, 1),
    }
)
"""Public models that no config can say yet (latent attention), for planning. Source: their config files; router biases
and DeepSeek-V3's extra prediction layer are not counted."""


def find_shape(name: str) -> ModelShape:
    """The public model of a name that is not a preset.

    Raises:
        ConfigError: No such model, with the nearest one.
    """
    if name in PUBLIC_SHAPES:
        return PUBLIC_SHAPES[name]
    nearest = nearest_name(name, PUBLIC_SHAPES)
    remedy = (f"did you mean {nearest}? " if nearest else "") + "known: " + ", ".join(PUBLIC_SHAPES)
    remedy += "; and every preset (jaxpar config --presets)"
    raise ConfigError([Problem(key="--model", value=name, message="no such model", remedy=remedy)])
