"""What a checkpoint holds, from its metadata alone: works on any machine, for any saved mesh, and reads no arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.arrays import TREE_FILE, StepArrays, StoredArray
from jaxpar.checkpoint.errors import DamagedCheckpointError, NoCheckpointError
from jaxpar.checkpoint.places import locate

_OPTIMIZER_WORDS = {"optimizer", "opt_state", "opt", "mu", "nu", "momentum"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoints directory, and one step of it."""

    directory: Path
    by_jaxpar: bool
    """False: another Orbax trainer wrote it, so nothing says whether a step is whole."""
    steps: tuple[int, ...]
    """Complete steps, ascending."""
    skipped: tuple[tuple[int, str], ...]
    """(step, why) of steps that are not complete."""
    left_aside: tuple[str, ...]
    """Interrupted copies and steps that were set aside, a line each."""
    step: int | None
    """The step that is described below; None for a tree that is no step of a directory."""
    step_directory: Path
    num_bytes: int
    """Bytes of its files."""
    num_params: int | None
    """Elements of the parameters; None if no leaf is known to be one."""
    leaves: Mapping[str, StoredArray]
    """Every array by name."""
    unreadable: Mapping[str, str]
    """Leaves that cannot be opened, with the reason."""
    metadata: Mapping[str, Any]
    """What was saved with it: data position, seed, config, ..."""

    @property
    def latest(self) -> int | None:
        """The newest complete step."""
        return self.steps[-1] if self.steps else None

    @property
    def complete(self) -> bool:
        """Whether every step that is there is complete and every leaf of the described one can be opened."""
        return not self.skipped and not self.unreadable


def describe(path: str, step: int | None = None) -> Description:
    """Describes a run, a checkpoints directory, one step, or an Orbax tree of another trainer.

    Args:
        path: Any of these.
        step: The step to describe; None takes the newest complete one.

    Raises:
        NoCheckpointError: There is no checkpoint, or no such step; says what is there.
    """
    directory, named = locate(path)
    if not directory.is_dir():
        raise NoCheckpointError(f"{directory} does not exist")
    step = named if step is None else step
    complete, skipped = commit.scan(directory)
    by_jaxpar = bool(complete) or any(map(_is_ours, directory.iterdir()))
    if not by_jaxpar and (foreign := _foreign_steps(directory)):
        complete, skipped = foreign, [entry for entry in skipped if entry[0] not in foreign]
    chosen = step if step is not None else max(complete, default=None)
    if chosen is None and (by_jaxpar or skipped or not next(directory.rglob(TREE_FILE), None)):
        why = "".join(f"; step {number}: {reason}" for number, reason in skipped)
        why += "".join(f"; {line}" for line in commit.left_aside(directory))
        raise NoCheckpointError(f"{directory} has no complete checkpoint{why}")
    step_directory = directory if chosen is None else directory / str(chosen)
    if not step_directory.is_dir():
        there = f"steps: {', '.join(map(str, complete))}" if complete else "it has no complete step"
        raise NoCheckpointError(f"{directory} has no step {chosen}; {there}")
    try:
        arrays = StepArrays(step_directory)
        leaves, unreadable = arrays.types, arrays.faults
    except DamagedCheckpointError as error:
        leaves, unreadable = {}, {str(step_directory): str(error)}
    return Description(
        directory=directory,
        by_jaxpar=by_jaxpar,
        steps=tuple(complete),
        skipped=tuple(skipped),
        left_aside=tuple(commit.left_aside(directory)),
        step=chosen,
        step_directory=step_directory,
        num_bytes=sum(file.stat().st_size for file in step_directory.rglob("*") if file.is_file()),
        num_params=count_params(leaves),
        leaves=leaves,
        unreadable=unreadable,
        metadata=commit.read_metadata(step_directory),
    )


def count_params(leaves: Mapping[str, StoredArray]) -> int | None:
    """Elements of the leaves under ``params`` that are not optimizer state; None if there is no such leaf."""
    sizes = [math.prod(leaf.shape) for name, leaf in leaves.items() if _is_param(name.split("/"))]
    return sum(sizes) if sizes else None


def _is_param(keys: list[str]) -> bool:
    return "params" in keys and not _OPTIMIZER_WORDS & set(keys)


def _is_ours(entry: Path) -> bool:
    return (entry / commit.COMMIT_MARK).exists() or "format_version" in commit.read_metadata(entry)


def _foreign_steps(directory: Path) -> list[int]:
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if entry.name.isdecimal() and entry.is_dir() and next(entry.rglob(TREE_FILE), None)
    )
