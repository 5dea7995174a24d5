"""Dotted overrides from the command line: ``mesh.fsdp=8``, ``optim.lr=3e-4``, ``run.dir=runs/x``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence

from jaxpar.config.errors import NO_VALUE, Problem
from jaxpar.config.keys import KEYS, SECTIONS
from jaxpar.config.layers import Layer, Setting, flatten, unknown_key

_SOURCE = "override"


def in_order(path: str | None, overrides: Sequence[str] | None) -> list[str]:
    """The arguments of a command line, of which typer takes the first for the path, whatever it is."""
    return [*([path] if path is not None else []), *(overrides or [])]


def split_path(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits a command line into the config file, if any, and the overrides.

    The first argument is the file unless it reads KEY=VALUE and no such file exists.
    """
    if not arguments:
        return None, []
    first, *rest = arguments
    if "=" in first and not os.path.exists(first):
        return None, list(arguments)
    return first, rest


def parse_overrides(overrides: Sequence[str], problems: list[Problem]) -> Layer:
    """Settings of ``KEY=VALUE`` arguments.

    VALUE is a TOML value. For keys that take strings, anything else is the string itself, so quotes may be left out;
    the bare word ``none`` clears an optional key.

    Args:
        overrides: The arguments, in order.
        problems: Collects malformed arguments, unknown keys and keys given twice.
    """
    layer: Layer = {}
    given: dict[str, str] = {}
    for argument in overrides:
        for key, setting in _parse_override(argument, problems).items():
            if (clash := _clash(key, given)) is not None:
                problems.append(
                    Problem(
                        key=key,
                        message=f"overridden twice: {given[clash]} and {argument}",
                        remedy="give each key once",
                    )
                )
            given[key] = argument
            layer[key] = setting
    return layer


def _clash(key: str, given: dict[str, str]) -> str | None:
    """An earlier key that sets the same thing: the key itself, its table, or a setting inside it."""
    return next((k for k in given if k == key or k.startswith(key + ".") or key.startswith(k + ".")), None)


def _parse_override(argument: str, problems: list[Problem]) -> Layer:
    key, equals, text = argument.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        problems.append(
            Problem(key=argument, message="not an override", remedy="write SECTION.KEY=VALUE, e.g. mesh.fsdp=8")
        )
        return {}
    if key not in KEYS and key not in SECTIONS:
        problems.append(unknown_key(key, text, _SOURCE))
        return {}
    if not text:
        accepted = KEYS[key].accepted if key in KEYS else "a table"
        problems.append(Problem(key=key, message=f"no value after = ({_SOURCE})", remedy=f"give {accepted}"))
        return {}
    value = parse_value(key, text)
    if value is NO_VALUE:
        problems.append(_malformed(key, text))
        return {}
    if value is None:
        return {key: Setting(value=None, source=_SOURCE)}
    tree: dict = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return flatten(tree, lambda _: _SOURCE, problems)


def parse_value(key: str, text: str) -> object:
    """The value that ``text`` means for a key or section: None for ``none``, NO_VALUE if it means nothing."""
    spec = KEYS.get(key)
    if spec is not None and spec.optional and text == "none":
        return None
    try:
        tree = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        tree = {}
    is_value = tree.keys() == {"value"}
    if spec is not None and spec.takes_text and not (is_value and isinstance(tree["value"], str)):
        return NO_VALUE if text[0] in "\"'" else text
    if spec is not None and text in spec.choices:
        return text
    return tree["value"] if is_value else NO_VALUE


def _malformed(key: str, text: str) -> Problem:
    accepted = KEYS[key].accepted if key in KEYS else "a table"
    remedy = f"give {accepted}"
    if accepted == "a list of strings":
        items = [item.strip().strip("\"'") for item in text.strip("[]").split(",")]
        remedy += f", quoted for the shell: '{key}=[" + ", ".join(f'"{item}"' for item in items) + "]'"
    return Problem(key=key, value=text, message=f"not a TOML value ({_SOURCE})", remedy=remedy)
