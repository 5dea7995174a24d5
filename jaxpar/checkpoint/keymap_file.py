"""Key maps as files, so that checkpoints of other trainers come in without code: data only (``docs/key-maps.md``)."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.config.errors import NO_VALUE, ConfigError, Problem
from jaxpar.config.keys import nearest_name
from jaxpar.config.toml_file import key_lines, read_text, syntax_problem
from jaxpar.families.keymap import ParamPath, TensorSource

_SECTIONS = ("params", "sizes", "ignore")
_ENTRY_KEYS = ("from", "rule")
_EXAMPLE = '"layers/q" = { from = "decoder/layers/query/kernel", rule = "embed layer heads head_dim -> ..." }'


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyMapFile:
    """What a key-map file says; the arguments of ``MappedTensors``."""

    plan: Mapping[ParamPath, TensorSource]
    """Where each parameter comes from."""
    sizes: Mapping[str, int]
    """Sizes by name that the shapes do not tell."""
    ignored: tuple[str, ...]
    """Patterns (full match) of stored names that are not read, or not all of them."""


def read_keymap_file(path: str | os.PathLike[str]) -> KeyMapFile:
    """Reads and checks a key-map file.

    Raises:
        ConfigError: The file cannot be read or is not TOML; or every unknown key, wrong value, parameter that is named
            twice and rule that cannot be read, each with its line.
    """
    text = read_text(Path(path))
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([syntax_problem(Path(path), text, error)]) from None
    reader = _Reader(str(path), key_lines(text))
    keymap = reader.keymap(tree)
    if reader.problems:
        raise ConfigError(reader.problems)
    return keymap


class _Reader:
    """One key-map file; collects everything that is wrong with it."""

    def __init__(self, path: str, lines: Mapping[str, int]):
        self.path = path
        self.lines = lines
        self.problems: list[Problem] = []

    def keymap(self, tree: Mapping[str, object]) -> KeyMapFile:
        for name in tree:
            if name not in _SECTIONS:
                self.unknown(name, name, _SECTIONS)
        params = tree.get("params", {})
        plan: dict[ParamPath, TensorSource] = {}
        if not isinstance(params, dict) or not params:
            self.refuse("params", "a key map needs at least one parameter", f"under [params] write {_EXAMPLE}")
        else:
            for key, path, entry in self.entries(params, "params", ()):
                self.add(plan, key, path, entry)
        return KeyMapFile(plan=plan, sizes=self.sizes(tree.get("sizes", {})), ignored=self.ignored(tree))

    def entries(
        self, table: Mapping[str, object], key: str, path: ParamPath
    ) -> Iterator[tuple[str, ParamPath, Mapping[str, object]]]:
        """(dotted key, parameter, entry): a table with "from" or "rule" is an entry, others are levels of the path."""
        for name, value in table.items():
            inner_key, inner_path = f"{key}.{name}", (*path, *name.split("/"))
            if not isinstance(value, dict) or not value:
                self.refuse(inner_key, "is not an entry of a key map", f"write {_EXAMPLE}", value)
            elif any(not isinstance(v, dict) for v in value.values()):
                yield inner_key, inner_path, value
            else:
                yield from self.entries(value, inner_key, inner_path)

    def add(self, plan: dict[ParamPath, TensorSource], key: str, path: ParamPath, entry: Mapping[str, object]) -> None:
        if not all(path) or path in plan:
            problem = "is given twice" if path in plan else "has an empty name in it"
            self.refuse(key, f"the parameter {'/'.join(path)} {problem}", "name every parameter once")
        for name in entry:
            if name not in _ENTRY_KEYS:
                self.unknown(f"{key}.{name}", name, _ENTRY_KEYS)
        missing = [name for name in _ENTRY_KEYS if not isinstance(entry.get(name), str)]
        for name in missing:
            value = entry.get(name, NO_VALUE)
            self.refuse(key, f"{name} is missing" if value is NO_VALUE else f"{name} is not text", _EXAMPLE, value)
        if missing:
            return
        try:
            plan[path] = TensorSource(entry["from"], entry["rule"])
        except ValueError as error:
            self.refuse(key, str(error), "docs/key-maps.md has the words of a rule, with examples", entry["rule"])

    def sizes(self, table: object) -> dict[str, int]:
        if not isinstance(table, dict):
            self.refuse("sizes", "is not a table of sizes", "write [sizes] and under it, e.g., head_dim = 128", table)
            return {}
        for name, size in table.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                self.refuse(f"sizes.{name}", "a size is an integer of at least 1", "e.g. head_dim = 128", size)
            elif not re.fullmatch(r"[A-Za-z]\w*", name):
                self.refuse(f"sizes.{name}", "is not a name that a rule can have", "use letters, digits and _", size)
        return table

    def ignored(self, tree: Mapping[str, object]) -> tuple[str, ...]:
        patterns = tree.get("ignore", [])
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            self.refuse("ignore", "is not a list of patterns", 'e.g. ignore = ["opt_state/.*", "step"]', patterns)
            return ()
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                self.refuse("ignore", f"is not a regular expression: {error}", r"put \ before . + * ( ) [ ]", pattern)
        return tuple(patterns)

    def unknown(self, key: str, name: str, known: tuple[str, ...]) -> None:
        nearest = nearest_name(name, known)
        meant = f"did you mean {nearest}? " if nearest else ""
        self.refuse(key, "unknown key", f"{meant}known: {', '.join(known)}")

    def refuse(self, key: str, message: str, remedy: str, value: object = NO_VALUE) -> None:
        self.problems.append(Problem(key=f"{self.where(key)} {key}", value=value, message=message, remedy=remedy))

    def where(self, key: str) -> str:
        """The file, with the line of a key or of the nearest table around it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else self.path
