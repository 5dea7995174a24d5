"""What hardware reaches of its peak: constants fitted to published runs, with where they come from.

The structure of the time model is physics; these numbers are not. ``scripts/plan_published.py --fit`` derives them from
a table of published runs and docs/plan-accuracy.md tells how well they do on runs that were not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Numbers that are the same for every GPU, precision and source."""

    attention_share: float = 0.33
    """Fused attention, of the bfloat16 peak, whatever the precision of the other products."""
    head_share: float = 0.576
    """The output head, of the bfloat16 peak."""
    memory_share: float = 0.8
    """Elementwise work and the optimizer, of the memory bandwidth."""
    half_width: float = 128.0
    """Width n of a product's smaller side at which it reaches half its speed: n / (n + half_width)."""
    half_tokens: float = 128.0
    """The same for the number of tokens."""
    grouped_share: float = 0.8
    """Products of experts, of those of dense layers."""
    elementwise_embed: float = 24.0
    """Values read and written per token and unit of embed_dim in a block's forward pass: norms, residuals, rotations,
    casts."""
    elementwise_mlp: float = 5.12
    """The same per unit of MLP width: the activation function and its product."""
    quantised_elementwise: float = 1.25
    """Elementwise work under float8 and float4, of that under bfloat16: casts and scales."""
    eager_elementwise: float = 2.0
    """The same for a framework that fuses nothing."""
    routing_values: float = 8.0
    """Values moved per token, unit of embed_dim and chosen expert: permutation and combination."""
    tensor_exposed: float = 1.6
    """Time of tensor collectives, of their bytes over the link; above 1: kernels start late and short rings fall
    short."""
    tensor_exposed_async: float = 0.134
    """The same where collectives overlap with the products next to them."""
    expert_exposed: float = 0.54
    """The same for all-to-all exchanges of tokens."""
    pipeline_exposed: float = 0.28
    """The same for transfers between stages."""
    overlap_leak: float = 0.3
    """Of a transfer that fits under computation, the part that still delays the step."""
    latency_s: float = 8e-6
    """Start of one collective."""
    optimizer_bytes: float = 30.0
    """Read and written per parameter of an update: gradient, two moments, master weight, compute copy."""
    head_bytes: float = 20.0
    """Read and written per logit: logits, softmax, gradient."""
    dense_block_floor_s: float = 0.4e-3
    """Least time of a dense block, forward and backward: launching its kernels."""
    moe_block_floor_s: float = 8e-3
    """The same for a block with experts."""


CONSTANTS = Constants()

DEFAULT_SHARE: Mapping[str, float] = MappingProxyType(
    {
        "float32": 0.75,
        "bfloat16": 0.75,
        "float8": 0.6,
        "float8_row": 0.6,
        "mxfloat8": 0.6,
        "float4": 0.5,
    }
)
"""Matrix products, of the peak, on a GPU of which no published run was used."""

GEMM_SHARE: Mapping[tuple[str, str], float] = MappingProxyType({})
"""(GPU, precision) -> what large dense matrix products reach of the peak."""


def gemm_share(gpu: str, precision: str) -> float:
    """Share of the peak for a GPU of the catalogue; the default of the precision where nothing is known."""
    return GEMM_SHARE.get((gpu, precision), DEFAULT_SHARE[precision])


BANDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dense_short": (0.10, 0.24),
        "dense_long_or_blackwell": (0.15, 0.40),
        "moe": (0.27, 0.60),
    }
)
"""Class of run -> (median, 90th percentile) of |predicted / published - 1| on sources that were not used in fitting."""

LONG_SEQUENCE = 16384
"""Longer rows are a class of their own: few runs were published."""


def error_class(gpu: str, seq_len: int, *, is_moe: bool) -> str:
    """The class of run whose error applies: a key of :data:`BANDS`."""
    if is_moe:
        return "moe"
    is_blackwell = gpu.startswith(("B2", "B3", "GB", "RTX 5"))
    return "dense_long_or_blackwell" if is_blackwell or seq_len > LONG_SEQUENCE else "dense_short"


def error_band(gpu: str, precision: str, seq_len: int, *, is_moe: bool) -> dict[str, object]:
    """How far a predicted time may be off, for people: class, median and 90th percentile of published runs."""
    name = error_class(gpu, seq_len, is_moe=is_moe)
    median, p90 = BANDS[name]
    known = (gpu, precision) in GEMM_SHARE
    note = "" if known else f"no published run of {precision} on this GPU was used: expect more"
    return {"class": name, "median": median, "p90": p90, "note": note}
