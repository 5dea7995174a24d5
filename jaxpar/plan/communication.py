"""Every collective of a training step: axis, operation, messages, bytes, link, time, and what of it delays the step.

Bytes are what one device sends per step. A ring all-gather or reduce-scatter of N bytes over n devices sends
N (n - 1) / n, an all-reduce twice that (arXiv 2104.04473, section 3.2; NCCL's bus bandwidth).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxpar.plan.compute import ATTENTION_BACKWARD, BlockTime
from jaxpar.plan.efficiency import Constants
from jaxpar.plan.layout import Layout
from jaxpar.plan.shape import ModelShape
from jaxpar.plan.topology import Cluster

HALVES = 4
"""Tensor collectives of a block's forward pass: a gather before and a scatter after attention and the MLP. The
backward pass has as many. Source: arXiv 2205.05198, figure 5."""

GRADIENT_BYTES = 4
"""Gradients are reduced in float32, unless ``precision.reduce`` says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective of a step, on the slowest stage."""

    axis: str
    op: str
    what: str
    """What travels, for people."""
    count: float
    """Messages per step and device."""
    bytes: float
    """Bytes that a device sends per step."""
    link: str
    """NVLink, PCIe or network."""
    seconds: float
    """Time per step if nothing else ran."""
    exposed_s: float
    """Part of it that delays the step."""
    overlappable: bool
    """Whether other work can run meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTime:
    """Computation that transfers may hide behind, for one microbatch of one stage."""

    block: BlockTime
    blocks: float
    """Blocks of the stage."""
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def collectives(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> list[Collective]:
    """All collectives of a step, from the innermost axis to the outermost."""
    found = [
        *_tensor(shape, layout, cluster, stage, constants),
        *_context(shape, layout, cluster, stage, constants),
        *_expert(shape, layout, cluster, stage, constants),
        *_sharded_weights(shape, layout, cluster, stage, constants),
        *_replicas(shape, layout, cluster, stage, constants),
        *_pipeline(shape, layout, cluster, constants),
    ]
    return [collective for collective in found if collective.count]


def local_params(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """(dense, routed expert) matrix elements that one device works with when they are gathered over the data axes.

    The embedding and head are spread over the stages like the blocks.
    """
    split = layout.tensor * layout.pipeline
    dense = (shape.block_params + shape.embedding_params) / split
    return dense, shape.routed_params / (split * layout.expert)


def _hidden(seconds: float, under: float, constants: Constants) -> float:
    """What of a transfer delays the step when ``under`` seconds of computation run beside it."""
    return max(0.0, seconds - under) + constants.overlap_leak * min(seconds, under)


def _tensor(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> Iterator[Collective]:
    tensor = layout.tensor
    if tensor == 1:
        return
    # Experts behind an exchange take tokens as they lie: only attention gathers the sequence.
    halves = HALVES / 2 if shape.num_experts and layout.expert > 1 else HALVES
    sent = layout.tokens * shape.embed_dim * layout.value_bytes * (tensor - 1) / tensor
    passes = 2 + layout.recompute
    count = layout.microbatches * stage.blocks * halves * passes
    seconds = count * (sent / cluster.ring_bandwidth(1, tensor) + constants.latency_s)
    exposed = constants.tensor_exposed_async if layout.async_tensor else constants.tensor_exposed
    op = "all-gather, reduce-scatter" if layout.sequence_parallel else "all-reduce"
    yield Collective(
        axis="tensor",
        op=op,
        what="activations",
        count=count,
        bytes=count * sent,
        link=cluster.link_name(1, tensor),
        seconds=seconds,
        exposed_s=seconds * exposed,
        overlappable=layout.async_tensor,
    )


def _context(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> Iterator[Collective]:
    context = layout.context
    if context == 1:
        return
    # Ring attention (arXiv 2310.01889): keys and values of every other device pass by, their gradients on the way back.
    width = shape.latent.latent_dim + shape.latent.rope_dim if shape.latent else 2 * shape.kv_width / layout.tensor
    sent = layout.tokens * width * layout.value_bytes
    inside = layout.tensor * context <= cluster.domain_size
    bandwidth = cluster.ring_bandwidth(layout.tensor, context) if inside else cluster.network_bandwidth
    if layout.context_mode == "allgather":
        yield from _gathered_context(layout, cluster, stage, sent * (context - 1), bandwidth)
        return
    forward, attention = sent * (context - 1) / bandwidth, stage.block.attention_s
    exposed = _hidden(forward, attention, constants) * (1 + layout.recompute)
    exposed += _hidden(2 * forward, ATTENTION_BACKWARD * attention, constants)
    passes = layout.microbatches * stage.blocks
    yield Collective(
        axis="context",
        op="permute",
        what="keys and values",
        count=passes * (context - 1) * (3 + layout.recompute),
        bytes=passes * sent * (context - 1) * (3 + layout.recompute),
        link=cluster.link_name(layout.tensor, context),
        seconds=passes * forward * (3 + layout.recompute),
        exposed_s=passes * exposed,
        overlappable=True,
    )


def _gathered_context(
    layout: Layout, cluster: Cluster, stage: StageTime, sent: float, bandwidth: float
) -> Iterator[Collective]:
    """Keys and values of the whole row gathered forward and backward (the recomputation's serves both), gradients back.

    Nothing computes beside them: attention needs the gathered row, and its gradient is the last that attention makes.
    """
    passes = layout.microbatches * stage.blocks
    for op, what, each, size in (
        ("all-gather", "keys and values", 2, sent),
        ("reduce-scatter", "their gradients", 1, sent * 4 / layout.value_bytes),
    ):
        seconds = passes * each * size / bandwidth
        yield Collective(
            axis="context",
            op=op,
            what=what,
            count=passes * each,
            bytes=passes * each * size,
            link=cluster.link_name(layout.tensor, layout.context),
            seconds=seconds,
            exposed_s=seconds,
            overlappable=False,
        )


def _expert(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> Iterator[Collective]:
    expert = layout.expert
    if expert == 1 or not shape.num_experts:
        return
    # Dispatch and combination: every token goes to top_k devices, minus those that stay.
    tokens = layout.tokens / (layout.tensor if layout.sequence_parallel else 1)
    sent = tokens * shape.top_k * shape.embed_dim * layout.value_bytes * (expert - 1) / expert
    stride = layout.tensor * layout.context
    inside = min(1.0, max(1.0, cluster.domain_size / stride) / expert)
    # A token crosses the network once per node that it goes to, and is spread there over the fast link.
    domains = max(1.0, expert * stride / cluster.domain_size)
    across = sent * (1 - inside) * min(1.0, domains / shape.top_k)
    link, network = cluster.exchange_bandwidth(stride, expert)
    seconds = max(sent / link, across / network)
    moe_share = shape.moe_layers / shape.num_layers
    count = layout.microbatches * stage.blocks * moe_share * 2 * (2 + layout.recompute)
    yield Collective(
        axis="expert",
        op="all-to-all",
        what="tokens to their experts and back",
        count=count,
        bytes=count * sent,
        link=cluster.link_name(stride, expert),
        seconds=count * seconds,
        exposed_s=count * seconds * constants.expert_exposed,
        overlappable=False,
    )


def _sharded_weights(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> Iterator[Collective]:
    shards = layout.weight_shards
    if shards == 1 or layout.strategy == "none":
        return
    dense, experts = local_params(shape, layout)
    bandwidth = cluster.ring_bandwidth(layout.tensor, shards)
    link = cluster.link_name(layout.tensor, shards)
    expert_shards = max(1, shards // layout.expert)
    expert_stride = layout.tensor * layout.context * layout.expert
    expert_bandwidth = cluster.ring_bandwidth(expert_stride, expert_shards)
    share, expert_share = (shards - 1) / shards, (expert_shards - 1) / expert_shards
    elements = dense * share + experts * expert_share
    one_byte = dense * share / bandwidth + experts * expert_share / expert_bandwidth
    # One ring per block: the first bytes pass every member before the last ones have arrived.
    ring_s = constants.hop_s * (shards - 1) * stage.blocks
    gather, scatter = one_byte * layout.value_bytes + ring_s, one_byte * GRADIENT_BYTES + ring_s
    arrays = 7 * stage.blocks

    def row(op: str, what: str, times: float, nbytes: int, seconds: float, exposed: float) -> Collective:
        return Collective(
            axis="fsdp",
            op=op,
            what=what,
            count=arrays * times,
            bytes=elements * nbytes * times,
            link=link,
            seconds=seconds * times,
            exposed_s=exposed * times,
            overlappable=True,
        )

    if layout.strategy == "full":
        # Per microbatch: weights before the forward pass, again before the backward pass, gradients after it. They
        # share one queue, so that what does not fit beside the computation of the whole stage delays it.
        m, gathers = layout.microbatches, layout.weight_gathers
        both = gathers * gather + scatter
        exposed = _hidden(both, stage.total_s, constants) / both if both else 0.0
        # Nothing runs yet beside the very first block's gather.
        first = gather / max(1.0, stage.blocks) / (gathers * m)
        yield row("all-gather", "weights", gathers * m, layout.value_bytes, gather, exposed * gather + first)
        yield row("reduce-scatter", "gradients", m, GRADIENT_BYTES, scatter, exposed * scatter)
        return
    # Weights once per step, beside the forward pass; gradients per microbatch (grads) or once (optimizer).
    times = layout.microbatches if layout.strategy == "grads" else 1
    beside = 0.0 if layout.pipeline > 1 and not layout.overlaps_step_transfers else 1.0
    beside_scatter = 1.0 if layout.strategy == "grads" else beside
    hidden = _hidden(scatter, beside_scatter * stage.backward_s, constants)
    yield row("reduce-scatter", "gradients", times, GRADIENT_BYTES, scatter, hidden)
    hidden = _hidden(gather, beside * stage.forward_s, constants)
    yield row("all-gather", "weights", 1, layout.value_bytes, gather, hidden)


def _replicas(
    shape: ModelShape, layout: Layout, cluster: Cluster, stage: StageTime, constants: Constants
) -> Iterator[Collective]:
    replicas = layout.replicas
    if replicas == 1:
        return
    dense, experts = local_params(shape, layout)
    sharded = layout.strategy in ("full", "grads")
    held = dense / layout.weight_shards + experts / max(1, layout.weight_shards // layout.expert)
    elements = held if sharded or layout.strategy == "optimizer" else dense + experts
    sent = 2 * elements * GRADIENT_BYTES * (replicas - 1) / replicas
    stride = layout.tensor * layout.weight_shards
    seconds = sent / cluster.ring_bandwidth(stride, replicas)
    # Reduced once per step, beside the backward pass of the last microbatch.
    yield Collective(
        axis="data",
        op="all-reduce",
        what="gradients",
        count=7 * stage.blocks,
        bytes=sent,
        link=cluster.link_name(stride, replicas),
        seconds=seconds,
        exposed_s=_hidden(seconds, stage.backward_s, constants),
        overlappable=True,
    )


def _pipeline(shape: ModelShape, layout: Layout, cluster: Cluster, constants: Constants) -> Iterator[Collective]:
    stages = layout.pipeline
    if stages == 1:
        return
    sequence_shards = layout.tensor if layout.sequence_parallel else 1
    sent = layout.tokens * shape.embed_dim * layout.value_bytes / sequence_shards
    stride = layout.num_devices // stages
    is_inside = layout.num_devices <= cluster.domain_size
    bandwidth = cluster.link_bandwidth if is_inside else cluster.network_bandwidth
    count = layout.microbatches * layout.chunks * 2
    seconds = count * (sent / bandwidth + constants.latency_s)
    yield Collective(
        axis="pipeline",
        op="permute",
        what="activations to the next stage, gradients back",
        count=count,
        bytes=count * sent,
        link="network" if not is_inside else cluster.link_name(stride, stages),
        seconds=seconds,
        exposed_s=seconds * constants.pipeline_exposed,
        overlappable=True,
    )
