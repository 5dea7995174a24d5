"""One layout evaluated: memory, time, throughput. The unit that plans, remedies and the search are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.efficiency import CONSTANTS, Constants
from jaxpar.plan.facts import Facts
from jaxpar.plan.layout import Layout, Precision, Strategy, layout_of, mesh_layout
from jaxpar.plan.memory import FLOAT32_STATE, GIB, Memory, StateBytes, training_memory
from jaxpar.plan.optimizer_memory import state_bytes
from jaxpar.plan.shape import ModelShape, shape_of
from jaxpar.plan.time import StepTime, step_time, tokens_per_s_per_device, utilisation
from jaxpar.plan.topology import Cluster, make_cluster

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
    receive_factor: float = 0.0
    """``mesh.expert_receive_factor`` of layouts that are tried."""
    is_packed: bool = False
    constants: Constants = CONSTANTS

    def layout(self, mesh: Mapping[str, int], **settings: object) -> Layout:
        """A way to do it on a mesh that the batch divides by; ``settings`` as in ``mesh_layout``."""
        return mesh_layout(
            mesh,
            global_batch_size=self.global_batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
            is_packed=self.is_packed,
            **{"receive_factor": self.receive_factor, **settings},
        )


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


def trains_today(shape: ModelShape, layout: Layout) -> bool:
    """Whether the trainer can run such a layout already: see ``jaxpar.plan.support_rules``."""
    has_whole_weights = layout.strategy in ("optimizer", "grads")
    is_refused = shape.first_dense_layers or (has_whole_weights and (layout.expert > 1 or layout.context > 1))
    return layout.pipeline == 1 or not is_refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherChoice:
    """How often the stages of a pipeline gather their weights."""

    strategy: Strategy
    """Of the layout, with once per step as what it is: ``optimizer``."""
    reason: str | None
    """For the log: what was chosen, and why. None without stages, or with nothing to gather."""


def choose_gather(gather: str, layout: Layout, task: Task | None) -> GatherChoice:
    """What ``pipeline.gather`` means for a layout.

    Args:
        gather: ``auto``, ``per_microbatch`` or ``per_step``.
        layout: With the strategy of its config.
        task: What says whether it fits; None if the GPU is not known.
    """
    if layout.pipeline == 1 or layout.strategy == "none":
        return GatherChoice(strategy=layout.strategy, reason=None)
    if layout.strategy != "full":
        reason = f"stages gather weights once per step (mesh.fsdp_strategy = {layout.strategy})"
        return GatherChoice(strategy=layout.strategy, reason=reason)
    because = "pipeline.gather"
    if gather == "auto":
        gather, because = _gather_that_fits(layout, task)
    strategy, often = ("optimizer", "step") if gather == "per_step" else ("full", "microbatch")
    return GatherChoice(strategy=strategy, reason=f"stages gather weights once per {often} ({because})")


def _gather_that_fits(layout: Layout, task: Task | None) -> tuple[str, str]:
    """What ``auto`` is, and why."""
    if layout.context > 1 or layout.expert > 1:
        return "per_microbatch", "auto: once per step goes with neither a context nor an expert axis"
    if task is None:
        return "per_microbatch", "auto: the memory of these devices is not known"
    memory = memory_of(task, dataclasses.replace(layout, strategy="optimizer"))
    taken = f"{memory.total_bytes / GIB:.1f} of {memory.device_bytes / GIB:.1f} GiB"
    if memory.free_bytes >= SAFE_MARGIN * memory.device_bytes:
        return "per_step", f"auto: {taken} in all"
    return "per_microbatch", f"auto: once per step would take {taken}, and {SAFE_MARGIN:.0%} are to stay free"


def gather_on(facts: Facts, device_kind: str) -> GatherChoice:
    """``choose_gather`` of a legal config on devices that run, ``jax.Device.device_kind``."""
    layout, gpu = layout_of(facts), find_gpu(device_kind)
    cluster = gpu and make_cluster(gpu, num_devices=layout.num_devices)
    task = cluster and task_of(facts, shape_of(facts.model), cluster)
    return choose_gather(facts.config.pipeline.gather, layout, task)


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
        receive_factor=config.mesh.expert_receive_factor,
        is_packed=config.data.pack,
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
    task, layout = task_of(facts, shape, cluster), layout_of(facts)
    strategy = choose_gather(facts.config.pipeline.gather, layout, task).strategy
    return task, evaluate(task, dataclasses.replace(layout, strategy=strategy))
