"""Reading a TOML config file, with the line of every key."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.layers import Layer, flatten

_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_/\-.\"' ]+?)\s*=")
_STRINGS_AND_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*')
_AT_LINE = re.compile(r"\s*\(at line (\d+), column (\d+)\)|\s*\(at end of document\)")


def read_toml(path: str | os.PathLike, problems: list[Problem]) -> Layer:
    """Settings of a config file.

    Args:
        path: The file, relative to the working directory.
        problems: Collects unknown keys.

    Raises:
        ConfigError: The file is missing, unreadable or not TOML; nothing more can be said about it then.
    """
    text = read_text(Path(path))
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([syntax_problem(Path(path), text, error)]) from None
    lines = key_lines(text)

    def source_of(key: str) -> str:
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return f"{path}:{lines[key]}" if key else str(path)

    return flatten(tree, source_of, problems)


def key_lines(text: str) -> dict[str, int]:
    """Line number (from 1) of each dotted key and section header.

    tomllib reports no positions, so this scans for headers and assignments outside arrays and multi-line strings. It is
    for messages only: a key that it misses is reported with its section's line or the file alone.
    """
    lines: dict[str, int] = {}
    section, depth, quote = "", 0, None
    for number, line in enumerate(text.splitlines(), start=1):
        if quote is not None:
            quote = None if quote in line else quote
            continue
        if depth == 0 and (header := _HEADER.match(line)):
            section = _dotted(header[1])
            lines.setdefault(section, number)
            continue
        if depth == 0 and (assignment := _ASSIGNMENT.match(line)):
            name = _dotted(assignment[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
        quote = next((q for q in ('"""', "'''") if line.count(q) % 2), None)
        bare = _STRINGS_AND_COMMENT.sub("", line)
        depth = max(0, depth + sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}"))
    return lines


def _dotted(text: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: It is missing or unreadable; the message lists config files that exist.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([_missing_file(path)]) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start})"
        raise ConfigError([Problem(key=str(path), message=message, remedy="give a TOML file")]) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(key=str(path), message=message, remedy="give a readable TOML file")]) from None


def _missing_file(path: Path) -> Problem:
    nearby = sorted({str(found) for folder in (path.parent, Path("configs")) for found in folder.glob("*.toml")})
    closest = difflib.get_close_matches(str(path), nearby, n=8, cutoff=0.0)
    remedy = "files that exist: " + ", ".join(closest) if closest else "give the path of a TOML file"
    return Problem(key=str(path), message=f"no such config file (looked in {Path.cwd()})", remedy=remedy)


def syntax_problem(path: Path, text: str, error: Exception) -> Problem:
    """What keeps a text from being TOML, with its line."""
    position = _AT_LINE.search(str(error))
    reason = _AT_LINE.sub("", str(error)) if isinstance(error, ValueError) else "nested too deeply"
    if position and position[1]:
        number = int(position[1])
        shown = text.splitlines()[number - 1].strip() if number <= len(text.splitlines()) else ""
        return Problem(
            key=f"{path}:{number}",
            value=shown,
            message=f"not valid TOML: {reason} at column {position[2]}",
            remedy='write key = value under a [section]; strings in quotes, e.g. dir = "runs/x"',
        )
    where = f"{path}:{len(text.splitlines())}" if position else str(path)
    return Problem(key=where, message=f"not valid TOML: {reason}", remedy="close every quote, bracket and brace")
