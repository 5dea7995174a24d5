"""Memory and speed of generating text: weights, KV cache, and the bytes that every token has to read."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxpar.plan.catalogue import Gpu
from jaxpar.plan.compute import peak_flops
from jaxpar.plan.efficiency import CONSTANTS, closest_share
from jaxpar.plan.shape import ModelShape
from jaxpar.plan.topology import Cluster

WeightType = Literal["int4", "int8", "bf16"]

GROUP = 128
"""Weights that share one scale and one offset under int4 and int8 (as GPTQ and AWQ do)."""

WEIGHT_BYTES = {"int4": 0.5 + 4 / GROUP, "int8": 1 + 4 / GROUP, "bf16": 2.0}
"""Bytes per weight of a matrix inside a block, a 16-bit scale and offset per group included. Embedding and head stay in
16 bits."""

RESERVE_BYTES = 0.7e9
"""CUDA context, kernels and allocator on a device that does not train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """Bytes on each device, and speeds of the whole model."""

    devices: int
    """Devices that one copy of the model is split over."""
    weights_bytes: float
    """Per device."""
    kv_cache_bytes: float
    """Per device, all sequences at full context."""
    activations_bytes: float
    """Per device: logits, and one block's values of a prompt chunk."""
    reserve: float
    device_bytes: float
    prefill_s: float
    """Time to read one prompt of full context; compute bound."""
    decode_step_s: float
    """Time of one token for every sequence of the batch; bandwidth bound at small batch."""
    tokens_per_s: float
    """Generated tokens of all sequences together."""

    @property
    def total_bytes(self) -> float:
        """Everything on one device."""
        return self.weights_bytes + self.kv_cache_bytes + self.activations_bytes + self.reserve

    @property
    def free_bytes(self) -> float:
        """What is left; negative if it does not fit."""
        return self.device_bytes - self.total_bytes


def weights_bytes(shape: ModelShape, weights: WeightType) -> float:
    """Bytes of all weights: total parameters count, whatever a token uses."""
    quantised = shape.block_params + shape.routed_params
    return quantised * WEIGHT_BYTES[weights] + (shape.embedding_params + shape.vector_params) * 2


def touched_experts(shape: ModelShape, tokens: int) -> float:
    """Expected number of different experts of one block that ``tokens`` tokens choose, each top_k at random.

    E (1 - (1 - k / E)^n): decoding a batch reads these from memory.
    """
    return shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)


def plan_inference(
    shape: ModelShape, cluster: Cluster, *, sequences: int, context: int, weights: WeightType
) -> InferencePlan:
    """Memory and speed of decoding with the model split evenly over all devices of the cluster (tensor parallel).

    Args:
        shape: The model.
        cluster: Its devices hold one copy of the model.
        sequences: Sequences that are generated together.
        context: Tokens of prompt and answer, whose keys and values are kept in 16 bits.
        weights: How matrices are stored.
    """
    devices, gpu = cluster.num_devices, cluster.gpu
    # Where kv heads are fewer than devices, each is on several.
    cache_shards = devices if shape.latent is None and shape.num_kv_heads >= devices else shape.num_kv_heads
    cache_shards = 1 if shape.latent is not None else min(devices, cache_shards)
    cache = sequences * context * shape.kv_cache_bytes_per_token() / cache_shards
    stored = weights_bytes(shape, weights) / devices
    chunk = min(context, 2048)
    width = 2 * shape.embed_dim + shape.heads_width / devices + 2 * shape.mlp_dim / devices
    activations = 2 * chunk * width + 4 * sequences * shape.vocab_size / devices

    bandwidth = gpu.memory_bandwidth * CONSTANTS.memory_share
    read = stored
    if shape.num_experts:
        unread = 1 - touched_experts(shape, sequences) / shape.num_experts
        read -= unread * shape.routed_params * WEIGHT_BYTES[weights] / devices
    products = 2 * sequences * shape.active_params / devices / _product_speed(gpu)
    hops = 2 * shape.num_layers * _hop(shape, cluster, sequences)
    step = max((read + cache) / bandwidth, products) + hops
    attention = context * shape.attention_flops(context)
    prefill = (2 * context * shape.active_params + attention) / devices / _product_speed(gpu)
    return InferencePlan(
        devices=devices,
        weights_bytes=stored,
        kv_cache_bytes=cache,
        activations_bytes=activations,
        reserve=RESERVE_BYTES,
        device_bytes=gpu.memory_bytes,
        prefill_s=prefill + 2 * shape.num_layers * _hop(shape, cluster, context),
        decode_step_s=step,
        tokens_per_s=sequences / step,
    )


def _product_speed(gpu: Gpu) -> float:
    return peak_flops(gpu, "bfloat16") * closest_share(gpu.name, "bfloat16")


def _hop(shape: ModelShape, cluster: Cluster, tokens: int) -> float:
    """One all-reduce of ``tokens`` activations over all devices."""
    devices = cluster.num_devices
    if devices == 1:
        return 0.0
    sent = 2 * 2 * tokens * shape.embed_dim * (devices - 1) / devices
    return sent / cluster.ring_bandwidth(1, devices) + CONSTANTS.latency_s
