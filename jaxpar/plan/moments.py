"""What exists besides parameters and optimizer state at the three moments when a training step's memory can peak.

Each array was found in the buffers that the CUDA compiler (JAX 0.12) assigns to steps, dense or with experts; none is a
margin. Sizes are of one device. E embed, F MLP, Q query and K key width, T tokens of a microbatch.
"""

from __future__ import annotations

import dataclasses

from jaxpar.plan.communication import GRADIENT_BYTES
from jaxpar.plan.context import SCORE_BYTES
from jaxpar.plan.experts import receive_bound
from jaxpar.plan.layout import Layout
from jaxpar.plan.shape import ModelShape


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
    """The backward pass of a block: of its MLP or experts, its largest matrix, or its attention over a split sequence.

    Whatever is at work, queries, keys, values and the result of attention are there, and five arrays of the embedding's
    width: two normalised inputs and the gradient of one, which the tensor axis does not split, and the residual stream
    and its gradient. All weights but one of the largest are gathered.

    Args:
        shape: the model.
        layout: how the step is spread.
        grads: what gradients take.
        kept: bytes of activations that wait for the backward pass.
    """
    value = layout.value_bytes
    whole, largest = block_params(shape, layout), _largest_matrix(shape, layout)
    if shape.num_experts:
        working, gathered = _at_experts(shape, layout), whole
    else:
        working, gathered = max(_at_mlp(shape, layout), _at_largest(shape, layout)), whole - largest
    return Moment(
        name="a block's backward pass",
        grads=grads.summed + grads.blocks,
        activations=kept + max(working, _at_split_attention(shape, layout)),
        gathered=_laid_out_anew(shape, layout) + _head_gradient(shape, layout) + value * gathered,
    )


def _at_mlp(shape: ModelShape, layout: Layout) -> float:
    """Four arrays of the MLP's width: gate, up, and their gradients or product."""
    tokens, tensor, attention = layout.tokens, layout.tensor, shape.heads_width + shape.kv_width
    split = 4 * shape.mlp_dim + 2 * attention + 2 * shape.embed_dim
    return layout.value_bytes * tokens * (split / tensor + 3 * shape.embed_dim) + _before(shape, layout)


def _at_largest(shape: ModelShape, layout: Layout) -> float:
    """The gradient of the largest matrix, as it was computed and in the type in which it is reduced; fewer weights."""
    tokens, tensor, value = layout.tokens, layout.tensor, layout.value_bytes
    split = 3 * shape.mlp_dim + shape.heads_width + shape.kv_width
    largest, whole = _largest_matrix(shape, layout), block_params(shape, layout)
    converted = GRADIENT_BYTES * largest if value != GRADIENT_BYTES else 0.0
    return value * (tokens * (split / tensor + 3 * shape.embed_dim) + 2 * largest - whole) + converted


def _at_experts(shape: ModelShape, layout: Layout) -> float:
    """The backward pass of the experts' last product, or of their first two.

    Of the rows that a device makes room for: six arrays of the experts' width and two of the embedding's, or three and
    seven (some are transposed copies for the gradients of weights); two of each kind are buffers of the exchange.
    """
    tensor, attention = layout.tensor, shape.heads_width + shape.kv_width
    width = shape.expert_mlp_dim / tensor
    in_buffers = 2 if layout.expert > 1 else 0
    rows = received_rows(shape, layout) * (
        max(6 * width + 2 * shape.embed_dim, 3 * width + 7 * shape.embed_dim) - in_buffers * shape.embed_dim
    )
    shared = 4 * shape.num_shared_experts * width
    tokens = layout.tokens * (4 * shape.embed_dim + 2 * attention / tensor + shared)
    return layout.value_bytes * (rows + tokens) + _before(shape, layout)


def _before(shape: ModelShape, layout: Layout) -> float:
    """Pipelined reduce-scatters leave the gradients of the block before whole until this one is under way."""
    return GRADIENT_BYTES * block_params(shape, layout) if _has_pipelined_scatters(layout) else 0.0


def received_rows(shape: ModelShape, layout: Layout) -> float:
    """Rows that a device makes room for at its experts; each is one token's choice of one expert."""
    sizes = (shape.top_k, shape.num_experts, layout.expert, layout.receive_factor)
    return receive_bound(layout.tokens, *sizes) if shape.num_experts else 0.0


def _at_split_attention(shape: ModelShape, layout: Layout) -> float:
    """The backward pass of attention over a split sequence, during which the block's other gradients wait.

    Of a part of the queries: two arrays of scores in float32, three in the compute type. Of all queries: three in
    float32 and six in the compute type; of all keys and values four and two; three of the embedding's width.
    Gathered keys and values have a fused kernel in bfloat16, which needs none of this.
    """
    if layout.context == 1 or (layout.context_mode == "allgather" and layout.precision == "bfloat16"):
        return 0.0
    value, tokens, tensor = layout.value_bytes, layout.tokens, layout.tensor
    scores = min(SCORE_BYTES, 4 * tokens**2 / layout.rows * shape.num_heads / tensor)
    queries, keys = (12 + 6 * value) * shape.heads_width, 2 * (16 + 2 * value) * shape.kv_width
    whole = block_params(shape, layout)
    waiting = whole if _has_pipelined_scatters(layout) else whole - shape.attention_params / tensor
    arrays = tokens * ((queries + keys) / tensor + 3 * value * shape.embed_dim)
    return arrays + (2 + 3 * value / 4) * scores + GRADIENT_BYTES * waiting


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
    # Lower ZeRO stages have it among all their whole weights.
    table = value * vocab * shape.embed_dim if layout.strategy in ("full", "none") else 0.0
    if chunk >= layout.tokens:
        # The gradient of a head in one chunk is formed when the float32 logits are gone; those of several add up.
        logits, gradient = max((logits, 0.0), (value * chunk * vocab, gradient), key=sum)
    return Moment(
        name="the head",
        grads=grads.summed,
        activations=kept + hidden,
        logits=logits,
        gathered=_laid_out_anew(shape, layout) + gradient + table,
    )


def last_moment(shape: ModelShape, layout: Layout, grads: Gradients) -> Moment:
    """The end of the backward pass: every gradient is there, and no activation any more.

    The gradient of a whole embedding (lower ZeRO stages) is added up in float32 before it has its own type.
    """
    table = shape.padded_vocab_size * shape.embed_dim / layout.vocab_shards
    is_whole = layout.strategy in ("grads", "optimizer")
    waiting = _head_gradient(shape, layout) if layout.strategy in ("full", "grads") else 0.0
    return Moment(
        name="the end of the backward pass",
        grads=grads.summed + grads.blocks + grads.tables,
        gathered=waiting + (table * (GRADIENT_BYTES + layout.value_bytes) if is_whole else 0.0),
    )


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
    per_param = layout.value_bytes if layout.strategy == "optimizer" else GRADIENT_BYTES
    return per_param * shape.padded_vocab_size * shape.embed_dim / layout.vocab_shards


def _laid_out_anew(shape: ModelShape, layout: Layout) -> float:
    """Float32 shards that are turned round once per step, since a gather joins first dims.

    Those of matrices whose last dim is the embedding, and of several experts. A stage that runs other layers than it
    keeps (chunks, uneven stages) has a copy of all that it runs.
    """
    if layout.strategy != "full":
        return 0.0
    split = layout.tensor * layout.pipeline
    if layout.places or layout.chunks > 1:
        run = layout.stage_layers(shape.num_layers) / shape.num_layers
        return 4 * shape.block_params * run / (layout.tensor * layout.weight_shards)
    widths = shape.num_layers * shape.heads_width + shape.dense_layers * shape.mlp_dim
    total = 4 * shape.embed_dim * widths / (split * layout.weight_shards)
    expert_shards = layout.weight_shards / layout.expert
    if shape.num_experts and expert_shards > 1:
        turned = 1.0 if shape.num_experts > layout.expert else 1 / 3
        total += 4 * turned * shape.routed_params / (split * layout.weight_shards)
    return total
