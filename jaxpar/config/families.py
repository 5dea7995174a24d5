"""Model families as data: what distinguishes one decoder architecture from another.

A family fixes the options that change which parameters exist or what a block computes. Dimensions are not part of a
family; they come from ``model.*`` or a preset.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Architecture options of one model family."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (scale only) or LayerNorm (scale and bias)."""
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
    trainable: bool = True
    """False while only sizes are known (``plan``) and the model code does not exist yet."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "mixtral": Family(),
    "qwen3_moe": Family(qk_norm=True),
    "gemma": Family(activation="gelu_tanh", trainable=False),
    "gpt2": Family(
        norm="layer",
        gated_mlp=False,
        activation="gelu_tanh",
        qkv_bias=True,
        linear_bias=True,
        learned_positions=True,
        trainable=False,
    ),
}
