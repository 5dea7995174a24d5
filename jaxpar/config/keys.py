"""The schema seen from outside: every dotted key, what it accepts, and the nearest key to a wrong one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping

import annotated_types
from pydantic.fields import FieldInfo

from jaxpar.config.schema import Config

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}

# Words of other trainers for things that have a key here.
_OTHER_NAMES = {
    "accumulation_steps": "train.microbatches",
    "batch_size": "train.global_batch_size",
    "beta1": "optim.b1",
    "beta2": "optim.b2",
    "checkpoint_dir": "run.dir",
    "context_length": "data.seq_len",
    "cp": "mesh.context",
    "d_model": "model.embed_dim",
    "dp": "mesh.data",
    "dtype": "precision.compute",
    "ep": "mesh.expert",
    "ffn_dim": "model.mlp_dim",
    "grad_accum": "train.microbatches",
    "grad_clip": "optim.clip_norm",
    "gradient_accumulation_steps": "train.microbatches",
    "gradient_checkpointing": "train.remat",
    "hidden_dim": "model.embed_dim",
    "hidden_size": "model.embed_dim",
    "intermediate_size": "model.mlp_dim",
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_norm",
    "max_seq_len": "data.seq_len",
    "max_steps": "train.steps",
    "n_heads": "model.num_heads",
    "n_kv_heads": "model.num_kv_heads",
    "n_layers": "model.num_layers",
    "model.name": "model.preset",
    "num_attention_heads": "model.num_heads",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_kv_heads",
    "num_steps": "train.steps",
    "output_dir": "run.dir",
    "pp": "mesh.pipeline",
    "rms_norm_eps": "model.norm_eps",
    "save_every": "checkpoint.every",
    "sequence_length": "data.seq_len",
    "tie_word_embeddings": "model.tie_embeddings",
    "tp": "mesh.tensor",
    "warmup": "optim.warmup_steps",
    "wd": "optim.weight_decay",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One setting of the config."""

    name: str
    """Dotted, e.g. ``model.rope_scaling.factor``."""
    accepted: str
    """Type, bounds and choices in words, e.g. "an integer >= 1"."""
    default: object
    """Value when nothing sets it."""
    doc: str
    """The field's docstring on one line."""
    optional: bool
    """Whether absence (None) is a value."""
    choices: tuple[str, ...]
    """Accepted words, for keys that accept a fixed list of them, and perhaps numbers or lists besides."""
    takes_text: bool
    """Whether strings are all that it accepts, so that quotes may be left out on the command line."""
    table: type | None
    """Schema class when the value is itself a table of settings, else None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the config."""

    name: str
    doc: str
    keys: tuple[Key, ...]
    """Its settings in schema order, those of nested tables after the table's own key."""


def describe_type(annotation: object, metadata: Iterable[object] = ()) -> str:
    """What a field annotation accepts, in words.

    Args:
        annotation: A type as found in the schema: int, float, str, bool, Literal, Optional, tuple[str, ...],
            tuple[float, ...] or a nested table, with or without ``Annotated``.
        metadata: Constraints that pydantic already took off the annotation.
    """
    constraints = list(metadata)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *extra = typing.get_args(annotation)
        for item in extra:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in typing.get_args(annotation))
    if _is_optional(annotation):
        return describe_type(_without_none(annotation), constraints)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return ", or ".join(describe_type(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        item, _ = typing.get_args(annotation)
        if typing.get_origin(item) is typing.Literal:
            return "a list of any of " + describe_type(item).removeprefix("one of ")
        return f"a list of {_plural(describe_type(item))}"
    if annotation not in _NOUNS:
        return "a table with " + ", ".join(annotation.__pydantic_fields__)
    return _NOUNS[annotation] + _describe_bounds(constraints)


def _plural(described: str) -> str:
    """Of "a number > 0": "numbers > 0"."""
    _, noun, *bounds = described.split(" ")
    return " ".join([f"{noun}s", *bounds])


def _describe_bounds(constraints: Iterable[object]) -> str:
    signs = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}
    bounds = [f"{signs[type(c)]} {getattr(c, type(c).__name__.lower())}" for c in constraints if type(c) in signs]
    return " " + " and ".join(bounds) if bounds else ""


def _is_optional(annotation: object) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


def _without_none(annotation: object) -> object:
    if not _is_optional(annotation):
        return annotation
    (inner,) = (arg for arg in typing.get_args(annotation) if arg is not type(None))
    return inner


def _choices(annotation: object) -> tuple[str, ...]:
    """The words that an annotation accepts, alone or besides something else."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(word for choice in typing.get_args(annotation) for word in _choices(choice))
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def _read_keys(prefix: str, schema: type) -> Iterable[Key]:
    for field_name, field in schema.__pydantic_fields__.items():
        inner = _without_none(field.annotation)
        is_table = hasattr(inner, "__pydantic_fields__")
        name = f"{prefix}.{field_name}"
        yield Key(
            name=name,
            accepted=describe_type(field.annotation, field.metadata),
            default=field.default,
            doc=" ".join((field.description or "").split()),
            optional=_is_optional(field.annotation),
            choices=_choices(inner),
            takes_text=inner is str or typing.get_origin(inner) is typing.Literal,
            table=inner if is_table else None,
        )
        if is_table:
            yield from _read_keys(name, inner)


def _read_sections() -> Iterable[Section]:
    for name, field in Config.__pydantic_fields__.items():
        doc = " ".join((field.annotation.__doc__ or "").split())
        yield Section(name=name, doc=doc, keys=tuple(_read_keys(name, field.annotation)))


SECTIONS: Mapping[str, Section] = types.MappingProxyType({section.name: section for section in _read_sections()})
"""Every section by name, in schema order."""

KEYS: Mapping[str, Key] = types.MappingProxyType({key.name: key for s in SECTIONS.values() for key in s.keys})
"""Every key by dotted name, in schema order."""


def nearest_keys(name: str) -> tuple[str, ...]:
    """Known keys that ``name`` may have meant, best first; empty if nothing is close.

    The same word in another section (``train.lr``) and the words of other trainers (``hidden_size``) count as closest,
    then similar spelling inside the section, then anywhere.
    """
    section, _, leaf = name.rpartition(".")
    found = [_OTHER_NAMES[word] for word in (name, leaf) if word in _OTHER_NAMES]
    found += [key for key in KEYS if leaf and key.rpartition(".")[2] == leaf]
    siblings = {key[len(section) + 1 :]: key for key in KEYS if key.rpartition(".")[0] == section}
    found += [siblings[match] for match in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
    if not found:
        leaves = {key.rpartition(".")[2]: key for key in KEYS}
        found += [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    found += difflib.get_close_matches(name, KEYS, n=1, cutoff=0.75)
    return tuple(dict.fromkeys(found))[:2]


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The entry of ``known`` spelled most like ``name``, upper and lower case alike; None if nothing is close."""
    by_lower = {entry.lower(): entry for entry in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None
