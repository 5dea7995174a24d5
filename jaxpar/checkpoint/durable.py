"""Files that a kill, a full disk or a power cut leaves old or new, never half."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, text: str) -> None:
    """Writes a file under another name, ``....writing``, and gives it its own when all of it is on the disk."""
    unfinished = path.with_name(f"{path.name}.writing")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.rename(path)
