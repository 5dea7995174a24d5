"""Which parameters a model has, by logical dim, and how many: exact, without building anything."""

from __future__ import annotations

import dataclasses
import math

from jaxpar.config.dims import dims_problems, with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.presets import find_preset
from jaxpar.config.schema import ModelConfig
from jaxpar.families import FAMILIES

_UNKNOWN_VOCABULARY = Problem(
    key="model.vocab_size",
    value=0,
    message="the vocabulary is the tokenizer's, whose size is not known here",
    remedy="set model.vocab_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamKind:
    """One parameter array; those of the blocks are stacked over layers."""

    name: str
    """For people, e.g. "attention query"."""
    group: str
    """Line of the breakdown: embedding, positions, attention, mlp, router, experts, norms or head."""
    dims: tuple[str, ...]
    """Logical dims: the keys of :func:`dim_sizes`."""
    replicated: bool = False
    """A vector that the fsdp axes leave whole on every device: norms and biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by part, in elements; the vocabulary unpadded, a tied embedding counted once."""

    embedding: int
    """Token embedding."""
    positions: int
    """Learned position embedding; 0 with RoPE."""
    attention: int
    """Projections of all blocks, biases included."""
    mlp: int
    """Dense MLPs and shared experts of all blocks, biases included."""
    router: int
    """Routers of all mixture-of-experts blocks, balance biases included; 0 in a dense model."""
    experts: int
    """Routed experts of all blocks."""
    norms: int
    """Norms of all blocks, qk-norms and the final norm."""
    head: int
    """Output head; 0 when tied to the embedding."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(dataclasses.asdict(self).values())

    def active(self, model: ModelConfig) -> int:
        """Parameters that one token uses: ``top_k`` of the routed experts, and everything else.

        The embedding and the head count, as in the "A3B" of public names.
        """
        if not model.num_experts:
            return self.total
        return self.total - self.experts + self.experts // model.num_experts * model.top_k


def dim_sizes(model: ModelConfig) -> dict[str, int]:
    """Size of each logical dim; ``vocab`` is unpadded."""
    model = with_derived_dims(model)
    return {
        "layers": model.num_layers,
        "vocab": model.vocab_size,
        "positions": model.max_positions,
        "embed": model.embed_dim,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "mlp": model.mlp_dim,
        "dense_layers": model.first_dense_layers if model.num_experts else model.num_layers,
        "moe_layers": model.num_layers - model.first_dense_layers if model.num_experts else 0,
        "experts": model.num_experts,
        "expert_mlp": model.expert_mlp_dim,
        "shared_mlp": model.expert_mlp_dim * model.num_shared_experts,
    }


def param_kinds(model: ModelConfig) -> tuple[ParamKind, ...]:
    """Every parameter array of a model's family, in forward order."""
    family = FAMILIES[model.family]

    def vector(name: str, group: str, *dims: str) -> ParamKind:
        return ParamKind(name=name, group=group, dims=dims, replicated=True)

    def norm(name: str, *dims: str) -> list[ParamKind]:
        scale = vector(f"{name} scale", "norms", *dims)
        return [scale, vector(f"{name} bias", "norms", *dims)] if family.norm == "layer" else [scale]

    kinds = [ParamKind(name="embedding", group="embedding", dims=("vocab", "embed"))]
    if family.learned_positions:
        kinds.append(ParamKind(name="positions", group="positions", dims=("positions", "embed")))
    kinds += norm("attention norm", "layers", "embed")
    for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads")):
        dims = ("layers", "embed", heads, "head_dim")
        kinds.append(ParamKind(name=f"attention {name}", group="attention", dims=dims))
        if family.qkv_bias:
            kinds.append(vector(f"attention {name} bias", "attention", "layers", heads, "head_dim"))
    if family.qk_norm:
        kinds += [vector(f"{name} norm scale", "norms", "layers", "head_dim") for name in ("query", "key")]
    dims = ("layers", "heads", "head_dim", "embed")
    kinds.append(ParamKind(name="attention output", group="attention", dims=dims))
    if family.linear_bias:
        kinds.append(vector("attention output bias", "attention", "layers", "embed"))
    kinds += norm("mlp norm", "layers", "embed")
    kinds += _mlp_kinds(model)
    kinds += norm("final norm", "embed")
    if not model.tie_embeddings:
        kinds.append(ParamKind(name="head", group="head", dims=("embed", "vocab")))
    return tuple(kinds)


def _mlp_kinds(model: ModelConfig) -> list[ParamKind]:
    """Dense MLP, or router, routed and shared experts; leading dense blocks keep the dense MLP."""
    family = FAMILIES[model.family]
    inputs = ("gate", "up") if family.gated_mlp else ("up",)
    # Layers are stacked; with leading dense blocks there are two stacks.
    dense, moe = ("dense_layers", "moe_layers") if model.num_experts else ("layers", "")

    def matrices(name: str, group: str, stack: tuple[str, ...], width: str) -> list[ParamKind]:
        into = [ParamKind(name=f"{name} {part}", group=group, dims=(*stack, "embed", width)) for part in inputs]
        return [*into, ParamKind(name=f"{name} down", group=group, dims=(*stack, width, "embed"))]

    kinds = []
    if not model.num_experts or model.first_dense_layers:
        kinds += matrices("mlp", "mlp", (dense,), "mlp")
        if family.linear_bias:
            kinds.append(ParamKind(name="mlp up bias", group="mlp", dims=(dense, "mlp"), replicated=True))
            kinds.append(ParamKind(name="mlp down bias", group="mlp", dims=(dense, "embed"), replicated=True))
    if model.num_experts:
        kinds.append(ParamKind(name="router", group="router", dims=(moe, "embed", "experts"), replicated=True))
        if model.router == "sigmoid":
            kinds.append(ParamKind(name="balance bias", group="router", dims=(moe, "experts"), replicated=True))
        kinds += matrices("expert", "experts", (moe, "experts"), "expert_mlp")
    if model.num_experts and model.num_shared_experts:
        kinds += matrices("shared expert", "mlp", (moe,), "shared_mlp")
    return kinds


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Parameters of a model by part.

    Raises:
        ConfigError: A dimension of the model is missing.
    """
    problems = dims_problems(model)
    if not model.vocab_size:
        problems.append(_UNKNOWN_VOCABULARY)
    if problems:
        raise ConfigError(problems)
    sizes = dim_sizes(model)
    counts = dict.fromkeys((field.name for field in dataclasses.fields(ParameterCount)), 0)
    for kind in param_kinds(model):
        counts[kind.group] += math.prod(sizes[dim] for dim in kind.dims)
    return ParameterCount(**counts)


def param_count(model: ModelConfig) -> int:
    """All parameters of a model: unpadded vocabulary, tied embedding counted once, norms and biases included.

    Raises:
        ConfigError: A dimension of the model is missing.
    """
    return count_parameters(model).total


def param_count_of(preset: str) -> int:
    """All parameters of a public model, e.g. 8_030_261_248 for "llama-3.1-8b".

    Raises:
        ConfigError: No such preset.
    """
    return param_count(find_preset(preset).model)


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding in memory: the vocabulary up to the next multiple of ``vocab_multiple``, on every mesh."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def padding_param_count(model: ModelConfig) -> int:
    """Parameters that exist in memory only because the vocabulary is padded; masked, and never written to disk."""
    tables = 1 if model.tie_embeddings else 2
    return tables * (padded_vocab_size(model) - model.vocab_size) * model.embed_dim
