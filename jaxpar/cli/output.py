"""Standard output for tables."""

from __future__ import annotations

from rich.console import Console

_PIPED_WIDTH = 160
"""Columns where no terminal says how many it has."""


def output_console(*, highlight: bool = True) -> Console:
    """A console as wide as the terminal; where there is none, wide enough for tables to stay on a line."""
    console = Console(highlight=highlight)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console
