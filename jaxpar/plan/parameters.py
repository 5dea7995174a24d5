"""Which parameters a model has, by logical dim, and how many: exact, without building anything."""

from __future__ import annotations

import dataclasses
import math

from jaxpar.config.dims import dims_problems, with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.families import FAMILIES
from jaxpar.config.presets import find_preset
from jaxpar.config.schema import ModelConfig

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
    """Line of the breakdown: embedding, positions, attention, mlp, norms or head."""
    dims: tuple[str, ...]
    """Logical dims: layers, vocab, positions, embed, heads, kv_heads, head_dim, mlp."""
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
    """MLPs of all blocks, biases included."""
    norms: int
    """Norms of all blocks, qk-norms and the final norm."""
    head: int
    """Output head; 0 when tied to the embedding."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(dataclasses.asdict(self).values())


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
    for name in ("gate", "up") if family.gated_mlp else ("up",):
        kinds.append(ParamKind(name=f"mlp {name}", group="mlp", dims=("layers", "embed", "mlp")))
    kinds.append(ParamKind(name="mlp down", group="mlp", dims=("layers", "mlp", "embed")))
    if family.linear_bias:
        kinds.append(vector("mlp up bias", "mlp", "layers", "mlp"))
        kinds.append(vector("mlp down bias", "mlp", "layers", "embed"))
    kinds += norm("final norm", "embed")
    if not model.tie_embeddings:
        kinds.append(ParamKind(name="head", group="head", dims=("embed", "vocab")))
    return tuple(kinds)


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
        ConfigError: No such preset, or one of a mixture-of-experts model, which is not there yet.
    """
    return param_count(find_preset(preset).model)


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding in memory: the vocabulary up to the next multiple of ``vocab_multiple``, on every mesh."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def padding_param_count(model: ModelConfig) -> int:
    """Parameters that exist in memory only because the vocabulary is padded; masked, and never written to disk."""
    tables = 1 if model.tie_embeddings else 2
    return tables * (padded_vocab_size(model) - model.vocab_size) * model.embed_dim
