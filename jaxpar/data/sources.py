"""Documents from text files: one file is one document, in an order that depends on names only."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from jaxpar.config import ConfigError, Problem

STDLIB_PREFIX = "stdlib:"
"""Patterns with this prefix are relative to the directory of Python's standard library."""

# Third-party packages are not the standard library, and its tests are not on every machine.
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_files(patterns: Sequence[str], *, key: str = "data.paths") -> list[Path]:
    """Returns the files that match ``patterns``: in the order of the patterns, sorted within each, each file once.

    Args:
      patterns: as in ``data.paths``; ``**`` matches any number of directories.
      key: where the patterns are from, for errors.

    Raises:
      ConfigError: there is no pattern, or one of them matches no file.
    """
    if not patterns:
        message, remedy = "no files are named", 'set data.paths, e.g. ["corpus/**/*.txt"], or data.source = "synthetic"'
        raise ConfigError([Problem(key=key, value=(), message=message, remedy=remedy)])
    files: dict[str, Path] = {}
    problems = []
    for pattern in patterns:
        matches = _match(pattern)
        if not matches:
            problems.append(_no_match(pattern, key))
        for path in matches:
            files.setdefault(os.path.realpath(path), path)
    if problems:
        raise ConfigError(problems)
    return list(files.values())


def read_documents(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Returns the text of each file, and notes for the user about files that were left out.

    Files that are not UTF-8 and files without any text are left out. Line ends are kept as they are.

    Raises:
      ConfigError: a file cannot be read, or none has text.
    """
    texts, not_utf8, empty = [], [], []
    for path in files:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            not_utf8.append(path)
            continue
        except OSError as error:
            remedy = "make the file readable, or write patterns that leave it out"
            raise ConfigError(
                [Problem(key="data.paths", value=str(path), message=str(error), remedy=remedy)]
            ) from error
        if text:
            texts.append(text)
        else:
            empty.append(path)
    notes = [
        f"{len(skipped)} of {len(files)} files skipped because they are {reason}: {_first_names(skipped)}"
        for skipped, reason in ((not_utf8, "not UTF-8"), (empty, "empty"))
        if skipped
    ]
    if not texts:
        message, remedy = f"no file has text: {'; '.join(notes)}", "give UTF-8 text files"
        raise ConfigError([Problem(key="data.paths", value=len(files), message=message, remedy=remedy)])
    return texts, notes


def _match(pattern: str) -> list[Path]:
    root, relative = _root_and_pattern(pattern)
    names = glob.glob(relative, root_dir=root, recursive=True)
    if pattern.startswith(STDLIB_PREFIX):
        names = [name for name in names if not _STDLIB_EXCLUDED.intersection(Path(name).parts)]
    return [path for name in sorted(names) if (path := Path(root, name)).is_file()]


def _root_and_pattern(pattern: str) -> tuple[str, str]:
    if pattern.startswith(STDLIB_PREFIX):
        return sysconfig.get_path("stdlib"), pattern.removeprefix(STDLIB_PREFIX)
    return "", pattern


def _no_match(pattern: str, key: str) -> Problem:
    root, relative = _root_and_pattern(pattern)
    if Path(root, relative).is_dir():
        remedy = f'it is a directory: for the files below it write "{pattern.rstrip("/")}/**/*.txt"'
    else:
        remedy = "patterns are relative to the working directory (stdlib: to the standard library); ** is any depth"
    where = f"under {root}" if root else f"(working directory: {Path.cwd()})"
    return Problem(key=key, value=pattern, message=f"matches no file {where}", remedy=remedy)


def _first_names(paths: Sequence[Path], limit: int = 3) -> str:
    names = ", ".join(str(path) for path in paths[:limit])
    return names if len(paths) <= limit else f"{names}, ..."
