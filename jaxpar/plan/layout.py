"""How a step is spread over devices: what the memory, time and communication formulas read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxpar.config.schema import TrainConfig
from jaxpar.plan.context import resolved_context_mode
from jaxpar.plan.facts import Facts
from jaxpar.schedule.counts import layer_counts

Precision = Literal["float32", "bfloat16", "float8", "float8_row", "mxfloat8", "float4"]
"""Type of the matrix products; the float8 and float4 recipes differ in how values are scaled."""
Remat = Literal["none", "dots", "selective", "offload", "full"]
Strategy = Literal["none", "optimizer", "grads", "full"]
"""What of the training state is sharded over ``weight_shards``: nothing, or as in ZeRO-1, -2 and -3."""


RECOMPUTE = {"none": 0.0, "dots": 0.2, "full": 1.0}
"""Share of a block's forward pass that its backward pass repeats. dots repeats elementwise work."""

SAVED_WORK = {
    "query": 0.13,
    "key": 0.03,
    "value": 0.03,
    "attention": 0.18,
    "attention_out": 0.13,
    "gate": 0.25,
    "up": 0.25,
}
"""Share of full recomputation that keeping an activation saves (``train.remat_save``), in a block of Llama's
proportions with rows of some thousand tokens."""

DEFAULT_SAVE = TrainConfig().remat_save
"""Half of the work of full."""


def recompute_share(remat: Remat, save: Sequence[str] = DEFAULT_SAVE) -> float:
    """Share of a block's forward pass that its backward pass repeats; ``save`` counts for selective and offload."""
    if remat in ("selective", "offload"):
        return max(0.0, RECOMPUTE["full"] - sum(SAVED_WORK[name] for name in set(save)))
    return RECOMPUTE[remat]


STAGE_RECOMPUTE = 1.0 + RECOMPUTE["dots"]
"""The same in a pipeline: a stage keeps only its input, so that its memory does not grow with the number of
microbatches, and redoes its forward pass before going back. What this keeps spares all products of a third time."""

STAGE_GATHERS = 3
"""Gathers of a block's weights per microbatch in a pipeline: forward, forward again, backward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A training step on a mesh. Device order, inner to outer: tensor, context, expert, fsdp, data, pipeline.

    The expert axis is a part of the batch axes: outside the experts it is one more way to split rows and dense weights.
    """

    rows: int
    """Rows of one microbatch on one device."""
    seq_len: int
    microbatches: int
    batch_shards: int
    """Devices that hold rows of their own: data x fsdp x expert."""
    weight_shards: int
    """Devices that one copy of the dense training state is spread over: fsdp x expert x context."""
    strategy: Strategy
    tensor: int = 1
    context: int = 1
    context_mode: Literal["ring", "allgather"] = "ring"
    expert: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Chunks of layers per stage (interleaved schedule)."""
    places: int = 0
    """Layers of the largest stage, for which the others wait; 0: all stages have the same number."""
    schedule: str = "1f1b"
    remat: Remat = "full"
    recompute: float = 1.0
    """Share of a block's forward pass that its backward pass repeats; see :func:`recompute_share`."""
    weight_gathers: int = 2
    """Gathers of a block's weights per microbatch, where the strategy shards them."""
    remat_save: tuple[str, ...] = DEFAULT_SAVE
    """Activations that selective and offload keep."""
    precision: Precision = "bfloat16"
    sequence_parallel: bool = True
    """Between blocks the tensor axis splits the sequence."""
    async_tensor: bool = False
    """Tensor collectives overlap with the matrix products next to them."""
    attention: Literal["native", "portable"] = "native"
    """Kernel written for the GPU's generation (cuDNN, tokamax), or one that runs on any (FlashAttention-2)."""
    is_head_spread: bool = True
    """The vocabulary is spread over pipeline x tensor; else the last stage computes the head alone."""
    is_packed: bool = False
    """Rows hold several documents, whose attention is tokamax's."""
    receive_factor: float = 0.0
    """``mesh.expert_receive_factor``: room for exchanged rows over an even load; 0: for the worst case."""
    overlaps_step_transfers: bool = False
    """In a pipeline, weights that are gathered once per step travel beside the first microbatch, and their gradients
    beside the last; else before the first tick and after the last, beside nothing."""
    experts_over_tensor: bool = True
    """The tensor axis splits each expert's width; else it splits the tokens of the experts."""

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return self.batch_shards * self.context * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Copies of the training state, whose gradients are all-reduced."""
        return self.batch_shards * self.context // self.weight_shards

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one device; between blocks the tensor axis splits them further."""
        return self.rows * self.seq_len / self.context

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation or a gathered weight, in the compute type; float8 recipes send bfloat16."""
        return 4 if self.precision == "float32" else 2

    @property
    def vocab_shards(self) -> int:
        """Devices that the vocabulary is spread over."""
        return self.tensor * (self.pipeline if self.is_head_spread else 1)

    @property
    def global_batch_size(self) -> int:
        """Rows of one step."""
        return self.rows * self.microbatches * self.batch_shards

    @property
    def bubble_fraction(self) -> float:
        """Idle share of a stage, idle/total: (p - 1) / (v m + p - 1). Source: arXiv 2104.04473, section 2.2."""
        idle = self.pipeline - 1
        return idle / (self.chunks * self.microbatches + idle)

    def stage_layers(self, num_layers: int) -> float:
        """Layers that a stage has to run."""
        return self.places or num_layers / self.pipeline

    @property
    def mesh(self) -> dict[str, int]:
        """Devices per axis, outermost first."""
        fsdp = self.weight_shards // (self.expert * self.context)
        return {
            "pipeline": self.pipeline,
            "data": self.batch_shards // (fsdp * self.expert),
            "fsdp": fsdp,
            "expert": self.expert,
            "context": self.context,
            "tensor": self.tensor,
        }


def strategy_overrides(layout: Layout) -> list[str]:
    """Config overrides that give a layout its strategy."""
    if layout.strategy in ("optimizer", "grads"):
        return [f"mesh.fsdp_strategy={layout.strategy}"]
    # Stages would otherwise gather once per step where that fits.
    return ["pipeline.gather=per_microbatch"] if layout.strategy == "full" and layout.pipeline > 1 else []


def mesh_layout(
    mesh: Mapping[str, int],
    *,
    global_batch_size: int,
    seq_len: int,
    microbatches: int = 1,
    remat: Remat = "full",
    strategy: Strategy = "full",
    schedule: str = "1f1b",
    chunks: int = 1,
    places: int = 0,
    precision: Precision = "bfloat16",
    remat_save: tuple[str, ...] = DEFAULT_SAVE,
    context_mode: str = "auto",
    receive_factor: float = 0.0,
    is_packed: bool = False,
) -> Layout:
    """The layout of a mesh; the batch divides by it."""
    is_staged = mesh["pipeline"] > 1
    batch_shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    weight_shards = mesh["fsdp"] * mesh["expert"] * mesh["context"]
    return Layout(
        rows=global_batch_size // microbatches // batch_shards,
        seq_len=seq_len,
        microbatches=microbatches,
        batch_shards=batch_shards,
        weight_shards=weight_shards,
        strategy=strategy if weight_shards > 1 else "none",
        tensor=mesh["tensor"],
        context=mesh["context"],
        context_mode=resolved_context_mode(context_mode, seq_len / mesh["context"]) if mesh["context"] > 1 else "ring",
        expert=mesh["expert"],
        pipeline=mesh["pipeline"],
        chunks=chunks,
        places=places,
        schedule=schedule,
        remat=remat,
        recompute=STAGE_RECOMPUTE if is_staged else recompute_share(remat, remat_save),
        weight_gathers=STAGE_GATHERS if is_staged else Layout.weight_gathers,
        precision=precision,
        remat_save=remat_save,
        receive_factor=receive_factor,
        is_packed=is_packed,
    )


def layout_of(facts: Facts) -> Layout:
    """The layout of a config whose mesh is resolved and legal."""
    config = facts.config
    return mesh_layout(
        facts.mesh,
        global_batch_size=config.train.global_batch_size,
        seq_len=config.data.seq_len,
        microbatches=config.train.microbatches,
        remat=config.train.remat,
        strategy=config.mesh.fsdp_strategy,
        schedule=config.pipeline.schedule,
        chunks=config.pipeline.chunks,
        places=_places(facts),
        precision=config.precision.compute,
        remat_save=config.train.remat_save,
        context_mode=config.mesh.context_mode,
        receive_factor=config.mesh.expert_receive_factor,
        is_packed=config.data.pack,
    )


def balanced_places(num_layers: int, num_stages: int, num_chunks: int) -> int:
    """``places`` of layers that are shared out as evenly as they can be; 0 where all stages have the same number."""
    per_chunk, rest = divmod(num_layers, num_stages * num_chunks)
    return (per_chunk + 1) * num_chunks if rest else 0


def _places(facts: Facts) -> int:
    """Layers of the largest stage, where they are shared out unevenly."""
    pipeline, num_stages = facts.config.pipeline, facts.mesh["pipeline"]
    if pipeline.layers_per_stage == "even" or num_stages == 1:
        return 0
    counts = layer_counts(
        facts.model.num_layers,
        num_stages=num_stages,
        num_chunks=pipeline.chunks,
        layers_per_stage=pipeline.layers_per_stage,
    )
    return max(counts) * pipeline.chunks
