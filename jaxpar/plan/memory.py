"""Peak memory of a training step on the fullest device, by component.

State: sharded as in the ZeRO paper (arXiv 1910.02054, section 5), with what its lower stages keep whole in the compute
type only: master parameters are sharded by every strategy. Activations: kept per block by remat policy, times
what the schedule holds in flight. On top comes the largest of three moments: one block's backward pass, the head's,
or the end of the backward pass. What exists at each was read from the buffers that the CUDA compiler assigns; its peak
is within 5% for dense models on 8 to 16,384 devices (``tests/h100``). Fused attention: no [S, S] scores exist.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxpar.plan.layout import Layout, Strategy
from jaxpar.plan.shape import ModelShape

GIB = 2**30

CHUNK_LOGITS_BYTES = 512 * 2**20
"""Float32 logits that exist at one time on a device when ``train.loss_chunk_tokens`` is 0."""

REDUCE_BYTES = 4
"""Gradients are reduce-scattered in float32 unless ``precision.reduce`` says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of the training state."""

    params: float = 4.0
    grads: float = 4.0
    optimizer: float = 8.0
    """Of the matrices of blocks: two moments; with master weights kept apart from ``params`` these too."""
    optimizer_tables: float | None = None
    """Of the embedding and the head; None: as of the matrices."""
    optimizer_vectors: float | None = None
    """Of norms, biases and learned positions; None: as of the matrices."""

    def of(self, part: Literal["tables", "vectors"]) -> StateBytes:
        """Bytes of a part whose optimizer state is another."""
        optimizer = self.optimizer_tables if part == "tables" else self.optimizer_vectors
        return self if optimizer is None else dataclasses.replace(self, optimizer=optimizer)


FLOAT32_STATE = StateBytes()
BFLOAT16_STATE = StateBytes(params=2.0, grads=2.0, optimizer=4.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device; all above ``device_bytes`` adds up to ``total_bytes``."""

    params: float
    """Master parameters."""
    grads: float
    """That exist at the peak, as the optimizer gets them: the sum over microbatches, and a microbatch's own."""
    optimizer: float
    activations: float
    """Kept for the backward pass, and one block's intermediates."""
    logits: float
    gathered: float
    """Weights gathered for use, those laid out anew for it, and gradients before they are scattered."""
    buffers: float
    """What collectives of the tensor, context, expert and pipeline axes send and receive."""
    reserve: float
    """What JAX leaves to the driver, NCCL and the CUDA context: 1 - runtime.memory_fraction of the device."""
    device_bytes: float
    """Memory of the device."""
    moment: str
    """When the peak is reached: "a block's backward pass", "the head" or "the end of the backward pass"."""
    whole_logits: float
    """Not part of the total: float32 logits of a microbatch if they were not computed in chunks."""

    @property
    def total_bytes(self) -> float:
        """All components."""
        state = self.params + self.grads + self.optimizer
        return state + self.activations + self.logits + self.gathered + self.buffers + self.reserve

    @property
    def free_bytes(self) -> float:
        """What is left; negative if it does not fit."""
        return self.device_bytes - self.total_bytes


def state_memory(
    params: float, shards: int, strategy: Strategy, per_param: StateBytes = FLOAT32_STATE
) -> tuple[float, float, float]:
    """(params, grads, optimizer) bytes of ``params`` parameters that are spread over ``shards`` devices.

    none: all replicated. optimizer (ZeRO-1), grads (ZeRO-2) and full (ZeRO-3) shard one more of the three each.
    Source: arXiv 1910.02054, section 5.
    """
    split = {
        "none": (1, 1, 1),
        "optimizer": (1, 1, shards),
        "grads": (1, shards, shards),
        "full": (shards, shards, shards),
    }[strategy]
    sizes = (per_param.params, per_param.grads, per_param.optimizer)
    return tuple(params * size / by for size, by in zip(sizes, split, strict=True))


def microbatches_in_flight(layout: Layout) -> float:
    """Stage inputs that the first stage holds, in microbatches of one chunk.

    gpipe: m. 1f1b in lock step: min(m, 2p - 1). Interleaved with v chunks: min(v m, (v + 1) p - 3), at least that of
    1f1b. (The asynchronous forms, min(m, p) and p v + p - 1 of arXiv 2104.04473, need fewer: a schedule that runs on
    all stages at once has its arrivals wait.)
    """
    stages, m, chunks = layout.pipeline, layout.microbatches, layout.chunks
    if stages == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return m
    lock_step = 2 * stages - 1
    if chunks == 1:
        return min(m, lock_step)
    return min(chunks * m, max(lock_step, (chunks + 1) * stages - 3))


def kept_per_token(shape: ModelShape, layout: Layout) -> float:
    """Bytes per token that one block keeps for its backward pass, on one device.

    In values of the compute type, with D embed, Q query width, K key width, F MLP width (all chosen experts'):
    full D; selective and offload D and what ``remat_save`` names, by default 2 D + 2 Q + 2 K; dots D + 2 Q + 2 K + 2 F;
    none 12 D + 2 Q + 2 K + 5 F. Attention that is kept is kept with its float32 log-sums.
    Routed experts' activations have no names. The D before and after a block is split by the tensor axis like
    everything else.
    """
    value = _value_bytes(layout)
    embed, heads, keys = shape.embed_dim, shape.heads_width, shape.kv_width
    mlp = _mlp_values(shape)
    # The router's copies of each token, one per chosen expert, in and out.
    routed = 2 * shape.top_k * embed * shape.moe_layers / shape.num_layers
    moe = shape.moe_layers / shape.num_layers
    named_mlp = (1 - moe) * shape.mlp_dim + moe * shape.num_shared_experts * shape.expert_mlp_dim
    named = {
        "query": heads,
        "key": keys,
        "value": keys,
        "attention": heads,
        "attention_out": embed,
        "gate": named_mlp if shape.mlp_matrices == 3 else 0,
        "up": named_mlp,
    }
    selective = embed + sum(named[name] for name in set(layout.remat_save))
    values = {
        "full": embed,
        "selective": selective,
        "offload": selective,
        "dots": embed + 2 * heads + 2 * keys + 2 * mlp + routed,
        "none": 12 * embed + 2 * heads + 2 * keys + 5 * mlp + routed,
    }[layout.remat]
    has_log_sums = layout.remat == "none" or (layout.remat == "selective" and "attention" in layout.remat_save)
    log_sums = 4 * shape.num_heads if has_log_sums else 0
    return (value * values + log_sums) / layout.tensor


def _mlp_values(shape: ModelShape) -> float:
    """Hidden MLP values per token and block, averaged over dense blocks and blocks with experts."""
    moe = shape.moe_layers / shape.num_layers
    chosen = shape.expert_mlp_dim * (shape.top_k + shape.num_shared_experts)
    return (1 - moe) * shape.mlp_dim + moe * chosen


def _block_params(shape: ModelShape, layout: Layout) -> float:
    """Matrix elements of the largest block on one device, gathered over the data axes."""
    mlp = shape.mlp_matrices * shape.embed_dim * shape.mlp_dim if shape.dense_layers else 0
    experts = 0.0
    if shape.num_experts:
        experts = (shape.num_experts / layout.expert + shape.num_shared_experts) * shape.expert_params
    return (shape.attention_params + max(mlp, experts)) / layout.tensor


def _buffers(shape: ModelShape, layout: Layout) -> float:
    """Send and receive buffers: the next stage's input, the ring's next block, the exchange, the gathered sequence."""
    value = _value_bytes(layout)
    tokens, tensor = layout.tokens, layout.tensor
    hidden = value * tokens * shape.embed_dim
    total = 2 * hidden / tensor if layout.pipeline > 1 else 0.0
    if layout.context > 1 and layout.context_mode == "ring":
        total += 2 * value * tokens * 2 * shape.kv_width / tensor
    elif layout.context > 1:
        # Gathered keys and values, and everyone's gradients of them in float32.
        total += (value + 4) * tokens * layout.context * 2 * shape.kv_width / tensor
    if layout.expert > 1:
        total += 2 * shape.top_k * hidden / tensor
    if tensor > 1:
        total += hidden
    return total


def _matrices(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """(dense, routed expert) matrix elements on one device before the data axes split them; vocabulary padded."""
    split = layout.tensor * layout.pipeline
    dense = (shape.block_params + _table_params(shape)) / split
    return dense, shape.routed_params / (split * layout.expert)


def _table_params(shape: ModelShape) -> int:
    """Embedding and head, vocabulary padded."""
    tables = 1 if shape.tie_embeddings else 2
    return shape.embedding_params + (shape.padded_vocab_size - shape.vocab_size) * shape.embed_dim * tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """Bytes of the training state on one device."""

    params: float = 0.0
    """Masters, which every strategy shards."""
    optimizer: float = 0.0
    summed: float = 0.0
    """Gradients that several microbatches have added up to."""
    block_grads: float = 0.0
    """Gradients of one microbatch, of the blocks."""
    table_grads: float = 0.0
    """Likewise of the embedding and the head."""


def _state(shape: ModelShape, layout: Layout, dense: float, experts: float, per_param: StateBytes) -> _State:
    tables = _table_params(shape) / (layout.tensor * layout.pipeline)
    shards = 1 if layout.strategy == "none" else layout.weight_shards
    parts = (
        # Each pipeline stage holds its own blocks' vectors; every other axis replicates them.
        (shape.vector_params / layout.pipeline, 1, per_param.of("vectors"), False),
        (dense - tables, shards, per_param, False),
        (experts, max(1, shards // layout.expert), per_param, False),
        (tables, shards, per_param.of("tables"), True),
    )
    has_sum = layout.microbatches > 1 or layout.pipeline > 1
    total = _State()
    for params, split, state, is_table in parts:
        # ZeRO-1 has a microbatch's gradients whole, in the compute type, and their sum too.
        is_whole = layout.strategy == "optimizer" and split > 1
        own = params * _value_bytes(layout) if is_whole else params * state.grads / split
        total = _State(
            params=total.params + params * state.params / split,
            optimizer=total.optimizer + params * state.optimizer / split,
            summed=total.summed + (params * state.grads / (1 if is_whole else split) if has_sum else 0.0),
            block_grads=total.block_grads + (0.0 if is_table else own),
            table_grads=total.table_grads + (own if is_table else 0.0),
        )
    return total


def _value_bytes(layout: Layout) -> int:
    return 4 if layout.precision == "float32" else 2


def _kept_activations(shape: ModelShape, layout: Layout) -> float:
    """Bytes that wait for the backward pass: of all blocks, or of one chunk and the inputs of those in flight."""
    blocks = layout.stage_layers(shape.num_layers)
    kept = layout.tokens * kept_per_token(shape, layout)
    if layout.remat == "offload":
        # On the host but for the block at work and the one on its way.
        blocks = min(blocks, 2)
    if layout.pipeline == 1:
        return blocks * kept
    value = _value_bytes(layout)
    stage_input = layout.tokens * shape.embed_dim * value / layout.tensor
    return microbatches_in_flight(layout) * stage_input + blocks / layout.chunks * kept


def chunk_tokens(shape: ModelShape, layout: Layout, loss_chunk_tokens: int) -> float:
    """Tokens whose logits exist at one time on a device."""
    shards = layout.tensor * (layout.pipeline if layout.is_head_spread else 1)
    default = max(1, CHUNK_LOGITS_BYTES * shards // (4 * shape.padded_vocab_size))
    return min(layout.tokens, loss_chunk_tokens or default)


def training_memory(
    shape: ModelShape,
    layout: Layout,
    *,
    device_bytes: float,
    state: StateBytes = FLOAT32_STATE,
    memory_fraction: float = 0.92,
    loss_chunk_tokens: int = 0,
) -> Memory:
    """Peak memory of a step.

    Args:
        shape: The model.
        layout: How the step is spread.
        device_bytes: Memory of the device.
        state: Bytes per parameter.
        memory_fraction: ``runtime.memory_fraction``.
        loss_chunk_tokens: ``train.loss_chunk_tokens``.
    """
    dense, experts = _matrices(shape, layout)
    held = _state(shape, layout, dense, experts, state)
    chunk = chunk_tokens(shape, layout, loss_chunk_tokens)
    moments = {
        "a block's backward pass": _at_block(shape, layout, held),
        "the head": _at_head(shape, layout, held, chunk),
        "the end of the backward pass": _at_end(shape, layout, held),
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    whole_copy = (dense + experts) * _value_bytes(layout) if layout.strategy in ("optimizer", "grads") else 0.0
    peak = moments[moment]
    return Memory(
        params=held.params,
        grads=peak["grads"],
        optimizer=held.optimizer,
        activations=peak.get("activations", 0.0),
        logits=peak.get("logits", 0.0),
        gathered=whole_copy + peak["gathered"],
        buffers=_buffers(shape, layout),
        reserve=(1 - memory_fraction) * device_bytes,
        device_bytes=device_bytes,
        moment=moment,
        whole_logits=4 * layout.tokens * shape.padded_vocab_size / _vocab_shards(layout),
    )


def _at_block(shape: ModelShape, layout: Layout, held: _State) -> dict[str, float]:
    """The backward pass of a block: its MLP's, or the gradient of its largest matrix on the way to its shard.

    The MLP has four arrays of its width (gate, up and their gradients, or product), the block five of the embedding's
    (two normalised inputs, the gradient of one of them, the residual stream and its gradient), of which the tensor axis
    splits the last two. All weights but one of the largest are gathered.
    """
    value, tokens, tensor = _value_bytes(layout), layout.tokens, layout.tensor
    mlp, embed = _mlp_values(shape), shape.embed_dim
    routed = 1.5 * shape.top_k * embed * min(1, shape.moe_layers)
    attention = shape.heads_width + shape.kv_width
    whole, largest = _block_params(shape, layout), _largest_matrix(shape, layout)
    at_mlp = tokens * ((4 * mlp + 2 * attention + 2 * embed + routed) / tensor + 3 * embed) + whole - largest
    at_gradient = tokens * ((3 * mlp + attention) / tensor + 3 * embed) + largest
    converted = REDUCE_BYTES * largest if value != REDUCE_BYTES else 0.0
    working = max(value * at_mlp, value * at_gradient + converted)
    weights = value * (whole - largest)
    return {
        "grads": held.summed + held.block_grads,
        "activations": _kept_activations(shape, layout) + working - weights,
        "gathered": _laid_out_anew(shape, layout, held) + _waiting_head_gradient(shape, layout) + weights,
    }


def _at_head(shape: ModelShape, layout: Layout, held: _State, chunk: float) -> dict[str, float]:
    """The last chunk of the head: float32 logits and their gradient in the compute type, hidden states and theirs."""
    value, tokens = _value_bytes(layout), layout.tokens
    hidden = value * tokens * shape.embed_dim
    activations = _kept_activations(shape, layout) + hidden * (2 + 1 / layout.tensor)
    if layout.replicas > 1 and layout.weight_shards > 1:
        # The compiler takes the last block's backward pass out of the loop, and computes its attention again early.
        attention = 2 * (shape.heads_width + shape.kv_width) / layout.tensor
        activations += value * tokens * (3 * shape.embed_dim + attention)
    vocab, gradient = shape.padded_vocab_size / _vocab_shards(layout), _waiting_head_gradient(shape, layout)
    table, logits = value * vocab * shape.embed_dim, (4 + value) * chunk * vocab
    if chunk >= layout.tokens:
        # The gradient of a head in one chunk is formed when the float32 logits are gone; those of several add up.
        logits, gradient = max((logits, 0.0), (value * chunk * vocab, gradient), key=sum)
    return {
        "grads": held.summed,
        "activations": activations,
        "logits": logits,
        "gathered": _laid_out_anew(shape, layout, held) + gradient + table,
    }


def _at_end(shape: ModelShape, layout: Layout, held: _State) -> dict[str, float]:
    """Every gradient is there, and no activation any more."""
    grads = held.summed + held.block_grads + held.table_grads
    is_scattered = layout.strategy in ("full", "grads")
    return {"grads": grads, "gathered": _waiting_head_gradient(shape, layout) if is_scattered else 0.0}


def _waiting_head_gradient(shape: ModelShape, layout: Layout) -> float:
    """The gradient of the whole head: the compiler hides its reduce-scatter behind the end of the backward pass."""
    per_param = _value_bytes(layout) if layout.strategy == "optimizer" else REDUCE_BYTES
    return per_param * shape.padded_vocab_size * shape.embed_dim / _vocab_shards(layout)


def _laid_out_anew(shape: ModelShape, layout: Layout, held: _State) -> float:
    """Shards of the matrices whose last dim is the embedding, turned round once per step: a gather joins first dims."""
    if layout.strategy != "full":
        return 0.0
    projections = (shape.embed_dim * shape.heads_width) * shape.num_layers
    dense = projections + shape.dense_layers * shape.embed_dim * shape.mlp_dim
    return 4 * dense / (layout.tensor * layout.pipeline * layout.weight_shards)


def _vocab_shards(layout: Layout) -> int:
    return layout.tensor * (layout.pipeline if layout.is_head_spread else 1)


def _largest_matrix(shape: ModelShape, layout: Layout) -> float:
    """Elements of the largest gathered matrix of a block on one device."""
    mlp = shape.mlp_dim if shape.dense_layers else 0
    experts = shape.num_experts / layout.expert * shape.expert_mlp_dim if shape.num_experts else 0
    return shape.embed_dim * max(mlp, experts, shape.heads_width) / layout.tensor
