"""What exists besides parameters and optimizer state at the three moments when a training step's memory can peak.

Each array was found in the buffers that the CUDA compiler (JAX 0.12) assigns to the step of dense models; none is a
margin. Sizes are of one device. E embed, F MLP, Q query and K key width, T tokens of a microbatch.
"""

from __future__ import annotations

import dataclasses

from jaxpar.plan.context import SCORE_BYTES
from jaxpar.plan.layout import Layout
from jaxpar.plan.shape import ModelShape

REDUCE_BYTES = 4
"""Gradients are reduce-scattered in float32 unless ``precision.reduce`` says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """Bytes of gradients in the form in which the optimizer, or the next microbatch, gets them."""

    summed: float = 0.0
    """What the microbatches so far have added up to; 0 if there is only one."""
    blocks: float = 0.0
    """Of one microbatch, of the blocks."""
    tables: float = 0.0
    """Of one microbatch, of the embedding and the head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes of one device that exist at one time; fields as in ``Memory``."""

    name: str
    grads: float
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.grads + self.activations + self.logits + self.gathered


def block_moment(shape: ModelShape, layout: Layout, grads: Gradients, kept: float) -> Moment:
    """The backward pass of a block: of its MLP, of its largest matrix, or of attention over a split sequence.

    The MLP has four arrays of its width (gate, up, and their gradients or product). The block has five of the
    embedding's: two normalised inputs and the gradient of one, which the tensor axis does not split, and the residual
    stream and its gradient. All weights but one of the largest are gathered. A gradient is there twice, as it was
    computed and in the type in which it is reduced.

    Args:
        shape: the model.
        layout: how the step is spread.
        grads: what gradients take.
        kept: bytes of activations that wait for the backward pass.
    """
    value, tokens, tensor = layout.value_bytes, layout.tokens, layout.tensor
    embed, mlp, attention = shape.embed_dim, mlp_values(shape), shape.heads_width + shape.kv_width
    # The router's copies of each token, one per chosen expert.
    routed = 1.5 * shape.top_k * embed * min(1, shape.moe_layers)
    whole, largest = block_params(shape, layout), _largest_matrix(shape, layout)
    # Pipelined reduce-scatters leave the gradients of the block before whole until this one is under way.
    before = REDUCE_BYTES * whole if _has_pipelined_scatters(layout) else 0.0
    at_mlp = value * tokens * ((4 * mlp + 2 * attention + 2 * embed + routed) / tensor + 3 * embed) + before
    at_gradient = value * (tokens * ((3 * mlp + attention) / tensor + 3 * embed) + 2 * largest - whole)
    if value != REDUCE_BYTES:
        at_gradient += REDUCE_BYTES * largest
    return Moment(
        name="a block's backward pass",
        grads=grads.summed + grads.blocks,
        activations=kept + max(at_mlp, at_gradient, _at_split_attention(shape, layout)),
        gathered=_laid_out_anew(shape, layout) + _head_gradient(shape, layout) + value * (whole - largest),
    )


def _at_split_attention(shape: ModelShape, layout: Layout) -> float:
    """The backward pass of attention over a split sequence, during which the block's other gradients wait.

    Of a part of the queries: two arrays of scores in float32, three in the compute type. Of all queries: three in
    float32 and six in the compute type; of all keys and values four and two; three of the embedding's width.
    """
    if layout.context == 1:
        return 0.0
    value, tokens, tensor = layout.value_bytes, layout.tokens, layout.tensor
    scores = min(SCORE_BYTES, 4 * tokens**2 / layout.rows * shape.num_heads / tensor)
    queries, keys = (12 + 6 * value) * shape.heads_width, 2 * (16 + 2 * value) * shape.kv_width
    whole = block_params(shape, layout)
    waiting = whole if _has_pipelined_scatters(layout) else whole - shape.attention_params / tensor
    arrays = tokens * ((queries + keys) / tensor + 3 * value * shape.embed_dim)
    return arrays + (2 + 3 * value / 4) * scores + REDUCE_BYTES * waiting


def head_moment(shape: ModelShape, layout: Layout, grads: Gradients, kept: float, chunk: float) -> Moment:
    """The last chunk of the head.

    Args:
        shape: the model.
        layout: how the step is spread.
        grads: what gradients take.
        kept: bytes of activations that wait for the backward pass.
        chunk: tokens whose logits exist at one time.
    """
    value, vocab = layout.value_bytes, shape.padded_vocab_size / layout.vocab_shards
    # Hidden states in chunks, their gradient, and the hidden states as the tensor axis splits them.
    hidden = value * layout.tokens * shape.embed_dim * (2 + 1 / layout.tensor)
    if _has_pipelined_scatters(layout):
        # The last block's backward pass is taken out of the loop, and its attention is computed again early.
        attention = 2 * (shape.heads_width + shape.kv_width) / layout.tensor
        hidden += value * layout.tokens * (3 * shape.embed_dim + attention)
    logits, gradient = (4 + value) * chunk * vocab, _head_gradient(shape, layout)
    if chunk >= layout.tokens:
        # The gradient of a head in one chunk is formed when the float32 logits are gone; those of several add up.
        logits, gradient = max((logits, 0.0), (value * chunk * vocab, gradient), key=sum)
    return Moment(
        name="the head",
        grads=grads.summed,
        activations=kept + hidden,
        logits=logits,
        gathered=_laid_out_anew(shape, layout) + gradient + value * vocab * shape.embed_dim,
    )


def last_moment(shape: ModelShape, layout: Layout, grads: Gradients) -> Moment:
    """The end of the backward pass: every gradient is there, and no activation any more."""
    is_scattered = layout.strategy in ("full", "grads")
    return Moment(
        name="the end of the backward pass",
        grads=grads.summed + grads.blocks + grads.tables,
        gathered=_head_gradient(shape, layout) if is_scattered else 0.0,
    )


def mlp_values(shape: ModelShape) -> float:
    """Hidden MLP values per token and block, averaged over dense blocks and blocks with experts."""
    moe = shape.moe_layers / shape.num_layers
    chosen = shape.expert_mlp_dim * (shape.top_k + shape.num_shared_experts)
    return (1 - moe) * shape.mlp_dim + moe * chosen


def block_params(shape: ModelShape, layout: Layout) -> float:
    """Matrix elements of the largest block on one device, gathered over the data axes."""
    mlp = shape.mlp_matrices * shape.embed_dim * shape.mlp_dim if shape.dense_layers else 0
    experts = 0.0
    if shape.num_experts:
        experts = (shape.num_experts / layout.expert + shape.num_shared_experts) * shape.expert_params
    return (shape.attention_params + max(mlp, experts)) / layout.tensor


def _largest_matrix(shape: ModelShape, layout: Layout) -> float:
    """Elements of the largest matrix of that block."""
    mlp = shape.mlp_dim if shape.dense_layers else 0
    experts = shape.num_experts / layout.expert * shape.expert_mlp_dim
    return shape.embed_dim * max(mlp, experts, shape.heads_width) / layout.tensor


def _has_pipelined_scatters(layout: Layout) -> bool:
    """Whether the compiler's own options hold, see ``jaxpar.plan.compiler_options``: hybrid sharding."""
    return layout.replicas > 1 and layout.weight_shards > 1


def _head_gradient(shape: ModelShape, layout: Layout) -> float:
    """The whole head's: the compiler hides its reduce-scatter behind the end of the backward pass."""
    per_param = layout.value_bytes if layout.strategy == "optimizer" else REDUCE_BYTES
    return per_param * shape.padded_vocab_size * shape.embed_dim / layout.vocab_shards


def _laid_out_anew(shape: ModelShape, layout: Layout) -> float:
    """Shards of the matrices whose last dim is the embedding, float32, turned round once per step: gathers join the
    first dim.
    """
    if layout.strategy != "full":
        return 0.0
    widths = shape.num_layers * shape.heads_width + shape.dense_layers * shape.mlp_dim
    return 4 * shape.embed_dim * widths / (layout.tensor * layout.pipeline * layout.weight_shards)
