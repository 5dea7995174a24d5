"""What one decoder architecture can differ in from another, as data."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Literal

from jaxpar.families.keymap import HARMLESS_TENSORS, KeyMap

LLAMA_KEYS: Mapping[str, str] = types.MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "mlp_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
    }
)
"""Key of config.json by ``model.*`` setting, as Llama and most families after it have them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """Keys of config.json that describe a mixture of experts."""

    num_experts: tuple[str, ...] = ("num_local_experts",)
    """Names of the number of experts, one of which is read; all are written."""
    width: str = "intermediate_size"
    """Width of one expert."""
    norm_topk: str | None = None
    """Whether the weights of the chosen experts are scaled to the sum 1; without a key they are, an absent one: not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """How transformers stores a family: tensor names, and the keys of config.json."""

    architecture: str
    """Class of transformers."""
    keymap: Callable[[bool], KeyMap]
    """Key map of a model, given whether its head is the embedding."""
    prefix: str = "model."
    """What tensor names of the whole model begin with; files of the bare decoder lack it."""
    ignored: tuple[str, ...] = HARMLESS_TENSORS
    """Patterns of tensors that a checkpoint may hold and that are not read."""
    keys: Mapping[str, str] = LLAMA_KEYS
    """Key of config.json by ``model.*`` setting; a dim without one follows from the others."""
    tied: bool = False
    """What an absent ``tie_word_embeddings`` means."""
    norm_eps: float = 1e-6
    """What an absent epsilon means."""
    head_dim: int | None = None
    """What an absent ``head_dim`` means; None: embed_dim / num_heads."""
    writes_head_dim: Literal["always", "unless derived"] = "always"
    """Whether the file states a head_dim that is embed_dim / num_heads."""
    kv_heads_may_be_absent: bool = False
    """Whether an absent number of kv heads means that of heads; where transformers has a number for it, nobody does."""
    mlp_ratio: int | None = None
    """Null for the width of the MLP means this times embed_dim; None: it must be stated."""
    activation_keys: tuple[str, ...] = ("hidden_act",)
    """Keys that name the activation; the last one that is there counts, and all are written."""
    activations: tuple[str, ...] = ("silu", "swish")
    """Names of the family's activation, the one that is written first."""
    refused: tuple[str, ...] = ("attention_bias", "mlp_bias", "use_sliding_window", "attention_dropout")
    """Options that must be off or absent."""
    required: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Options that must have this value or be absent."""
    written: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Options with the value that our blocks have, whatever an original config.json says."""
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Keys without meaning for our blocks; an original config.json may have others."""
    experts: ExpertKeys | None = None
    """Keys of a mixture of experts; None: the family's blocks are dense."""
    layer_types: bool = False
    """Whether config.json names the kind of attention layer by layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: options that change which parameters exist or what a block computes, and its stored form."""

    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """RMSNorm times its scale, RMSNorm times 1 + scale, or LayerNorm (scale and bias)."""
    gated_mlp: bool = True
    """Two input projections, one of them through the activation (SwiGLU, GeGLU), or one."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    linear_bias: bool = False
    """Biases on the attention output and MLP projections."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys before RoPE."""
    learned_positions: bool = False
    """A learned position embedding instead of RoPE."""
    scaled_embedding: bool = False
    """Embeddings enter the blocks times the root of embed_dim, which is rounded to the compute dtype."""
    huggingface: HuggingFace
