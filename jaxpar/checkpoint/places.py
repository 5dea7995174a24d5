"""What a path of the user names: a run, its checkpoints, or one step of them."""

from __future__ import annotations

import os
from pathlib import Path

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.errors import DamagedCheckpointError, NoCheckpointError

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints inside a run directory."""


def locate(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The checkpoints directory that a path means, and the step if the path names one.

    Args:
        path: ``runs/a``, ``runs/a/checkpoints`` or ``runs/a/checkpoints/30``; need not exist.
    """
    path = Path(path)
    if path.name.isdecimal() and any((path / name).exists() for name in commit.STEP_FILES):
        return path.absolute().parent, int(path.name)
    inside = path / CHECKPOINTS
    return (inside if inside.is_dir() else path), None


def choose_step(path: str | os.PathLike[str], step: int | None = None) -> tuple[Path, int]:
    """Directory and number of a complete step: the one asked for, the one that the path names, or the newest.

    Raises:
        NoCheckpointError: There is none, or not that one; says which there are.
        DamagedCheckpointError: What is there is not complete.
    """
    directory, named = locate(path)
    if step is not None and named is not None and step != named:
        raise NoCheckpointError(f"{path} is step {named}, but step {step} is asked for")
    wanted = named if step is None else step
    complete, skipped = commit.scan(directory)
    why = dict(skipped)
    there = f"complete steps: {', '.join(map(str, complete))}" if complete else "it has no complete step"
    if wanted is None and not complete:
        reasons = "".join(f"; step {number}: {reason}" for number, reason in skipped)
        what = "has no complete checkpoint" if directory.is_dir() else "does not exist"
        kind = DamagedCheckpointError if skipped else NoCheckpointError
        raise kind(f"{directory} {what}{reasons}")
    if wanted is not None and wanted not in complete:
        kind = DamagedCheckpointError if wanted in why else NoCheckpointError
        raise kind(f"step {wanted} of {directory}: {why.get(wanted, 'it does not exist')}; {there}")
    return directory, complete[-1] if wanted is None else wanted
