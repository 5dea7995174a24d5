"""Layers of settings: what one source (a preset, a file, the command line) says, and how layers are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxpar.config.errors import NO_VALUE, Problem
from jaxpar.config.keys import KEYS, SECTIONS, nearest_keys, nearest_name

_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and where it comes from."""

    value: object
    source: str
    """For people: "configs/x.toml:12", "preset llama-3.1-8b", "override"."""


Layer = dict[str, Setting]
"""Settings of one source by dotted key. A nested table appears as its leaf keys; under its own key it is None
("absent") or an empty table (all defaults)."""


def flatten(tree: dict, source_of: Callable[[str], str], problems: list[Problem], prefix: str = "") -> Layer:
    """The leaf settings of a nested table.

    Args:
        tree: Nested dictionaries as TOML gives them.
        source_of: Dotted key -> where it was written.
        problems: Collects unknown keys and values that no config can hold.
        prefix: Dotted name of ``tree`` itself; empty at the top.
    """
    layer: Layer = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict) and value:
            layer |= flatten(value, source_of, problems, key)
        elif problem := _leaf_problem(key, value, source_of(key)):
            problems.append(problem)
        elif key in KEYS:
            is_absent = KEYS[key].table is not None and value == "none"
            layer[key] = Setting(value=None if is_absent else value, source=source_of(key))
    return layer


def _leaf_problem(key: str, value: object, source: str) -> Problem | None:
    """Why ``key`` cannot be set to ``value``, as far as that does not depend on the key's own type."""
    if key in SECTIONS or (key in KEYS and KEYS[key].table is not None):
        is_fine = value == {} or (value == "none" and key in KEYS)
        return None if is_fine else _not_a_table(key, value, source)
    if key not in KEYS:
        return unknown_key(key, NO_VALUE if value == {} else value, source)
    if message := _unstorable(value):
        return Problem(key=key, value=value, message=f"{message} ({source})", remedy=f"give {KEYS[key].accepted}")
    return None


def merge(layers: Iterable[Layer]) -> Layer:
    """One layer of all settings; later layers win, leaf by leaf."""
    merged: Layer = {}
    for layer in layers:
        for key, setting in layer.items():
            parent = key.rpartition(".")[0]
            if key in KEYS and KEYS[key].table is not None and setting.value is None:
                for child in [name for name in merged if name.startswith(key + ".")]:
                    del merged[child]
            elif parent in merged and merged[parent].value is None:
                del merged[parent]
            merged[key] = setting
    return merged


def unknown_key(key: str, value: object, source: str) -> Problem:
    """The problem of a key that does not exist, with the nearest keys that do."""
    nearest = nearest_keys(key)
    section = nearest_name(key.partition(".")[0], SECTIONS)
    if nearest:
        remedy = "did you mean " + " or ".join(nearest) + "?"
    elif section:
        remedy = f"keys of [{section}]: " + ", ".join(
            k.name.removeprefix(f"{section}.") for k in SECTIONS[section].keys
        )
    else:
        remedy = "sections: " + ", ".join(SECTIONS)
    return Problem(key=key, value=value, message=f"unknown key ({source})", remedy=remedy)


def _not_a_table(key: str, value: object, source: str) -> Problem:
    example = next(name for name in KEYS if name.startswith(key + "."))
    remedy = f"set keys inside it, e.g. {example}" + (', or "none" to leave it out' if key in KEYS else "")
    return Problem(key=key, value=value, message=f"{key} is a table, not a single setting ({source})", remedy=remedy)


def _unstorable(value: object) -> str | None:
    """Why a value cannot be written back to config.toml, or None."""
    if isinstance(value, list | tuple):
        return next((message for item in value if (message := _unstorable(item))), None)
    if isinstance(value, int) and value not in _INT64:
        return "an integer has at most 64 bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return "a string must be valid Unicode"
    return None
