"""Time of the arithmetic of one microbatch on one device, without any communication."""

from __future__ import annotations

import dataclasses

from jaxpar.plan.catalogue import Gpu
from jaxpar.plan.efficiency import Constants
from jaxpar.plan.layout import Layout
from jaxpar.plan.shape import ModelShape

ATTENTION_BACKWARD = 2.5
"""Products of fused attention's backward pass, of its forward: scores once more and four gradients for two products.
Source: FlashAttention-2, arXiv 2307.08691, section 3.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds of one average block for one microbatch, forward."""

    products_s: float
    """Matrix products with weights."""
    attention_s: float
    """Scores and weighted values."""
    elementwise_s: float
    """Limited by memory bandwidth."""
    floor_s: float
    """Least time of a forward and backward pass together."""

    @property
    def forward_s(self) -> float:
        """One forward pass."""
        return self.products_s + self.attention_s + self.elementwise_s

    def backward_s(self, recompute: float) -> float:
        """One backward pass: two products for each, 2.5 attentions, two passes of memory; and what is repeated."""
        backward = 2 * self.products_s + ATTENTION_BACKWARD * self.attention_s + 2 * self.elementwise_s
        return backward + recompute * self.forward_s


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Peak FLOP/s of products; float8 and float4 fall back on what the GPU has.

    float32 is full float32, never TF32.
    """
    half = gpu.bfloat16_flops or gpu.float16_flops
    if precision == "float32":
        return gpu.float32_flops
    if precision == "float4":
        return gpu.float4_flops or gpu.float8_flops or half
    if precision.endswith(("float8", "float8_row")):
        return gpu.float8_flops or half
    return half


def _saturation(size: float, half: float) -> float:
    """Share of its speed that a product with a side of this size reaches."""
    return size / (size + half)


def block_time(shape: ModelShape, layout: Layout, gpu: Gpu, share: float, constants: Constants) -> BlockTime:
    """Forward time of a block, averaged over dense blocks and blocks with experts.

    Products: 2 FLOPs per weight and token at ``share`` of the peak, less where a side is small. Attention: at its own
    share of the bfloat16 peak. Elementwise: bytes moved over the memory bandwidth.
    """
    tokens, tensor = layout.tokens, layout.tensor
    speed = peak_flops(gpu, layout.precision) * share * _saturation(tokens, constants.half_tokens)
    attention_peak = gpu.float32_flops if layout.precision == "float32" else peak_flops(gpu, "bfloat16")

    attention_width = _saturation(shape.heads_width / tensor, constants.half_width)
    products = 2 * tokens * shape.attention_params / tensor / (speed * attention_width)
    mlp_values = 0.0
    routing = 0.0
    moe = shape.moe_layers / shape.num_layers
    if moe < 1:
        mlp_width = _saturation(shape.mlp_dim / tensor, constants.half_width)
        params = shape.mlp_matrices * shape.embed_dim * shape.mlp_dim
        products += (1 - moe) * 2 * tokens * params / tensor / (speed * mlp_width)
        mlp_values += (1 - moe) * shape.mlp_dim
    if moe > 0:
        products += moe * _expert_products(shape, layout, gpu, share, constants)
        mlp_values += moe * shape.expert_mlp_dim * (shape.top_k + shape.num_shared_experts)
        routing = moe * shape.top_k * constants.routing_values * shape.embed_dim / tensor

    attention = tokens * shape.attention_flops(layout.seq_len) / shape.num_layers / tensor
    sequence_shards = tensor if layout.sequence_parallel else 1
    values = constants.elementwise_embed * shape.embed_dim / sequence_shards
    values += constants.elementwise_mlp * mlp_values / tensor + routing
    bytes_per_value = layout.value_bytes
    moved = bytes_per_value * tokens * values
    if layout.precision not in ("float32", "bfloat16"):
        moved *= constants.quantised_elementwise
    floor = moe * constants.moe_block_floor_s + (1 - moe) * constants.dense_block_floor_s
    return BlockTime(
        products_s=products,
        attention_s=attention / (attention_peak * constants.attention(gpu.name, layout.attention)),
        elementwise_s=moved / (gpu.memory_bandwidth * constants.memory_share),
        floor_s=floor * (1 + layout.recompute / 3),
    )


def _expert_products(shape: ModelShape, layout: Layout, gpu: Gpu, share: float, constants: Constants) -> float:
    """Seconds of routed and shared experts of one block: each expert multiplies the few tokens that chose it."""
    tokens_per_expert = layout.tokens * shape.top_k * layout.expert / shape.num_experts
    width = shape.expert_mlp_dim / (layout.tensor if layout.experts_over_tensor else 1)
    speed = peak_flops(gpu, layout.precision) * share * constants.grouped_share
    speed *= _saturation(width, constants.half_width) * _saturation(tokens_per_expert, constants.half_tokens)
    flops = 2 * layout.tokens * (shape.top_k + shape.num_shared_experts) * shape.expert_params / layout.tensor
    return flops / speed


def head_time(shape: ModelShape, layout: Layout, gpu: Gpu, constants: Constants) -> float:
    """Seconds of the output head and cross entropy for one microbatch, forward and backward, on one stage.

    Three products of tokens x V D, in the compute type's bfloat16 (or float32) whatever the blocks use, and the passes
    over the logits. Spread over the stages, each has its share of the vocabulary.
    """
    shards = layout.tensor * (layout.pipeline if layout.is_head_spread else 1)
    logits = layout.tokens * shape.padded_vocab_size / shards
    peak = gpu.float32_flops if layout.precision == "float32" else peak_flops(gpu, "bfloat16")
    products = 3 * 2 * logits * shape.embed_dim / (peak * constants.head_share)
    return products + logits * constants.head_bytes / (gpu.memory_bandwidth * constants.memory_share)
