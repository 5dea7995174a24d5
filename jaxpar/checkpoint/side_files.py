"""The files beside the weights of a Hugging Face directory: tokenizer, chat template, generation settings, licence."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxpar.checkpoint.errors import CheckpointError

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""Patterns of file names that go with the weights, whatever happens to these."""


def side_files(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """The side files of a directory, by name; empty when it has none."""
    directory = Path(directory)
    found = {path for pattern in SIDE_FILES for path in directory.glob(pattern) if path.is_file()}
    yield from sorted(found)


def copy_side_files(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Copies the side files of one directory into another, which is made if it does not exist.

    Nothing is written over: a file that is there already with the same content is left alone, so an interrupted copy
    can be repeated.

    Returns:
        Names of the files that the target now has from the source.

    Raises:
        CheckpointError: The target has other files of these names; names all of them, and nothing is copied.
    """
    target = Path(target)
    files = list(side_files(source))
    there = [path for path in files if (target / path.name).exists()]
    if others := [path.name for path in there if not filecmp.cmp(path, target / path.name, shallow=False)]:
        raise CheckpointError(
            f"{target} has its own {', '.join(others)}, other than those of {Path(source)}\n-> give another directory"
        )
    target.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path not in there:
            # A copy that is stopped leaves no file of the final name.
            partial = target / f"{path.name}.partial"
            shutil.copyfile(path, partial)
            partial.replace(target / path.name)
    return [path.name for path in files]
