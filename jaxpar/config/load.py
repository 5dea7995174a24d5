"""From a TOML file and overrides to a complete config, with the origin of every value.

Order, later wins: defaults, preset, Hugging Face config.json, file, overrides.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from jaxpar.config.dims import dims_problems, with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.keys import KEYS, SECTIONS, nearest_name
from jaxpar.config.layers import Layer, Setting, merge
from jaxpar.config.overrides import parse_overrides
from jaxpar.config.presets import find_preset
from jaxpar.config.pretrained import contradictions, model_layer, pretrained_layer, replacements
from jaxpar.config.schema import BYTE_VOCAB_SIZE, TOKENIZED_SOURCES, Config
from jaxpar.config.toml_file import read_toml

_CONFIG = TypeAdapter(Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config and where its values come from."""

    config: Config
    """Complete: no dimension is left to be guessed."""
    sources: Mapping[str, str]
    """Dotted key -> "default", "preset NAME", "hf:DIR/config.json", "FILE:LINE", "override", or the keys it follows."""
    warnings: tuple[str, ...]
    """What was overridden that a reader may not expect."""


def load_config(path: str | os.PathLike | None, overrides: Sequence[str] = (), *, own_model: bool = False) -> Config:
    """Loads a config; see :func:`load_with_sources`."""
    return load_with_sources(path, overrides, own_model=own_model).config


def load_with_sources(
    path: str | os.PathLike | None, overrides: Sequence[str] = (), *, own_model: bool = False
) -> LoadedConfig:
    """Loads a config from a TOML file and dotted overrides.

    Only what can be said of each value alone, and of the model's own dimensions, is checked here; rules that tie
    sections together are :func:`jaxpar.plan.resolve.check`.

    Args:
        path: TOML file, relative to the working directory; None for overrides alone.
        overrides: ``KEY=VALUE`` arguments, e.g. ``mesh.fsdp=8``; they win over the file.
        own_model: Whether ``jaxpar.Trainer`` is given a module, so that the config needs no model.

    Raises:
        ConfigError: Everything that is wrong with the file and the overrides, in one error.
    """
    problems: list[Problem] = []
    explicit = _read_explicit(path, overrides, problems)
    preset = _preset_layer(explicit, problems)
    pretrained = pretrained_layer(merge([preset, explicit]), problems)
    problems += contradictions(pretrained, preset, explicit)
    settings = merge([preset, pretrained, explicit])
    config = _validate(settings, problems)
    sources = _sources(settings, config)
    config = config if own_model else _derive(config, sources)
    if not own_model and not any(problem.key.startswith(("model", str(path))) for problem in problems):
        problems += dims_problems(config.model)
    if problems:
        raise ConfigError(problems)
    return LoadedConfig(config=config, sources=sources, warnings=tuple(replacements(pretrained, explicit)))


def _read_explicit(path: str | os.PathLike | None, overrides: Sequence[str], problems: list[Problem]) -> Layer:
    """What the user wrote: the file under the overrides."""
    file_layer: Layer = {}
    if path is not None:
        try:
            file_layer = read_toml(path, problems)
        except ConfigError as error:
            problems += error.problems
    return merge([file_layer, parse_overrides(overrides, problems)])


def _preset_layer(explicit: Layer, problems: list[Problem]) -> Layer:
    name = explicit["model.preset"].value if "model.preset" in explicit else None
    if not isinstance(name, str):
        return {}
    try:
        return model_layer(find_preset(name).settings, f"preset {name}")
    except ConfigError as error:
        problems += error.problems
        return {}


def _validate(settings: Layer, problems: list[Problem]) -> Config:
    """The config of these settings; those that are not accepted are reported, and left out of it."""
    tree: dict = {name: {} for name in SECTIONS}
    for key, setting in settings.items():
        *parents, leaf = key.split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        if not (isinstance(setting.value, dict) and leaf in table):
            table[leaf] = setting.value
    try:
        return _CONFIG.validate_python(tree)
    except ValidationError as error:
        wrong = dict.fromkeys(_key_of(details["loc"]) for details in error.errors())
    problems += [_not_accepted(key, settings[key]) for key in wrong]
    return _validate({key: setting for key, setting in settings.items() if key not in wrong}, problems)


def _key_of(location: tuple) -> str:
    """The longest dotted key that a pydantic error location names; it may go on into a list."""
    parts = [part for part in location if isinstance(part, str)]
    while ".".join(parts) not in KEYS:
        parts.pop()
    return ".".join(parts)


def _not_accepted(key: str, setting: Setting) -> Problem:
    spec = KEYS[key]
    nearest = nearest_name(str(setting.value), spec.choices) if spec.choices else None
    example = "" if spec.default in (None, ()) else f", e.g. {spec.default!r} (the default)"
    return Problem(
        key=key,
        value=setting.value,
        message=f"not {spec.accepted} ({setting.source})",
        remedy=f"did you mean {nearest}?" if nearest else f"give {spec.accepted}{example}",
    )


def _sources(settings: Layer, config: Config) -> dict[str, str]:
    """Origin of every key that the config has; a table that is absent appears under its own key."""
    sources = {}
    for name, key in KEYS.items():
        is_absent_table_child = KEYS.get(name.rpartition(".")[0]) is not None and config.model.rope_scaling is None
        is_present_table = key.table is not None and config.model.rope_scaling is not None
        if not is_absent_table_child and not is_present_table:
            sources[name] = settings[name].source if name in settings else "default"
    return sources


def _derive(config: Config, sources: dict[str, str]) -> Config:
    """Replaces zeros that mean "follows from another setting", as far as the files named are not needed for it."""
    model = with_derived_dims(config.model)
    if model.num_kv_heads != config.model.num_kv_heads:
        sources["model.num_kv_heads"] = "model.num_heads"
    if model.head_dim != config.model.head_dim:
        sources["model.head_dim"] = "model.embed_dim / model.num_heads"
    if model.expert_mlp_dim != config.model.expert_mlp_dim:
        sources["model.expert_mlp_dim"] = "model.mlp_dim"
    if model.vocab_size == 0 and config.data.tokenizer == "bytes" and config.data.source not in TOKENIZED_SOURCES:
        model = dataclasses.replace(model, vocab_size=BYTE_VOCAB_SIZE)
        sources["model.vocab_size"] = 'data.tokenizer = "bytes"'
    return dataclasses.replace(config, model=model)
