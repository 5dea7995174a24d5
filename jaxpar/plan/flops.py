"""Training FLOPs per token and model FLOPs utilisation (MFU), by the two public conventions.

Both count a multiply-add as two FLOPs, forward plus backward as three forwards, and leave recomputation out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from jaxpar.config.dims import with_derived_dims
from jaxpar.config.schema import ModelConfig
from jaxpar.plan.parameters import count_parameters

Convention = Literal["A", "B"]

CONVENTIONS: Mapping[Convention, str] = MappingProxyType(
    {
        "A": "causal attention counted once, no embedding lookup (as in NVIDIA's tables)",
        "B": "6 per parameter plus attention without the causal discount (PaLM, appendix B; as in torchtitan's tables)",
    }
)
"""What each convention counts; print the name beside every number."""


def training_flops_per_token(model: ModelConfig, seq_len: int, convention: Convention = "A") -> int:
    """FLOPs that one token costs in one training step.

    A: 6 (P - V D) + 6 L S H h. P parameters that a token uses (all of a dense model), V D the embedding lookup, which
    is not a product; a tied matrix stays, because it is the head's product, and learned positions go like the
    embedding. H h is the width of all heads.
    B: 6 P + 12 L S D.

    Args:
        model: The model; dimensions complete.
        seq_len: S, tokens per row. Packed rows are counted as one document, which is their upper bound.
        convention: See :data:`CONVENTIONS`.

    Raises:
        ConfigError: A dimension of the model is missing.
        ValueError: No such convention.
    """
    count = count_parameters(model)
    model = with_derived_dims(model)
    active = count.active(model)
    if convention == "A":
        looked_up = count.positions + (0 if model.tie_embeddings else count.embedding)
        heads_width = model.num_heads * model.head_dim
        return 6 * (active - looked_up) + 6 * model.num_layers * seq_len * heads_width
    if convention == "B":
        return 6 * active + 12 * model.num_layers * seq_len * model.embed_dim
    raise ValueError(f"no FLOPs convention {convention!r}; there are " + ", ".join(CONVENTIONS))


def model_flops_utilisation(tokens_per_s_per_device: float, flops_per_token: float, peak_flops: float) -> float:
    """MFU: useful FLOP/s as a share of the device's peak FLOP/s, from 0 to 1."""
    return tokens_per_s_per_device * flops_per_token / peak_flops
