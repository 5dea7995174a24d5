"""The layer of settings that pretrained weights bring, and how it meets what the user wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.config.checkpoints import JAXPAR_PREFIX, find_metadata, read_checkpoint_model
from jaxpar.config.dims import REQUIRED_DIMS
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.huggingface import PREFIX, SHAPE_SETTINGS, read_model_settings
from jaxpar.config.keys import KEYS
from jaxpar.config.layers import Layer, Setting, merge


def pretrained_layer(settings: Layer, problems: list[Problem]) -> Layer:
    """Settings of the weights that ``model.init_from`` names; empty if it names none.

    Args:
        settings: Everything else that is set.
        problems: Collects what stands against the settings found there.
    """
    init_from = settings["model.init_from"].value if "model.init_from" in settings else None
    if not isinstance(init_from, str) or not init_from.startswith((PREFIX, JAXPAR_PREFIX)):
        return {}
    has_dims = all(f"model.{name}" in settings for name in REQUIRED_DIMS)
    if init_from.startswith(JAXPAR_PREFIX):
        path = find_metadata(init_from.removeprefix(JAXPAR_PREFIX))
        source = f"{JAXPAR_PREFIX}{path}"
    else:
        path = Path(init_from.removeprefix(PREFIX)) / "config.json"
        path = path if path.exists() else None
        source = f"{PREFIX}{path}"
    if path is None and has_dims:
        return {}  # a run's own config.toml stays readable; whether the weights are there is a rule of the plan
    try:
        return model_layer(read_pretrained(init_from), source)
    except ConfigError as error:
        problems += error.problems
        return {}


def read_pretrained(init_from: str) -> dict[str, object]:
    """``model.*`` settings of the weights that ``init_from`` (with its prefix) names.

    Raises:
        ConfigError: they are not there, or are of a model that is not supported.
    """
    read = read_checkpoint_model if init_from.startswith(JAXPAR_PREFIX) else read_model_settings
    return read(init_from.partition(":")[2])


def model_layer(model_settings: Mapping[str, object], source: str) -> Layer:
    """``model.*`` settings as a layer; nested tables may be dicts or schema objects."""
    layer: Layer = {}
    for name, value in model_settings.items():
        if KEYS[f"model.{name}"].table is not None and value is not None:
            fields = value if isinstance(value, dict) else dataclasses.asdict(value)
            layer |= {f"model.{name}.{k}": Setting(value=v, source=source) for k, v in fields.items()}
        else:
            layer[f"model.{name}"] = Setting(value=value, source=source)
    return layer


def contradictions(pretrained: Layer, preset: Layer, explicit: Layer) -> Iterator[Problem]:
    """Array shapes that are not those of the checkpoint, and a preset that is another model than the checkpoint."""
    if not pretrained:
        return
    source = next(iter(pretrained.values())).source
    for key, theirs in pretrained.items():
        is_shape = key.removeprefix("model.") in SHAPE_SETTINGS
        if is_shape and key in explicit and explicit[key].value != theirs.value:
            ours = explicit[key]
            message = f"{ours.source} contradicts {source}, which has {theirs.value!r}"
            yield Problem(key=key, value=ours.value, message=message, remedy=f"remove {key}")
    if preset:
        ours, theirs = _model_values(merge([preset, explicit])), _model_values(merge([pretrained, explicit]))
        wrong = [name for name in theirs if ours.get(name, KEYS[f"model.{name}"].default) != theirs[name]]
        if wrong:
            listed = ", ".join(f"{name} {ours.get(name)!r} against {theirs[name]!r}" for name in wrong)
            message = f"is another model than {source}: {listed}"
            remedy = "remove model.preset; the weights bring their own dimensions"
            yield Problem(key="model.preset", value=explicit["model.preset"].value, message=message, remedy=remedy)


def replacements(pretrained: Layer, explicit: Layer) -> Iterator[str]:
    """Settings that change what a checkpoint computes though its arrays fit, e.g. a new rope_theta."""
    if not pretrained:
        return
    source = next(iter(pretrained.values())).source
    theirs, used = _model_values(pretrained), _model_values(merge([pretrained, explicit]))
    for name in theirs:
        if name not in SHAPE_SETTINGS and used[name] != theirs[name]:
            yield f"model.{name} = {used[name]!r} replaces {theirs[name]!r} of {source}"


def _model_values(layer: Layer) -> dict[str, object]:
    """``model.*`` values by setting name, nested tables as dicts."""
    values: dict[str, object] = {}
    for key, setting in layer.items():
        section, _, name = key.partition(".")
        table, _, leaf = name.partition(".")
        if section == "model" and leaf:
            values.setdefault(table, {})[leaf] = setting.value
        elif section == "model":
            values[name] = setting.value
    return values
