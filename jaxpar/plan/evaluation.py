"""One layout evaluated: memory, time, throughput. The unit that plans, remedies and the search are made of."""

from __future__ import annotations

import dataclasses

from jaxpar.plan.efficiency import CONSTANTS, Constants
from jaxpar.plan.facts import Facts
from jaxpar.plan.layout import Layout, Precision, layout_of
from jaxpar.plan.memory import FLOAT32_STATE, Memory, StateBytes, training_memory
from jaxpar.plan.optimizer_memory import state_bytes
from jaxpar.plan.shape import ModelShape
from jaxpar.plan.time import StepTime, step_time, tokens_per_s_per_device, utilisation
from jaxpar.plan.topology import Cluster

SAFE_MARGIN = 0.1
"""Share of the device within which "fits" and "does not fit" are not certain: published runs near the limit are called
wrongly about as often as rightly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained and on what; layouts are ways to do it."""

    shape: ModelShape
    cluster: Cluster
    global_batch_size: int
    seq_len: int
    precision: Precision = "bfloat16"
    state: StateBytes = FLOAT32_STATE
    memory_fraction: float = 0.92
    loss_chunk_tokens: int = 0
    constants: Constants = CONSTANTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a layout costs."""

    layout: Layout
    memory: Memory
    time: StepTime
    tokens_per_s_per_device: float
    mfu: float
    """By convention A, of the dense peak of the compute type."""

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the device."""
        return self.memory.free_bytes >= 0

    @property
    def fits_safely(self) -> bool:
        """Whether a tenth of the device is left."""
        return self.memory.free_bytes >= SAFE_MARGIN * self.memory.device_bytes


def trains_today(layout: Layout) -> bool:
    """Whether the trainer can run such a layout already: see ``jaxpar.plan.support_rules``."""
    has_whole_weights = layout.strategy in ("optimizer", "grads")
    return layout.pipeline == 1 or (layout.expert == 1 and not (layout.context > 1 and has_whole_weights))


def task_of(facts: Facts, shape: ModelShape, cluster: Cluster) -> Task:
    """The task of a config."""
    config = facts.config
    return Task(
        shape=shape,
        cluster=cluster,
        global_batch_size=config.train.global_batch_size,
        seq_len=config.data.seq_len,
        precision=config.precision.compute,
        state=state_bytes(config),
        memory_fraction=config.runtime.memory_fraction,
        loss_chunk_tokens=config.train.loss_chunk_tokens,
    )


def memory_of(task: Task, layout: Layout) -> Memory:
    """Peak memory of a layout."""
    return training_memory(
        task.shape,
        layout,
        device_bytes=task.cluster.gpu.memory_bytes,
        state=task.state,
        memory_fraction=task.memory_fraction,
        loss_chunk_tokens=task.loss_chunk_tokens,
    )


def evaluate(task: Task, layout: Layout, memory: Memory | None = None) -> Evaluation:
    """Memory and time of a layout; ``memory`` if it is known already."""
    time = step_time(task.shape, layout, task.cluster, constants=task.constants)
    return Evaluation(
        layout=layout,
        memory=memory or memory_of(task, layout),
        time=time,
        tokens_per_s_per_device=tokens_per_s_per_device(layout, time.step_s),
        mfu=utilisation(task.shape, layout, task.cluster, time.step_s),
    )


def evaluate_config(facts: Facts, shape: ModelShape, cluster: Cluster) -> tuple[Task, Evaluation]:
    """The task of a config whose layout is legal, and its own layout evaluated."""
    task = task_of(facts, shape, cluster)
    return task, evaluate(task, layout_of(facts))
