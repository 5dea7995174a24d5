"""The config schema: frozen sections, one docstring per field, no JAX.

The docstring under a field is its documentation everywhere: ``docs/config.md`` and ``jaxpar config --reference`` are
generated from it, and the types and bounds below are what error messages say is accepted.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes from slow links (outermost) to fast links (innermost)."""

BYTE_VOCAB_SIZE = 257
"""Ids of the ``bytes`` tokenizer: one per byte and one for the end of a document."""

TOKENIZED_SOURCES = ("store", "tokens")
"""Values of data.source that are token ids already; data.tokenizer then need not say whose."""

_SECTION = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

Activation = Literal["query", "key", "value", "attention", "attention_out", "gate", "up"]
"""Names of activations that train.remat_save can keep."""

# Strict: "8", 8.0 and true are not integers, 1 is not a boolean; an integer is a float.
Int = Annotated[int, Field(strict=True)]
Positive = Annotated[int, Field(strict=True, ge=1)]
NonNegative = Annotated[int, Field(strict=True, ge=0)]
Bool = Annotated[bool, Field(strict=True)]
FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class RunConfig:
    """Where a run lives and what makes it reproducible."""

    dir: str = "runs/default"
    """Directory of this run, relative to the working directory; holds config.toml, metrics.jsonl and checkpoints/."""
    seed: NonNegative = 0
    """Seed of the parameter initialisation and of the data order."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class RopeScaling:
    """Llama 3.1 frequency scaling (``rope_type = "llama3"`` of Hugging Face transformers)."""

    factor: Annotated[FiniteFloat, Field(gt=0)] = 8.0
    """Wavelengths longer than the original context are stretched by this factor."""
    low_freq_factor: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """Wavelengths above original_max_positions / low_freq_factor are stretched fully."""
    high_freq_factor: Annotated[FiniteFloat, Field(gt=0)] = 4.0
    """Wavelengths below original_max_positions / high_freq_factor are left alone."""
    original_max_positions: Positive = 8192
    """Context length of the model before scaling."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class ModelConfig:
    """A decoder-only Transformer. Give ``preset``, or the dimensions, or both (explicit dimensions win)."""

    preset: str | None = None
    """Public model name whose dimensions are used, e.g. "llama-3.1-8b"; ``jaxpar config --presets`` lists them."""
    family: Literal["llama", "qwen2", "qwen3", "gemma", "gpt2", "mixtral", "qwen3_moe"] = "llama"
    """Architecture: llama (2, 3, 3.1), qwen2 (qkv biases), qwen3 (qk-norm), gemma (GeGLU, 1 + w norms, scaled
    embedding), gpt2 (learned positions, LayerNorm, biases, GELU),
    mixtral (llama with experts), qwen3_moe (qwen3 with experts)."""
    vocab_size: NonNegative = 0
    """Number of token ids; 0 takes the tokenizer's."""
    vocab_multiple: Positive = 128
    """The vocabulary is padded to this multiple in memory, with masked logits, whatever the mesh; on disk it is
    unpadded."""
    embed_dim: NonNegative = 0
    """Width of the residual stream."""
    num_layers: NonNegative = 0
    """Number of Transformer blocks."""
    num_heads: NonNegative = 0
    """Number of query heads."""
    num_kv_heads: NonNegative = 0
    """Number of key and value heads (GQA); 0 means num_heads. mesh.tensor must divide it."""
    head_dim: NonNegative = 0
    """Width of one head; 0 means embed_dim / num_heads."""
    mlp_dim: NonNegative = 0
    """Width of the MLP's hidden layer."""
    num_experts: NonNegative = 0
    """Routed experts of each mixture-of-experts block; 0: a dense model."""
    top_k: NonNegative = 0
    """Routed experts that each token uses; at least 1 and at most num_experts."""
    expert_mlp_dim: NonNegative = 0
    """Width of one expert's hidden layer; 0 means mlp_dim."""
    num_shared_experts: NonNegative = 0
    """Experts that every token uses besides the routed ones, each expert_mlp_dim wide."""
    first_dense_layers: NonNegative = 0
    """Leading blocks with a dense MLP of mlp_dim instead of experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How affinities to experts are formed: a softmax over all of them, or each one's own sigmoid, balanced by a bias
    that counts in the choice only (DeepSeek-V3)."""
    norm_topk: Bool = True
    """Scale the weights of a token's chosen experts to the sum 1."""
    num_expert_groups: NonNegative = 0
    """Groups of equal size that the experts are in, of which a token uses top_k_groups; 0: no groups."""
    top_k_groups: NonNegative = 0
    """Groups that a token chooses among, those whose two best experts are best together; at most num_expert_groups."""
    balance_coef: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Coefficient of the load-balancing loss (the term of a row is 1 when its tokens are spread evenly; summed over
    blocks, mean over rows weighted by their trained tokens)."""
    router_z_coef: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Coefficient of the squared log-partition of the router's logits (ST-MoE), summed over blocks."""
    balance_rate: Annotated[FiniteFloat, Field(ge=0)] = 0.001
    """Sigmoid router: each step moves the bias of an expert by this much, down if it had more tokens than the mean."""
    capacity_factor: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Tokens of a row that one expert takes at most, times what it would get if all got the same; the others pass it
    by, counted as dropped. 0: no limit, nothing is dropped."""
    max_positions: NonNegative = 0
    """Length of the learned position table (gpt2); 0 for RoPE families, which have none."""
    tie_embeddings: Bool = False
    """Use the token embedding as the output head; it is then one parameter."""
    norm_eps: Annotated[FiniteFloat, Field(gt=0)] = 1e-5
    """Epsilon inside the normalisation's square root."""
    rope_theta: Annotated[FiniteFloat, Field(gt=0)] = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1 frequency scaling; absent means none. Written "none", it removes the scaling of a preset."""
    init_std: Annotated[FiniteFloat, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights; projections back into the residual stream use
    init_std / sqrt(2 num_layers)."""
    init_from: str | None = None
    """Start from these weights instead of random ones, at step 0 with an empty optimizer: "hf:DIR" reads a Hugging Face
    directory (config.json and safetensors), "jaxpar:DIR" a run, its checkpoints or one step. The dimensions then need
    not be given here."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class MeshConfig:
    """Devices per mesh axis. The product must equal the device count; one axis may be -1 ("the rest")."""

    pipeline: Int = 1
    """Pipeline stages: each holds a part of the layers, and microbatches pass from stage to stage; see pipeline."""
    data: Int = 1
    """Replicas whose gradients are all-reduced; with fsdp above 1 this is hybrid sharding (data across nodes, fsdp
    inside)."""
    fsdp: Int = 1
    """Devices that shard parameters, gradients and optimizer state; weights are gathered block by block."""
    expert: Int = 1
    """Devices that shard the experts; outside of them one more fsdp axis, so it needs a mixture of experts."""
    context: Int = 1
    """Devices that shard the sequence everywhere, attention included, for rows too long for one device; outside
    attention it shards weights like fsdp. data.seq_len must divide by 2 x context."""
    tensor: Int = 1
    """Devices that shard heads, MLP width and vocabulary (and, between blocks, the sequence); keep it inside one NVLink
    domain."""
    context_mode: Literal["auto", "ring", "allgather"] = "auto"
    """How attention meets the keys and values of other context devices: ring passes them on while it computes,
    allgather collects a whole row's first. auto: ring where a device holds at least 2048 tokens of a row."""
    fsdp_strategy: Literal["full", "grads", "optimizer"] = "full"
    """What a step holds whole besides its shards. full (ZeRO-3): nothing, each block gathers its weights. grads
    (ZeRO-2): all weights in the compute type, gathered once per step. optimizer (ZeRO-1): their gradients too,
    reduce-scattered once per step. Master parameters and optimizer state are sharded by all three."""
    expert_exchange: Literal["auto", "all_to_all", "gather"] = "auto"
    """How tokens reach their experts: all_to_all sends each to the devices that need it; gather shows all tokens of the
    axis to all its devices; auto takes what moves fewer rows, gather where mesh.expert is below model.top_k."""
    expert_receive_factor: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Rows that a device makes room for, times what it would receive if all experts had the same load; 0: the worst
    case, so nothing can overflow."""
    expert_overflow: Literal["error", "drop"] = "error"
    """Rows that find no room end the run, or are left out and counted."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class PipelineConfig:
    """Pipeline schedule; used when mesh.pipeline is above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth_first"] = "1f1b"
    """Order of forward and backward microbatches; `jaxpar schedule` draws each. It never changes a result."""
    chunks: Positive = 1
    """Chunks of layers per stage; only interleaved and breadth_first have more than 1, and they need at least 2."""
    layers_per_stage: Literal["even", "balanced"] | tuple[Positive, ...] = "even"
    """even: the same number on every stage, or an error. balanced: the first stages have one layer more. A list: the
    layers of each stage, with chunks those of chunk 0 on every stage, then of chunk 1, and so on. All stages take as
    long as the largest one. Checkpoints do not know it."""
    gather: Literal["auto", "per_microbatch", "per_step"] = "auto"
    """How often a stage gathers the weights that mesh.fsdp shards. per_microbatch: block by block. per_step: once, with
    gradients whole until the end of the step, as mesh.fsdp_strategy = "optimizer" does. auto: per_step where that
    leaves a tenth of the GPU's memory free, by the arithmetic of `jaxpar plan`."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class DataConfig:
    """What is trained on, and how it becomes rows of seq_len tokens."""

    source: Literal["synthetic", "text", "store", "tokens", "sft"] = "synthetic"
    """synthetic: reproducible random rows, for tests and benchmarks. text: the files of data.paths. store: directories
    that `jaxpar data prepare` has written. tokens: files of token ids, .bin or .npy, memory-mapped. sft: JSONL records
    {prompt, response} or {messages}, of which only the responses are trained on."""
    paths: tuple[str, ...] = ()
    """Glob patterns of files, relative to the working directory; "stdlib:*.py" globs in Python's own standard library.
    With source = "store" each is a directory."""
    tokenizer: str = "bytes"
    """"bytes" (one id per byte, plus an end-of-document id), or the path of a tokenizer.json. A store names its own;
    a tokenizer.json given as well must be that one."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in the .bin files of source = "tokens", little-endian."""
    eod_id: NonNegative | None = None
    """Id that ends each document in the files of source = "tokens"; absent: that of data.tokenizer."""
    chat_template: str | None = None
    """How source = "sft" writes messages: the path of a Jinja template, or "chatml". Absent: chat_template.jinja or
    tokenizer_config.json beside data.tokenizer."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """What happens to records of source = "sft" that are longer than a row: refused, left out, or cut at its end."""
    weights: tuple[Annotated[FiniteFloat, Field(gt=0)], ...] = ()
    """Shares of the rows that each of data.paths gives (store, tokens), exact by the index of the sample; only their
    ratios matter. Empty: the rows of all paths are one dataset."""
    repeat: Bool = True
    """Whether rows come again, in another order, once all of their source have come (with data.weights each source has
    epochs of its own); false refuses a run with more steps than there are rows for."""
    num_samples: Positive = 1024
    """Number of rows of the synthetic source."""
    seq_len: Positive = 256
    """Tokens per row that are predicted; rows hold one token more, so that every position has a label."""
    pack: Bool = True
    """Put several documents in one row, isolated from each other in attention, positions and labels; false pads one
    document per row. Documents are cut where a row ends; records of source = "sft" are not."""
    shuffle: Bool = True
    """One seeded permutation of all rows per epoch, the same on every mesh and process count; false keeps the order of
    the files."""
    last_batch: Literal["drop", "pad"] = "drop"
    """What happens to the last rows of an epoch when they do not fill a batch: left out of that epoch, or padded with
    rows of weight 0."""
    validation_fraction: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Share of the documents (synthetic: rows) held out for validation; they never train."""
    prefetch: Positive = 2
    """Batches prepared ahead of the step that uses them."""
    num_threads: Positive = 2
    """Threads that read and assemble rows."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class TrainConfig:
    """The training loop."""

    steps: Positive = 100
    """Optimizer steps of the whole run; the learning-rate schedule ends here."""
    stop_at: Positive | None = None
    """End this run early after this step, without changing the schedule; a later run resumes from there."""
    global_batch_size: Positive = 8
    """Rows per optimizer step over all devices and microbatches."""
    microbatches: Positive = 1
    """Forward and backward passes whose gradients make one optimizer step (gradient accumulation, weighted by
    tokens)."""
    remat: Literal["none", "full", "selective", "offload"] = "full"
    """What the backward pass recomputes: full keeps only each block's input, selective also the activations of
    remat_save, none everything. offload is selective with all of that in host memory (GPUs only). Gathered weights are
    never kept."""
    remat_save: tuple[Activation, ...] = ("query", "key", "value", "attention", "attention_out")
    """Activations of a block that selective and offload keep. query, key, value: the projections, before RoPE.
    attention: the kernel's result, so that it is not run again. attention_out: after the output projection. gate, up:
    the MLP's wide products, most of the recomputation and of the memory."""
    attention: Literal["auto", "xla", "cudnn", "tokamax"] = "auto"
    """Attention kernel. auto: the fastest that can do the work, said in the log. cudnn: without packing. tokamax: also
    packed (mosaic_gpu on Hopper and Blackwell, triton on other GPUs), and where mesh.context_mode gathers keys and
    values. xla: anywhere, with [S, S] scores in memory. One that cannot do what is asked (CPU, type, head_dim, packing,
    an old GPU, a ring) is refused."""
    dropout: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Share of elements that training drops after the embedding and from what attention and MLP add to the residual
    stream, as GPT-2 does; not of attention probabilities, which fused kernels never hold. The mask depends on the seed,
    step, row, position, layer and feature only."""
    z_loss: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Coefficient of the squared log-partition penalty (PaLM, section 5), added to the loss."""
    loss_chunk_tokens: NonNegative = 0
    """Tokens whose logits exist at one time on a device; 0 chooses so that they take at most 512 MiB in float32."""
    eval_every: NonNegative = 0
    """Steps between validation passes; there is also one before the first and after the last step. 0: no validation."""
    eval_batches: NonNegative = 0
    """Batches of one validation pass; 0: the whole validation split."""
    eval_params: Literal["params", "ema"] = "params"
    """What is validated: the parameters, or their moving average (optim.ema_decay)."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run naming the step, or leaves params and optimizer as they
    were."""
    max_skipped_steps: NonNegative = 10
    """With nonfinite = "skip": this many skipped steps in a row are allowed, one more ends the run."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class PrecisionConfig:
    """Number formats."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Master parameters and optimizer moments are kept in this type; bfloat16 loses small updates and is warned
    about."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Matrix products, activations and weight gathers; float32 means full float32 products (no TF32)."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Gradient reductions across devices."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class OptimConfig:
    """Optimizer and learning-rate schedule. All counts are optimizer steps."""

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = "adamw"
    """adamw; lion (sign of the momentum); adafactor (factored second moment); muon (orthogonalised momentum for the
    matrices of blocks, adamw for embeddings, head, norms and biases); sgd. Settings that the chosen one does not have
    are refused."""
    lr: Annotated[FiniteFloat, Field(ge=0)] = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Decay after the warm-up: cosine or linear to min_lr_ratio; wsd holds the peak and decays over the last
    decay_steps; constant."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up: step i of w uses (i + 1) / w of the peak, so the first step is not lost."""
    decay_steps: NonNegative = 0
    """wsd: steps of the final linear decay; 0 means a tenth of train.steps."""
    min_lr_ratio: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    b1: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    """Decay of the first moment (adamw, lion, and the adamw part of muon). Absent: 0.9."""
    b2: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    """Decay of the second moment (adamw, and the adamw part of muon; absent: 0.95), or of lion's momentum (absent:
    0.99)."""
    eps: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Added to the root of the second moment (adamw), to the norm that a matrix is divided by (muon), absent: 1e-8; to
    the squared gradient (adafactor), absent: 1e-30."""
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    """Decay of the momentum. Absent: sgd 0.9, muon 0.95, adafactor 0 (no momentum is kept)."""
    nesterov: Bool | None = None
    """Whether the momentum looks ahead. Absent: muon true, sgd false."""
    ns_steps: Positive | None = None
    """Newton-Schulz iterations that orthogonalise muon's momentum. Absent: 5."""
    update_scale: Literal["rms", "spectral"] | None = None
    """Size of muon's updates of an [m, n] matrix: rms multiplies by 0.2 sqrt(max(m, n)), the size of AdamW's updates,
    so that lr and weight decay mean the same (arXiv 2502.16982); spectral by sqrt(max(1, n / m)), as its author does,
    with a larger lr. Absent: rms."""
    adamw_lr: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Peak learning rate of the parameters that muon leaves to adamw. Absent: lr."""
    factored: Bool | None = None
    """Whether adafactor keeps row and column means of the squared gradient of a matrix instead of all of it. Absent:
    true."""
    min_factored_dim: Positive | None = None
    """Matrices whose smaller side is below this keep the whole second moment (adafactor). Absent: 128."""
    decay_exponent: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Adafactor's second moment decays with 1 - step^-decay_exponent. Absent: 0.8."""
    clip_update_rms: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Adafactor's updates are scaled down to this root mean square; 0 turns it off. Absent: 1."""
    scale_by_param_rms: Bool | None = None
    """Whether adafactor's updates are multiplied by the root mean square of the parameter (at least 1e-3), which makes
    lr relative. Absent: true."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_norms: Bool = False
    """Whether weight decay applies to normalisation scales (gemma multiplies by 1 + scale: its norms decay to 1)."""
    decay_biases: Bool = False
    """Whether weight decay applies to biases."""
    decay_embeddings: Bool = True
    """Whether weight decay applies to the token embedding (and a tied head) and to learned positions."""
    clip_norm: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""
    ema_decay: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Decay per step of a moving average of the parameters, kept in float32 beside them and saved with them; 0: none
    is kept. For validation see train.eval_params; `jaxpar reshard --weights ema --to hf` exports it."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class CheckpointConfig:
    """Saving and resuming the whole training state."""

    every: NonNegative = 500
    """Steps between checkpoints; 0: only at the end, on interruption and by the clock."""
    every_minutes: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Minutes between checkpoints, whatever the steps; 0: not by the clock. Any save starts the minutes anew."""
    final: Bool = True
    """Whether a run that ends or is interrupted saves its last step; false with every = 0 and every_minutes = 0 writes
    no checkpoint at all."""
    keep: Positive = 3
    """Number of newest checkpoints that are kept."""
    keep_every: NonNegative = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: NonNegative = 0
    """Number of checkpoints with the lowest best_metric that are kept besides; 0: none."""
    best_metric: Literal["eval_loss", "loss"] = "eval_loss"
    """What keep_best compares: the validation loss at the step (steps without one do not compete), or the step's
    training loss."""
    verify: Bool = True
    """Whether arrays that are restored are compared with the checksums that were saved with them."""
    resume: str = "auto"
    """auto: from the run's newest whole checkpoint if there is one. never: a run directory with checkpoints is an
    error. must: none is an error. Else the path of a run, its checkpoints or one step, from which a run without
    checkpoints of its own starts."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class RuntimeConfig:
    """Processes and devices."""

    cpu_devices: NonNegative = 0
    """Train on the CPU with this many fake devices per process; 0 uses the accelerators that JAX finds."""
    coordinator: str | None = None
    """host:port of process 0; needed when num_processes is above 1."""
    num_processes: Positive = 1
    """Processes of this run."""
    process_id: NonNegative = 0
    """Number of this process, from 0."""
    start_timeout_s: Positive = 120
    """Seconds to wait for all processes to arrive."""
    memory_fraction: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.92
    """Share of each GPU's memory that JAX reserves at start."""
    compilation_cache: str = "auto"
    """Where compiled programs are kept, so that a restart does not compile again: a directory, or "off". auto:
    ~/.cache/jaxpar/compiled (under XDG_CACHE_HOME if that is set), and run.dir/compiled for several processes, at most
    4 GiB; JAX_COMPILATION_CACHE_DIR wins over auto."""
    compiler_options: tuple[str, ...] = ()
    """Options of the training step's compiler, each "NAME=VALUE", over those that are chosen by the mesh;
    "NAME=default" takes a chosen one out. One that the installed compiler does not know is refused."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class ObserveConfig:
    """What a run reports."""

    log_every: Positive = 1
    """Steps between lines of progress; metrics.jsonl has every step."""
    sample_ids: Bool = False
    """Adds the step's global record ids, in row order, to metrics.jsonl."""
    profile_start: NonNegative = 0
    """First step of a window whose XProf trace process 0 writes to run.dir/profile; 0: none. Steps 1 and 2 are slower
    than the rest."""
    profile_steps: Positive = 3
    """Number of steps in that window; a trace grows with each."""
    tensorboard: Bool = False
    """Also write TensorBoard events under run.dir (needs the tensorboard extra)."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the wandb extra)."""


@dataclass(frozen=True, kw_only=True, config=_SECTION)
class Config:
    """Everything that defines a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
