"""Peak memory of published runs: the same accounting, with what each framework is known to keep.

State, activations in flight, working set, logits and gathered weights, on the first and on the last stage; the larger
counts. Activations without recomputation follow arXiv 2205.05198, section 4, with fused attention (no scores) and a
gated MLP; the tensor axis splits what it splits there.
"""

from __future__ import annotations

import dataclasses

from jaxpar.plan.memory import GIB
from jaxpar.plan.published import PublishedLayout
from jaxpar.plan.shape import ModelShape

FIXED_GIB = 2.5
"""CUDA context, NCCL and what the allocator cannot use, outside what a framework counts as allocated."""

UNCERTAIN = 0.1
"""Within this share of the limit a run is not called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedMemory:
    """GiB on the fullest device, as the framework counts them."""

    state: float
    """Parameters, gradients and optimizer: allocated all the time."""
    activations: float
    working: float
    """Intermediates of the block that is being computed."""
    logits: float
    gathered: float

    @property
    def total(self) -> float:
        """The peak."""
        return self.state + self.activations + self.working + self.logits + self.gathered


def published_memory(run: PublishedLayout) -> PublishedMemory:
    """Peak of a published run."""
    stages = [_stage(run, is_first=True)]
    if run.layout.pipeline > 1:
        stages.append(_stage(run, is_first=False))
    return max(stages, key=lambda stage: stage.total)


def state_gib(run: PublishedLayout) -> float:
    """Parameters, gradients and optimizer state of the first or last stage, which a framework holds all the time."""
    return _local_params(run) * _state_bytes(run) / GIB


def call_fit(run: PublishedLayout) -> bool | None:
    """Whether a run fits; None where it is too near the limit to tell."""
    used = published_memory(run).total * run.framework.allocator + FIXED_GIB
    limit = run.cluster.gpu.memory_bytes / GIB
    if abs(used / limit - 1) < UNCERTAIN:
        return None
    return used <= limit


def _local_params(run: PublishedLayout) -> float:
    """Parameters of a stage at either end, its embedding or head included; experts lie over the expert axis."""
    shape, layout = run.shape, run.layout
    split = layout.tensor * layout.pipeline
    blocks = shape.block_params / split + shape.routed_params / (split * layout.expert)
    tables = shape.vocab_size * shape.embed_dim if layout.pipeline > 1 else shape.embedding_params
    return blocks + tables / layout.tensor


def _state_bytes(run: PublishedLayout) -> float:
    """Bytes per parameter: compute copy, gradients, float32 master weights and moments."""
    layout, framework = run.layout, run.framework
    shards = layout.weight_shards
    if layout.strategy in ("full", "grads"):
        held = framework.sharded_state_bytes / shards
        # Under a pipeline parameters stay gathered and gradients unsharded between microbatches.
        kept = 2 + framework.grad_bytes if layout.pipeline > 1 else 0
        accumulated = framework.grad_bytes if framework.keeps_whole_grads and layout.microbatches > 1 else 0
        return held + max(kept, accumulated)
    if shards == 1:
        return framework.replicated_state_bytes
    return 2 + framework.grad_bytes + 12 / shards


def _stage(run: PublishedLayout, *, is_first: bool) -> PublishedMemory:
    shape, layout, framework = run.shape, run.layout, run.framework
    blocks, m = shape.num_layers / layout.pipeline, layout.microbatches
    in_flight = 1.0
    if layout.pipeline > 1 and is_first:
        stages, chunks = layout.pipeline, layout.chunks
        in_flight = min(m, stages) if chunks == 1 else min(m * chunks, stages * chunks + stages - 1) / chunks
    kept = _kept_per_token(run, layout.remat)
    everything = _kept_per_token(run, "none") + (4 * shape.embed_dim if layout.tensor > 1 else 0)
    working = layout.tokens * everything * (1.5 if layout.remat != "none" else 0.5)
    logit_shards = 1 if framework.replicates_logits else layout.tensor
    has_head = layout.pipeline == 1 or not is_first
    # Replicated logits are gathered from the tensor shards: one more float32 copy.
    per_logit = framework.logit_bytes + (4 if framework.replicates_logits and layout.tensor > 1 else 0)
    logits = layout.tokens * shape.vocab_size / logit_shards * per_logit if has_head else 0.0
    gathered = 0.0
    if layout.strategy in ("full", "grads") and layout.pipeline == 1:
        gathered = 2 * 2 * _matrices_per_block(shape) / layout.tensor
        gathered += 2 * shape.embedding_params / layout.tensor / (1 if shape.tie_embeddings else 2)
    return PublishedMemory(
        state=state_gib(run),
        activations=layout.tokens * kept * blocks * in_flight / GIB,
        working=working / GIB,
        logits=logits / GIB,
        gathered=gathered / GIB,
    )


def _matrices_per_block(shape: ModelShape) -> float:
    return (shape.block_params + shape.routed_params) / shape.num_layers


def _kept_per_token(run: PublishedLayout, remat: str) -> float:
    """Bytes per token that one block keeps, on one device, in bfloat16."""
    shape, tensor = run.shape, run.layout.tensor
    embed = shape.embed_dim / (tensor if run.layout.sequence_parallel else 1)
    heads, keys = shape.heads_width / tensor, shape.kv_width / tensor
    mlp = shape.mlp_dim / tensor
    if shape.num_experts:
        mlp = shape.expert_mlp_dim * (shape.top_k + shape.num_shared_experts) / tensor
    if remat == "full":
        return 2 * embed
    if remat in ("selective", "dots"):
        return 2 * (2 * embed + 2 * heads + keys + mlp)
    # Norms that are not one kernel keep float32 copies of what they normalise.
    norms = 2 if run.has_fused_norms else 6
    wide = 4 if shape.gated_mlp else 2
    return 2 * ((2 + norms) * embed + 2.03 * heads + 2 * keys + wide * mlp)
