"""Peak memory of a training step on the fullest device, by component.

State: sharded as in the ZeRO paper (arXiv 1910.02054, section 5), with what its lower stages keep whole in the compute
type only: master parameters are sharded by every strategy. Activations: kept per block by remat policy, times
what the schedule holds in flight. On top comes the larger of two moments: one block's backward pass, or the head's.
The formula was checked against the peak that the CUDA compiler reports for the 8B model on 8 and 64 devices, within 3%
under full, selective and dots remat. It assumes fused attention: no [S, S] scores exist.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxpar.plan.layout import SAVED_WORK, Layout, Strategy
from jaxpar.plan.shape import ModelShape

GIB = 2**30

CHUNK_LOGITS_BYTES = 512 * 2**20
"""Float32 logits that exist at one time on a device when ``train.loss_chunk_tokens`` is 0."""

LIVE_BLOCKS = 4
"""Copies of one block's matrices in the compute type at its backward pass: its own and the next block's gathered
weights, and the gradients of two blocks before and after their reduce-scatter."""


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
    optimizer: float
    activations: float
    """Kept for the backward pass, and one block's intermediates."""
    logits: float
    gathered: float
    """Weights gathered for use, and their gradients before they are scattered."""
    buffers: float
    """What collectives of the tensor, context, expert and pipeline axes send and receive."""
    reserve: float
    """What JAX leaves to the driver, NCCL and the CUDA context: 1 - runtime.memory_fraction of the device."""
    device_bytes: float
    """Memory of the device."""
    moment: str
    """When the peak is reached: "a block's backward pass" or "the head"."""
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


def buffer_slots(layout: Layout) -> int:
    """Stage inputs, and gradients of stage outputs, that a stage has room for: at least the slots of the table.

    With m microbatches in g groups of at most s = ceil(m / g) that pass a chunk together (g = m // p; breadth first: 1)
    (v - 1) s + min(m + 1, 2p - 3) activations and (v - 1) (s - p) + 1 gradients; gpipe m + 1 and m. (Asynchronous
    schedules, min(m, p) and p v + p - 1 in arXiv 2104.04473, need fewer: in lock step arrivals wait.)
    """
    stages, m, chunks = layout.pipeline, layout.microbatches, layout.chunks
    if stages == 1:
        return 0
    if layout.schedule == "gpipe":
        return m + (m if stages == 2 else m + 1)
    turning = min(m + 1, 2 * stages - 3)
    if chunks == 1:
        return turning + 1
    groups = 1 if layout.schedule == "breadth_first" else max(1, m // stages)
    size = math.ceil(m / groups)
    late = (size - stages) * (chunks - 1 if groups > 1 else 1)
    return (chunks - 1) * size + turning + max(1, late + 1)


def kept_per_token(shape: ModelShape, layout: Layout) -> float:
    """Bytes per token that one block keeps for its backward pass, on one device.

    In values of the compute type, with D embed, Q query width, K key width, F MLP width (all chosen experts'):
    full D; selective and offload D and what ``remat_save`` names, by default 2 D + 2 Q + 2 K; dots D + 2 Q + 2 K + 2 F;
    none 12 D + 2 Q + 2 K + 5 F. Attention that is kept is kept with its float32 log-sums.
    Routed experts' activations have no names. The D before and after a block is split by the tensor axis like
    everything else.
    """
    value = 4 if layout.precision == "float32" else 2
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
    value = 4 if layout.precision == "float32" else 2
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


def _state(
    shape: ModelShape, layout: Layout, dense: float, experts: float, per_param: StateBytes
) -> tuple[float, float, float]:
    """(params, grads, optimizer) bytes of a device; params are the masters, which every strategy shards."""
    # Each pipeline stage holds its own blocks' vectors; every other axis replicates them.
    vectors = shape.vector_params / layout.pipeline
    params, grads, optimizer = state_memory(vectors, 1, "none", per_param.of("vectors"))
    tables = _table_params(shape) / (layout.tensor * layout.pipeline)
    strategy = "none" if layout.strategy == "none" else "full"
    for matrices, shards, state in (
        (dense - tables, layout.weight_shards, per_param),
        (tables, layout.weight_shards, per_param.of("tables")),
        (experts, max(1, layout.weight_shards // layout.expert), per_param),
    ):
        held = state_memory(matrices, shards, strategy, state)
        params += held[0]
        grads += _whole_gradients(matrices, layout, state) if layout.strategy == "optimizer" else held[1]
        optimizer += held[2]
    return params, grads, optimizer


def _whole_gradients(matrices: float, layout: Layout, per_param: StateBytes) -> float:
    """A microbatch's gradients in the compute type (in a pipeline those of one chunk), and the sum of several."""
    value = 4 if layout.precision == "float32" else 2
    has_sum = layout.microbatches > 1 or layout.pipeline > 1
    return matrices * (value / layout.chunks + (per_param.grads if has_sum else 0))


def _kept_activations(shape: ModelShape, layout: Layout) -> float:
    """Bytes that wait for the backward pass: of all blocks, or of one chunk and the inputs of those in flight."""
    blocks = layout.stage_layers(shape.num_layers)
    kept = layout.tokens * kept_per_token(shape, layout)
    if layout.remat == "offload":
        # On the host but for the block at work and the one on its way.
        blocks = min(blocks, 2)
    if layout.pipeline == 1:
        return blocks * kept
    value = 4 if layout.precision == "float32" else 2
    stage_input = layout.tokens * shape.embed_dim * value / layout.tensor
    # A chunk that goes back keeps all that has a name, whatever waits between the stages.
    at_work = dataclasses.replace(layout, remat="selective", remat_save=tuple(SAVED_WORK))
    kept = layout.tokens * kept_per_token(shape, at_work)
    return buffer_slots(layout) * stage_input + blocks / layout.chunks * kept


def _chunk_copies(shape: ModelShape, layout: Layout, per_param: StateBytes) -> float:
    """What a stage holds of its blocks' matrices besides the state, sharded as they are.

    The float32 gradients of the chunk that goes back, before they are added to the sum (``_whole_gradients`` has those
    of ``optimizer``); and, where layers run on other stages than those that keep them, the layers that it runs.
    """
    if layout.pipeline == 1:
        return 0.0
    layers_share = layout.stage_layers(shape.num_layers) / shape.num_layers / layout.tensor
    dense = shape.block_params * layers_share / layout.weight_shards
    experts = shape.routed_params * layers_share / layout.expert / max(1, layout.weight_shards // layout.expert)
    grads = 0.0 if layout.strategy == "optimizer" else 4 / layout.chunks
    moved = per_param.params if layout.chunks > 1 or layout.places else 0.0
    return (dense + experts) * (grads + moved)


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
    value = 4 if layout.precision == "float32" else 2
    dense, experts = _matrices(shape, layout)
    params, grads, optimizer = _state(shape, layout, dense, experts, state)
    activations = _kept_activations(shape, layout)
    has_scatters = layout.strategy in ("full", "grads") and layout.weight_shards > 1
    whole_copy = (dense + experts) * value if layout.strategy in ("optimizer", "grads") else 0.0
    vocab_shards = layout.tensor * (layout.pipeline if layout.is_head_spread else 1)
    table = shape.padded_vocab_size * shape.embed_dim * value / vocab_shards
    # Without reduce-scatters by block: one block's matrices cast or sliced out, and their gradients. In a stage: those
    # of this block and the next, while the gradients are the chunk's.
    copies = LIVE_BLOCKS if has_scatters and layout.pipeline == 1 else 2
    live = copies * value * _block_params(shape, layout) + _chunk_copies(shape, layout, state)
    moe = shape.num_experts > 0
    width = 10 * _mlp_values(shape) + 12 * shape.embed_dim * (1 + (shape.top_k if moe else 0) / 4)
    intermediates = layout.tokens * width * value / 2 / layout.tensor
    logits = 6 * chunk_tokens(shape, layout, loss_chunk_tokens) * shape.padded_vocab_size / vocab_shards
    at_block, at_head = live + intermediates + table, table + logits
    is_block = at_block >= at_head
    return Memory(
        params=params,
        grads=grads,
        optimizer=optimizer,
        activations=activations + (intermediates if is_block else 0.0),
        logits=0.0 if is_block else logits,
        gathered=whole_copy + (live + table if is_block else table),
        buffers=_buffers(shape, layout),
        reserve=(1 - memory_fraction) * device_bytes,
        device_bytes=device_bytes,
        moment="a block's backward pass" if is_block else "the head",
        whole_logits=4 * layout.tokens * shape.padded_vocab_size / vocab_shards,
    )
