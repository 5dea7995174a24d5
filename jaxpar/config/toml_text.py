"""Config -> TOML text that loads back to the same config."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jaxpar.config.checkpoints import JAXPAR_PREFIX
from jaxpar.config.huggingface import PREFIX
from jaxpar.config.keys import KEYS, SECTIONS
from jaxpar.config.presets import PRESETS
from jaxpar.config.schema import Config, ModelConfig


def config_to_toml(config: Config) -> str:
    """The whole config as TOML: ``load_config`` of it gives ``config`` again, if its dimensions are complete.

    Absent values are left out, except a rope_scaling that a preset or checkpoint would bring back.
    """
    blocks = []
    for table, lines in toml_lines(config):
        blocks.append("\n".join([f"[{table}]", *(f"{name} = {text}" for _, name, text in lines)]))
    return "\n\n".join(blocks) + "\n"


def toml_lines(config: Config) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Tables in file order, each as (table name, [(dotted key, name, value as TOML)])."""
    for section in SECTIONS:
        yield from _table_lines(section, getattr(config, section), config.model)


def _table_lines(table: str, value: object, model: ModelConfig) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    lines, nested = [], []
    for name in value.__pydantic_fields__:
        key, item = f"{table}.{name}", getattr(value, name)
        if item is not None and KEYS[key].table is not None:
            nested.append((key, item))
        elif item is not None:
            lines.append((key, name, toml_value(item)))
        elif KEYS[key].table is not None and _brings_rope_scaling(model):
            lines.append((key, name, '"none"'))
    yield table, lines
    for key, item in nested:
        yield from _table_lines(key, item, model)


def _brings_rope_scaling(model: ModelConfig) -> bool:
    preset = PRESETS.get(model.preset or "")
    has_scaling = preset is not None and "rope_scaling" in preset.settings
    return has_scaling or (model.init_from or "").startswith((PREFIX, JAXPAR_PREFIX))


def toml_value(value: bool | int | float | str | tuple) -> str:
    """A value as TOML; ``tomllib`` reads the same value back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON strings are TOML basic strings, but for one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
