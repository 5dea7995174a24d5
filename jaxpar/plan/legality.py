"""Whether a layout is legal, as one cheap question: for thousands of meshes, and for models that no config can say.

The rules are those of :data:`jaxpar.plan.rules.LAYOUT_RULES`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpar.plan.context import sequence_shards
from jaxpar.plan.shape import ModelShape
from jaxpar.schedule.kinds import CHUNKED_KINDS


def mesh_objection(shape: ModelShape, mesh: Mapping[str, int], seq_len: int) -> str | None:
    """Why this mesh cannot hold this model, or None. The batch and the schedule are asked separately."""
    tensor, context, expert = mesh["tensor"], mesh["context"], mesh["expert"]
    embed_shards, vocab_shards = mesh["fsdp"] * expert * context, mesh["pipeline"] * tensor
    split = sequence_shards(tensor=tensor, context=context)
    divisions = (
        (shape.num_kv_heads, tensor, f"{shape.num_kv_heads} kv heads do not divide by tensor {tensor}"),
        (shape.num_heads, tensor, f"{shape.num_heads} heads do not divide by tensor {tensor}"),
        (
            shape.padded_vocab_size,
            vocab_shards,
            f"the vocabulary, padded to {shape.padded_vocab_size}, does not divide by pipeline x tensor = "
            f"{vocab_shards}",
        ),
        (
            shape.embed_dim,
            embed_shards,
            f"embed_dim {shape.embed_dim} does not divide by fsdp x expert x context = {embed_shards}",
        ),
        (seq_len, split, f"{seq_len} tokens do not divide into {split} parts (tensor {tensor}, context {context})"),
    )
    for size, shards, objection in divisions:
        if size % shards:
            return objection
    if shape.num_layers < mesh["pipeline"]:
        return f"{shape.num_layers} layers are fewer than {mesh['pipeline']} stages"
    if shape.dense_layers and shape.mlp_dim % tensor:
        return f"mlp_dim {shape.mlp_dim} does not divide by tensor {tensor}"
    if not shape.num_experts:
        return f"expert {expert} shards nothing: the model has no experts" if expert > 1 else None
    if shape.num_experts % expert:
        return f"{shape.num_experts} experts do not divide by expert {expert}"
    if shape.expert_mlp_dim % tensor:
        return f"expert_mlp_dim {shape.expert_mlp_dim} does not divide by tensor {tensor}"
    return None


def batch_objection(mesh: Mapping[str, int], global_batch_size: int, microbatches: int) -> str | None:
    """Why the batch does not divide, or None."""
    shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    if global_batch_size % (shards * microbatches):
        return (
            f"{global_batch_size} rows do not divide by {shards} batch shards x {microbatches} microbatches "
            f"= {shards * microbatches}"
        )
    return None


def schedule_objection(
    shape: ModelShape, mesh: Mapping[str, int], schedule: str, chunks: int, microbatches: int, places: int = 0
) -> str | None:
    """Why the pipeline schedule cannot run, or None; with ``places`` stages need not have the same number of layers."""
    stages = mesh["pipeline"]
    has_chunks = schedule in CHUNKED_KINDS and stages > 1
    if has_chunks != (chunks > 1):
        return f"the schedules {' and '.join(CHUNKED_KINDS)}, and only they, have 2 chunks or more per stage"
    if shape.num_layers < stages * chunks:
        return f"{shape.num_layers} layers are fewer than {stages} stages x {chunks} chunks"
    if shape.num_layers % (stages * chunks) and not places:
        return f"{shape.num_layers} layers do not divide by {stages} stages x {chunks} chunks"
    if microbatches < stages and schedule != "gpipe":
        return f"{microbatches} microbatches do not fill {stages} stages"
    return None
