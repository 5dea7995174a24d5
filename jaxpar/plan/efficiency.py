"""What hardware reaches of its peak: constants fitted to published runs, with where they come from.

The structure of the time model is physics; these numbers are not. ``scripts/plan_published.py --fit`` derives them from
a table of published runs and docs/plan-accuracy.md tells how well they do on runs that were not used.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Numbers that are the same for every GPU, precision and source."""

    attention_share: Mapping[str, float] = MappingProxyType(
        {"ampere": 0.33, "hopper": 0.4, "blackwell": 0.7, "other": 0.33}
    )
    """Fused attention written for a generation, of the bfloat16 peak, whatever the precision of other products."""
    portable_attention_share: Mapping[str, float] = MappingProxyType({"hopper": 0.19, "blackwell": 0.19})
    """The same for kernels of the generation before (FlashAttention-2), where they are slower."""
    head_share: float = 0.58
    """The output head, of the bfloat16 peak."""
    memory_share: float = 0.8
    """Elementwise work and the optimizer, of the memory bandwidth."""
    half_width: float = 240.0
    """Width n of a product's smaller side at which it reaches half its speed: n / (n + half_width)."""
    half_tokens: float = 480.0
    """The same for the number of tokens."""
    grouped_share: float = 0.64
    """Products of experts, of those of dense layers."""
    elementwise_embed: float = 24.0
    """Values read and written per token and unit of embed_dim in a block's forward pass: norms, residuals, rotations,
    casts."""
    elementwise_mlp: float = 4.5
    """The same per unit of MLP width: the activation function and its product."""
    quantised_elementwise: float = 0.6
    """Elementwise work under float8 and float4, of that under bfloat16: half the bytes for what is kept in 8 bits, and
    casts and scales."""
    eager_elementwise: float = 2.5
    """The same for a framework that fuses nothing."""
    unfused_norm_elementwise: float = 1.1
    """The same for one whose norms are several kernels."""
    routing_values: float = 24.0
    """Values moved per token, unit of embed_dim and chosen expert: permutation and combination."""
    tensor_exposed: float = 1.6
    """Time of tensor collectives, of their bytes over the link; above 1: kernels start late and short rings fall
    short."""
    tensor_exposed_async: float = 0.46
    """The same where collectives overlap with the products next to them."""
    expert_exposed: float = 0.54
    """The same for all-to-all exchanges of tokens."""
    pipeline_exposed: float = 0.28
    """The same for transfers between stages."""
    overlap_leak: float = 0.3
    """Of a transfer that fits under computation, the part that still delays the step."""
    latency_s: float = 8e-6
    """Start of one collective."""
    hop_s: float = 4e-6
    """Each further member of a ring: the time that data needs to pass through it, so that gathers over thousands of
    devices take long whatever their size. Published runs, up to 2,048 GPUs, cannot tell 0 from 8e-6."""
    optimizer_bytes: float = 30.0
    """Read and written per parameter of an update: gradient, two moments, master weight, compute copy."""
    head_bytes: float = 20.0
    """Read and written per logit: logits, softmax, gradient."""
    dense_block_floor_s: float = 0.4e-3
    """Least time of a dense block, forward and backward: launching its kernels."""
    moe_block_floor_s: float = 8e-3
    """The same for a block with experts."""

    def attention(self, gpu: str, kernel: str) -> float:
        """Share of the bfloat16 peak that attention reaches on a GPU of the catalogue."""
        family = generation(gpu)
        if kernel == "portable" and family in self.portable_attention_share:
            return self.portable_attention_share[family]
        return self.attention_share.get(family, self.attention_share["other"])


def generation(gpu: str) -> str:
    """Architecture of a GPU, by name: GPUs of one generation have the same cores."""
    starts = {"A": "ampere", "RTX A": "ampere", "RTX 3": "ampere", "H": "hopper", "GH": "hopper", "B": "blackwell"}
    starts |= {"GB": "blackwell", "RTX 5": "blackwell", "L": "ada", "RTX 4": "ada", "V": "volta", "T": "turing"}
    return next((starts[start] for start in sorted(starts, key=len, reverse=True) if gpu.startswith(start)), "other")


CONSTANTS = Constants()

Shares = Mapping[tuple[str, str], float]
"""(GPU, precision) -> what large dense matrix products reach of the peak."""

DEFAULT_SHARE = 0.6
"""Where nothing is known of a GPU or its relatives."""

GEMM_SHARE: Shares = MappingProxyType(
    {
        ("A100 SXM 40GB", "bfloat16"): 0.902,
        ("A100 SXM 80GB", "bfloat16"): 0.811,
        ("B200", "float8"): 0.447,
        ("B200", "mxfloat8"): 0.423,
        ("GB200", "bfloat16"): 0.539,
        ("GB200", "float4"): 0.32,
        ("GB200", "float8"): 0.437,
        ("GB200", "mxfloat8"): 0.441,
        ("GB300", "float4"): 0.34,
        ("GB300", "float8"): 0.63,
        ("H100 SXM", "bfloat16"): 0.745,
        ("H100 SXM", "float8"): 0.637,
        ("H100-96-500W", "bfloat16"): 0.733,
        ("H100-96-500W", "float8"): 0.547,
        ("H200", "bfloat16"): 0.834,
        ("H200", "float8"): 0.904,
    }
)
"""Fitted by ``scripts/plan_published.py RUNS.csv --fit`` to 334 published runs of dense models: aleph-alpha (54 runs),
fms-fsdp (4), kempner (12), llm-foundry (130), maxtext (5), megatron-bridge (17), megatron-lm (3), nemo (10), nemo-dgxc
(74) and torchtitan (25). The tables are public; docs/plan-accuracy.md says what they are and how well this does."""

_RELATED_PRECISION = {"float8_row": "float8", "mxfloat8": "float8"}


def closest_share(gpu: str, precision: str, shares: Shares = GEMM_SHARE) -> float:
    """Share of the peak of matrix products.

    The constant of this GPU and precision; else the median of its generation at this precision, at a related
    precision, at any; else the median of this precision; else the default.
    """
    if (gpu, precision) in shares:
        return shares[gpu, precision]
    family, related = generation(gpu), _RELATED_PRECISION.get(precision, precision)
    for kind in (
        lambda name, other: generation(name) == family and other == precision,
        lambda name, other: generation(name) == family and _RELATED_PRECISION.get(other, other) == related,
        lambda name, _: generation(name) == family,
        lambda _, other: other == precision,
    ):
        if found := [share for key, share in shares.items() if kind(*key)]:
            return statistics.median(found)
    return DEFAULT_SHARE


BANDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dense_short": (0.08, 0.18),
        "dense_long_or_blackwell": (0.1, 0.25),
        "moe": (0.2, 0.45),
    }
)
"""Class of run -> (median, 90th percentile) of |predicted / published - 1|: those of sources that were not
used in fitting (docs/plan-accuracy.md), rounded up, because the global constants have seen every source."""

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
