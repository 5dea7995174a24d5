"""Standard output for tables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console

_PIPED_WIDTH = 160
"""Columns where no terminal says how many it has."""


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
