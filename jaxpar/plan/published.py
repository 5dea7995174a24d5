"""Published runs of other trainers as inputs of the same formulas.

A row of a table of published runs becomes a :class:`PublishedLayout`: what it trained, on what, how it was spread, and
what its framework is known to do. What a run reached (``tok_s_gpu``, ``step_s``, ``mem_gib``, ``status``) is no part of
it, so no prediction can see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxpar.config.errors import ConfigError
from jaxpar.plan.catalogue import Gpu, gpu_named
from jaxpar.plan.efficiency import CONSTANTS, Constants, error_class
from jaxpar.plan.layout import Layout, Precision, Remat, Strategy
from jaxpar.plan.shape import PUBLIC_SHAPES, ModelShape
from jaxpar.plan.time import StepTime, step_time
from jaxpar.plan.topology import Cluster

# First match of the name's start wins.
_PRECISIONS: tuple[tuple[str, Precision], ...] = (
    ("fp32", "float32"),
    ("fp8_row", "float8_row"),
    ("fp8", "float8"),
    ("mx", "mxfloat8"),
    ("nvfp4", "float4"),
    ("fp4", "float4"),
    ("", "bfloat16"),
)

# (kept as, share of the forward pass that is repeated). "selective" of Megatron repeats attention's scores only, which
# fused attention repeats anyway; the operator and layer forms of torchtitan repeat about 60% of the forward pass.
_REMATS: dict[str, tuple[Remat, float]] = {
    "none": ("none", 0.0),
    "full": ("full", 1.0),
    "selective": ("none", 0.0),
    "selective_op": ("selective", 0.6),
    "selective_layer": ("selective", 0.6),
    "minimal": ("dots", 0.2),
}

_WINDOWS = {"gpt-oss": 128}
"""Models whose every other layer attends to this many tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """What a framework is known to do; a fact about the row, not a switch of the model."""

    grad_bytes: float = 4.0
    """Bytes per parameter of the gradients that it accumulates."""
    keeps_whole_grads: bool = False
    """Where parameters are sharded, gradients of several microbatches are summed before they are scattered."""
    sharded_state_bytes: float = 16.0
    """Bytes per parameter of everything, where everything is sharded."""
    replicated_state_bytes: float = 18.0
    """Bytes per parameter of everything, where nothing is."""
    replicates_logits: bool = False
    """Every tensor shard holds the whole vocabulary's logits."""
    logit_bytes: float = 10.0
    """Bytes per logit at the peak: bfloat16 and float32 logits and a float32 gradient."""
    allocator: float = 1.0
    """Reserved over allocated memory: fragmentation."""
    native_attention: bool = False
    """Attention of cuDNN or Transformer Engine, instead of FlashAttention-2 or PyTorch's own."""
    elementwise: float = 1.0
    """Elementwise traffic, of that of a framework with fused or compiled kernels."""


_NVIDIA = Framework(native_attention=True)

FRAMEWORKS: Mapping[str, Framework] = {
    "aleph-alpha": Framework(grad_bytes=2.0, allocator=1.12),
    "nemo-dgxc": dataclasses.replace(_NVIDIA, grad_bytes=2.0),
    "nemo": _NVIDIA,
    "megatron": _NVIDIA,
    "maxtext": _NVIDIA,
    "llm-foundry": Framework(elementwise=1.3),
    "torchtitan": Framework(allocator=1.1),
    "kempner": Framework(
        grad_bytes=4.0,
        keeps_whole_grads=True,
        sharded_state_bytes=6.0,
        replicated_state_bytes=8.0,
        replicates_logits=True,
        logit_bytes=6.0,
    ),
    "dlrover": Framework(grad_bytes=2.0),
}
"""Frameworks by the start of the ``stack`` column; others are taken to be like the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """One published run, without its outcome. Its expert axis is a part of its data axis."""

    id: str
    stack: str
    source: str
    group: str
    """Runs of one task that their source compares."""
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    global_batch_size: float
    framework: Framework
    is_eager: bool
    """Nothing is fused between matrix products."""
    has_fused_norms: bool

    @property
    def error_class(self) -> str:
        """dense_short, dense_long_or_blackwell or moe."""
        return error_class(self.cluster.gpu.name, self.layout.seq_len, is_moe=self.shape.num_experts > 0)

    @property
    def efficiency_key(self) -> tuple[str, str]:
        """(GPU, precision): what one efficiency constant is for."""
        return self.cluster.gpu.name, self.layout.precision


def read_row(row: Mapping[str, str]) -> PublishedLayout | None:
    """A row of a table of published runs; None where its batch is not known.

    Args:
        row: Columns of the table by name. tok_s_gpu, step_s, mem_gib, status and what is reported are not read.
    """
    if not row["gbs"]:
        return None
    flags = set(row["flags"].split(";"))
    shape, framework = _shape(row), _framework(row["stack"])
    context, tensor = _integer(row, "context", 1), _integer(row, "tensor", 1)
    pipeline, chunks = _integer(row, "pipe", 1), max(1, _integer(row, "chunks", 1))
    data = float(row["data"] or _integer(row, "gpus", 1) / (context * tensor * pipeline))
    data = max(1.0, data)
    global_batch_size, rows = float(row["gbs"]), float(row["mbs"] or 1)
    microbatches = max(1.0, global_batch_size / (rows * data))
    remat, recompute = _REMATS.get(row["remat"], ("none", 0.0))
    weight_shards, strategy = _sharding(row, flags, data, context)
    layout = Layout(
        rows=rows,
        seq_len=_integer(row, "seq", 0),
        microbatches=microbatches,
        batch_shards=data,
        weight_shards=weight_shards,
        strategy=strategy,
        tensor=tensor,
        context=context,
        expert=_integer(row, "expert", 1),
        pipeline=pipeline,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        remat=remat,
        recompute=recompute,
        precision=next(kind for start, kind in _PRECISIONS if row["precision"].startswith(start)),
        sequence_parallel=_integer(row, "seqpar", 0) == 1,
        async_tensor=_integer(row, "async_tp", 0) == 1,
        attention="native" if framework.native_attention else "portable",
        # Uneven stages are balanced by their owners with the head in mind.
        is_head_spread=shape.num_layers % (pipeline * chunks) != 0,
        overlaps_step_transfers=True,
        experts_over_tensor=False,
    )
    return PublishedLayout(
        id=row["id"],
        stack=row["stack"],
        source=row["source"],
        group=row["group"],
        shape=shape,
        cluster=_cluster(row),
        layout=layout,
        global_batch_size=global_batch_size,
        framework=framework,
        is_eager="eager" in flags,
        has_fused_norms="no_rms_kernel" not in flags,
    )


def predict_time(run: PublishedLayout, share: float, constants: Constants = CONSTANTS) -> StepTime:
    """Step time of a published run; ``share`` is what its GPU's matrix products reach of the peak."""
    traffic = run.framework.elementwise
    traffic *= constants.eager_elementwise if run.is_eager else 1.0
    traffic *= 1.0 if run.has_fused_norms else constants.unfused_norm_elementwise
    if traffic != 1.0:
        constants = dataclasses.replace(
            constants,
            elementwise_embed=constants.elementwise_embed * traffic,
            elementwise_mlp=constants.elementwise_mlp * traffic,
        )
    return step_time(run.shape, run.layout, run.cluster, share=share, constants=constants)


def predict_tokens_per_s(run: PublishedLayout, share: float, constants: Constants = CONSTANTS) -> float:
    """Tokens per second and GPU."""
    step_s = predict_time(run, share, constants).step_s
    return run.global_batch_size * run.layout.seq_len / step_s / run.cluster.num_devices


def _framework(stack: str) -> Framework:
    starts = [start for start in FRAMEWORKS if stack.startswith(start)]
    return FRAMEWORKS[max(starts, key=len)] if starts else Framework()


def _integer(row: Mapping[str, str], name: str, default: int) -> int:
    return int(float(row[name])) if row[name] else default


def _sharding(row: Mapping[str, str], flags: set[str], data: float, context: int) -> tuple[float, Strategy]:
    """(devices that share one copy of the training state, what they shard)."""
    fsdp, devices = _integer(row, "fsdp", 0), _integer(row, "gpus", 1)
    if fsdp > 1:
        if "hsdp_8_inside_node" in flags:
            return 8, "full"
        # A context axis that the fsdp column does not count joins it.
        used = fsdp * context * _integer(row, "tensor", 1) * _integer(row, "pipe", 1)
        shards = fsdp * context if used <= devices else fsdp
        return shards, "grads" if "SHARD_GRAD_OP" in flags else "full"
    if data * context > 1 and "unfused_attention" not in flags:
        return data * context, "optimizer"
    return 1, "none"


def _gpu(name: str) -> Gpu:
    """The GPU of a row; a variant that the catalogue does not know is the GPU that its name starts with."""
    if name == "H100-96-500W":
        gpu = gpu_named("h100")
        return dataclasses.replace(gpu, name=name, memory_bytes=96 * 10**9, memory_bandwidth=2.4e12)
    try:
        return gpu_named(name)
    except ConfigError:
        base, _, variant = name.rpartition("-")
        if not variant or not base:
            raise
        return _gpu(base)


def _cluster(row: Mapping[str, str]) -> Cluster:
    per_node = _integer(row, "gpus_per_node", 8)
    network = float(row["nic_GBps"]) * 1e9 if row["nic_GBps"] else _gpu(row["gpu"]).network_bandwidth
    gpu = dataclasses.replace(_gpu(row["gpu"]), domain_size=per_node, network_bandwidth=network)
    return Cluster(gpu=gpu, num_devices=_integer(row, "gpus", 1), devices_per_node=per_node)


def _shape(row: Mapping[str, str]) -> ModelShape:
    """Sizes from the columns; what no column has (latent attention, shared experts, windows) from the model's name."""
    number = {
        name: _integer(row, name, 0) for name in ("V", "d", "L", "ff", "H", "K", "hd", "gated", "tied", "E", "topk")
    }
    name = row["model"].partition("@")[0]
    known = PUBLIC_SHAPES.get(name)
    beyond = {}
    if known is not None:
        first = known.first_dense_layers if number["L"] == known.num_layers else 0
        beyond = {"latent": known.latent, "num_shared_experts": known.num_shared_experts, "first_dense_layers": first}
    return ModelShape(
        name=name,
        vocab_size=number["V"],
        padded_vocab_size=number["V"],
        embed_dim=number["d"],
        num_layers=number["L"],
        num_heads=number["H"],
        num_kv_heads=number["K"],
        head_dim=number["hd"],
        mlp_dim=known.mlp_dim if known is not None else number["ff"],
        gated_mlp=number["gated"] == 1,
        tie_embeddings=number["tied"] == 1,
        num_experts=number["E"],
        top_k=number["topk"],
        expert_mlp_dim=number["ff"] if number["E"] else 0,
        window=next((window for start, window in _WINDOWS.items() if name.startswith(start)), 0),
        vector_params=number["L"] * 2 * number["d"],
        **beyond,
    )
