"""Where a command's results go: standard output for tables, files that options name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from jaxpar.config import ConfigError, Problem

_PIPED_WIDTH = 160
"""Columns where no terminal says how many it has."""


def check_writable(option: str, file: Path | None) -> None:
    """Before minutes or hours of work: the file of an option can be written.

    Raises:
        ConfigError: It is a directory, or lies in none.
    """
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        remedy = "name a file in a directory that exists"
        raise ConfigError([Problem(key=option, value=str(file), message="cannot be written", remedy=remedy)])


def output_console(*, highlight: bool = True) -> Console:
    """A console as wide as the terminal; where there is none, wide enough for tables to stay on a line."""
    console = Console(highlight=highlight)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends to standard error what is meant for standard output, also what native code writes there (gloo does)."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
