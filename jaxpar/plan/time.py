"""Predicted step time: computation, the communication that delays it, the pipeline's idle time, the optimizer.

step = (m + (p - 1) / v) x stage + data axes + optimizer, with m microbatches, p stages of v chunks. A stage is its
blocks, its part of the head and the tensor, context, expert and pipeline collectives that are not hidden. Sources:
arXiv 2104.04473 for the schedule; docs/plan-accuracy.md for how well the whole predicts published runs.
"""

from __future__ import annotations

import dataclasses

from jaxpar.plan.communication import Collective, StageTime, collectives, local_params
from jaxpar.plan.compute import block_time, head_time, peak_flops
from jaxpar.plan.efficiency import CONSTANTS, Constants, closest_share
from jaxpar.plan.flops import Convention, model_flops_utilisation
from jaxpar.plan.layout import Layout
from jaxpar.plan.shape import ModelShape
from jaxpar.plan.topology import Cluster

_IN_STAGE = ("tensor", "context", "expert", "pipeline")
"""Axes whose collectives a stage does for every microbatch, so that they also stretch the pipeline's idle time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on the slowest device; the parts add up to ``step_s``."""

    step_s: float
    products_s: float
    """Matrix products of the blocks, recomputation included."""
    attention_s: float
    elementwise_s: float
    """Norms, activations, residuals, and what launching kernels costs above that."""
    head_s: float
    """Output head and cross entropy."""
    optimizer_s: float
    exposed_comm_s: float
    """Communication that nothing hides."""
    bubble_s: float
    """Waiting for other pipeline stages."""
    bubble_fraction: float
    """Idle share of the schedule, idle/total."""
    collectives: tuple[Collective, ...]

    @property
    def compute_s(self) -> float:
        """All computation."""
        return self.products_s + self.attention_s + self.elementwise_s + self.head_s + self.optimizer_s


def step_time(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    *,
    share: float | None = None,
    constants: Constants = CONSTANTS,
) -> StepTime:
    """Time of one optimizer step.

    Args:
        shape: The model.
        layout: How it is spread.
        cluster: What it runs on.
        share: What matrix products reach of the peak; None takes the fitted constant of the GPU and precision.
        constants: All other constants.
    """
    if share is None:
        share = closest_share(cluster.gpu.name, layout.precision)
    block = block_time(shape, layout, cluster.gpu, share, constants)
    blocks = layout.stage_layers(shape.num_layers)
    head = head_time(shape, layout, cluster.gpu, constants)
    again, m = layout.recompute, layout.microbatches
    computed = block.forward_s + block.backward_s(again)
    # Where launching kernels takes longer than running them, transfers hide behind that too.
    stretch = max(1.0, block.floor_s / computed)
    computing = StageTime(
        block=block,
        blocks=blocks,
        forward_s=blocks * block.forward_s * stretch + head / 3,
        backward_s=blocks * block.backward_s(again) * stretch + head * 2 / 3,
    )
    found = collectives(shape, layout, cluster, computing, constants)
    in_stage = sum(collective.exposed_s for collective in found if collective.axis in _IN_STAGE)
    outside = sum(collective.exposed_s for collective in found if collective.axis not in _IN_STAGE)
    busy = m * blocks * computed
    waiting = max(0.0, m * blocks * block.floor_s - busy - in_stage)
    stages = busy + waiting + in_stage + m * head
    bubble = (layout.pipeline - 1) / layout.chunks * stages / m
    optimizer = _optimizer_time(shape, layout, cluster, constants)
    return StepTime(
        step_s=stages + bubble + outside + optimizer,
        products_s=m * blocks * (3 + again) * block.products_s,
        attention_s=m * blocks * (3.5 + again) * block.attention_s,
        elementwise_s=m * blocks * (3 + again) * block.elementwise_s + waiting,
        head_s=m * head,
        optimizer_s=optimizer,
        exposed_comm_s=in_stage + outside,
        bubble_s=bubble,
        bubble_fraction=layout.bubble_fraction,
        collectives=tuple(found),
    )


def _optimizer_time(shape: ModelShape, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    """Reading and writing the state of the parameters that this device updates."""
    dense, experts = local_params(shape, layout)
    shards = 1 if layout.strategy == "none" else layout.weight_shards
    held = dense / shards + experts / max(1, shards // layout.expert)
    return held * constants.optimizer_bytes / (cluster.gpu.memory_bandwidth * constants.memory_share)


def tokens_per_s_per_device(layout: Layout, step_s: float) -> float:
    """Tokens that one device gets through."""
    return layout.global_batch_size * layout.seq_len / step_s / layout.num_devices


def utilisation(
    shape: ModelShape, layout: Layout, cluster: Cluster, step_s: float, convention: Convention = "A"
) -> float:
    """Model FLOPs utilisation, of the dense peak of the layout's precision."""
    flops = shape.training_flops_per_token(layout.seq_len, convention)
    peak = peak_flops(cluster.gpu, layout.precision)
    return model_flops_utilisation(tokens_per_s_per_device(layout, step_s), flops, peak)
