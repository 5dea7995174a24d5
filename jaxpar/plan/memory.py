"""Peak memory of a training step on the fullest device, by component.

State: sharded as in the ZeRO paper (arXiv 1910.02054, section 5), with what its lower stages keep whole in the compute
type only: master parameters are sharded by every strategy. Activations: kept per block by remat policy, times
what the schedule holds in flight. On top comes what the fullest of three moments needs (``jaxpar.plan.moments``). The
CUDA compiler's peak is within 5% (``tests/h100``). Assumes fused attention: no [S, S] scores exist.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jaxpar.plan.layout import SAVED_WORK, Layout, Strategy
from jaxpar.plan.moments import Gradients, block_moment, head_moment, last_moment, received_rows
from jaxpar.plan.shape import ModelShape

GIB = 2**30

CHUNK_LOGITS_BYTES = 512 * 2**20
"""Float32 logits that exist at one time on a device when ``train.loss_chunk_tokens`` is 0."""


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
    everything else but the rows of experts, of which there are as many as a device makes room for, with two D and six F
    each.
    """
    value = layout.value_bytes
    embed, heads, keys = shape.embed_dim, shape.heads_width, shape.kv_width
    moe = shape.moe_layers / shape.num_layers
    rows = received_rows(shape, layout) / layout.tokens * moe
    # tokamax's kernel (0.0.17) returns its result, and statistics, twice; the compiler cannot tell that they are equal.
    copies = 2 if layout.is_packed and layout.context == 1 and layout.precision == "bfloat16" else 1
    named_mlp = (1 - moe) * shape.mlp_dim + moe * shape.num_shared_experts * shape.expert_mlp_dim
    named = {
        "query": heads,
        "key": keys,
        "value": keys,
        "attention": heads * copies,
        "attention_out": embed,
        "gate": named_mlp if shape.mlp_matrices == 3 else 0,
        "up": named_mlp,
    }
    selective = embed + sum(named[name] for name in set(layout.remat_save))
    values = {
        "full": embed,
        "selective": selective,
        "offload": selective,
        "dots": embed + 2 * heads + 2 * keys + 2 * named_mlp + 2 * rows * shape.expert_mlp_dim,
        "none": 12 * embed + 2 * heads + 2 * keys + 5 * named_mlp + 6 * rows * shape.expert_mlp_dim,
    }[layout.remat]
    whole = 2 * rows * embed if layout.remat in ("dots", "none") else 0.0
    has_log_sums = layout.remat == "none" or (layout.remat == "selective" and "attention" in layout.remat_save)
    log_sums = 4 * copies * shape.num_heads if has_log_sums else 0
    return (value * values + log_sums) / layout.tensor + value * whole


def _buffers(shape: ModelShape, layout: Layout) -> float:
    """Send and receive buffers: the next stage's input, the ring's next block, the exchange, the gathered sequence."""
    value = layout.value_bytes
    tokens, tensor = layout.tokens, layout.tensor
    hidden = value * tokens * shape.embed_dim
    total = 2 * hidden / tensor if layout.pipeline > 1 else 0.0
    if layout.context > 1 and layout.context_mode == "ring":
        total += 2 * value * tokens * 2 * shape.kv_width / tensor
    elif layout.context > 1:
        # Gathered keys and values, and everyone's gradients of them in float32.
        total += (value + 4) * tokens * layout.context * 2 * shape.kv_width / tensor
    if layout.expert > 1:
        total += 2 * value * received_rows(shape, layout) * shape.embed_dim
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
) -> tuple[float, float, Gradients]:
    """(params, optimizer) bytes and the gradients of a device; params are the masters, which every strategy shards."""
    shards = 1 if layout.strategy == "none" else layout.weight_shards
    tables = _table_params(shape) / (layout.tensor * layout.pipeline)
    parts = (
        # Each pipeline stage holds its own blocks' vectors; every other axis replicates them.
        (shape.vector_params / layout.pipeline, 1, per_param.of("vectors"), "blocks"),
        (dense - tables, shards, per_param, "blocks"),
        (experts, max(1, shards // layout.expert), per_param, "blocks"),
        (tables, shards, per_param.of("tables"), "tables"),
    )
    params = optimizer = 0.0
    grads = {"summed": 0.0, "blocks": 0.0, "tables": 0.0}
    for count, split, state, part in parts:
        held = state_memory(count, split, "full", state)
        params, optimizer = params + held[0], optimizer + held[2]
        # ZeRO-1 has gradients whole, in the compute type, and their float32 sum too. Else a stage's are of one chunk.
        is_whole = layout.strategy == "optimizer" and split > 1
        chunks = layout.chunks if part == "blocks" else 1
        grads[part] += count * layout.value_bytes if is_whole else held[1] / chunks
        if layout.microbatches > 1 or layout.pipeline > 1:
            grads["summed"] += count * state.grads if is_whole else held[1]
    return params, optimizer, Gradients(**grads)


def _kept_activations(shape: ModelShape, layout: Layout) -> float:
    """Bytes that wait for the backward pass: of all blocks, or of one chunk and the inputs of those in flight."""
    blocks = layout.stage_layers(shape.num_layers)
    kept = layout.tokens * kept_per_token(shape, layout)
    if layout.remat == "offload":
        # On the host but for the block on its way.
        blocks = min(blocks, 1)
    if layout.pipeline == 1:
        return blocks * kept
    value = layout.value_bytes
    stage_input = layout.tokens * shape.embed_dim * value / layout.tensor
    # A chunk that goes back keeps all that has a name, whatever waits between the stages.
    at_work = dataclasses.replace(layout, remat="selective", remat_save=tuple(SAVED_WORK))
    kept = layout.tokens * kept_per_token(shape, at_work)
    return buffer_slots(layout) * stage_input + blocks / layout.chunks * kept


def chunk_tokens(shape: ModelShape, layout: Layout, loss_chunk_tokens: int) -> float:
    """Tokens whose logits exist at one time on a device."""
    default = max(1, CHUNK_LOGITS_BYTES * layout.vocab_shards // (4 * shape.padded_vocab_size))
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
    params, optimizer, grads = _state(shape, layout, dense, experts, state)
    kept = _kept_activations(shape, layout)
    chunk = chunk_tokens(shape, layout, loss_chunk_tokens)
    peak = max(
        block_moment(shape, layout, grads, kept),
        # What is offloaded is all on the host then.
        head_moment(shape, layout, grads, 0.0 if layout.remat == "offload" else kept, chunk),
        last_moment(shape, layout, grads),
        key=lambda moment: moment.total_bytes,
    )
    whole_copy = (dense + experts) * layout.value_bytes if layout.strategy in ("optimizer", "grads") else 0.0
    return Memory(
        params=params,
        grads=peak.grads,
        optimizer=optimizer,
        activations=peak.activations,
        logits=peak.logits,
        gathered=whole_copy + peak.gathered,
        buffers=_buffers(shape, layout),
        reserve=(1 - memory_fraction) * device_bytes,
        device_bytes=device_bytes,
        moment=peak.name,
        whole_logits=4 * layout.tokens * shape.padded_vocab_size / layout.vocab_shards,
    )
