"""Checks every byte of a step against what was saved, with bounded memory and without devices to match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.arrays import StepArrays, StoredArray
from jaxpar.checkpoint.checksum import box_checksum, to_text
from jaxpar.checkpoint.chunks import as_index, box_bytes, boxes, slab_shape
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError

SLAB_BYTES = 128 * 2**20
"""Bytes of an array that are held at a time; reading, hashing and the chunks in flight take a few times as much."""

Progress = Callable[[int], None]
"""Told the bytes that were just checked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check of a step found."""

    step_directory: Path
    faults: tuple[str, ...]
    """Everything that is not as it was saved, a line each, naming the leaf or file. Empty: the step is whole."""
    notes: tuple[str, ...]
    """What could not be checked."""
    num_leaves: int
    """Arrays that were read and hashed."""
    num_bytes: int
    """Their bytes."""


def verify_step(step_directory: Path, progress: Progress = lambda _: None, *, slab_bytes: int = SLAB_BYTES) -> Verdict:
    """Reads a step whole: sizes and CRCs of its files, checksums of its arrays.

    Damage to a file is reported together with the leaves that can no longer be read, or are not what was saved.
    Checkpoints of other Orbax trainers have nothing to compare with: it is only seen whether they can be read.
    """
    mark = commit.read_commit_mark(step_directory)
    marked = (step_directory / commit.COMMIT_MARK).exists()
    faults = list(commit.step_faults(step_directory)) if marked else []
    notes = []
    if not marked:
        notes.append(
            f"no {commit.COMMIT_MARK}: not a finished save of jaxpar; it was only seen that arrays can be read"
        )
    elif mark is not None and not mark.checksums:
        notes.append("saved with format version 1, without checksums: it was only seen that arrays can be read")
    faults += [fault for fault in commit.content_faults(step_directory, data=True) if fault not in faults]
    try:
        arrays = StepArrays(step_directory)
    except DamagedCheckpointError as error:
        return _verdict(step_directory, [*faults, str(error), *_gone(mark, ())], notes, 0, 0)
    faults += [f"{name} cannot be opened: {why}" for name, why in arrays.faults.items()]
    faults += _gone(mark, (*arrays.types, *arrays.faults))
    num_bytes = 0
    for name, array in arrays.types.items():
        expected = mark.checksums.get(name) if mark is not None else None
        try:
            found = to_text(leaf_checksum(arrays, name, progress, slab_bytes=slab_bytes))
        except CheckpointError as error:
            faults.append(str(error))
            continue
        num_bytes += array.nbytes
        if expected is not None and found != expected:
            faults.append(f"{name}: its data is not what was saved (checksum {found}, saved {expected})")
        elif expected is None and mark is not None and mark.checksums:
            faults.append(f"{name} was not saved with this step")
    return _verdict(step_directory, faults, notes, len(arrays.types), num_bytes)


def leaf_checksum(
    arrays: StepArrays, name: str, progress: Progress = lambda _: None, *, slab_bytes: int = SLAB_BYTES
) -> np.ndarray:
    """Sums of one array, read slab by slab.

    Raises:
        DamagedCheckpointError: It cannot be read.
    """
    array: StoredArray = arrays.types[name]
    sums = np.zeros(2, np.uint32)
    slab = slab_shape(array.shape, array.read_chunk, array.dtype.itemsize, slab_bytes)
    for box in boxes(array.shape, slab):
        sums += box_checksum(arrays.read(name, as_index(box)), [start for start, _ in box])
        progress(box_bytes(box, array.dtype.itemsize))
    return sums


def _gone(mark: commit.Mark | None, present: tuple[str, ...]) -> list[str]:
    """Leaves that were saved and are no longer listed."""
    return [
        f"{name} is gone: the tree does not list it" for name in (mark.checksums if mark else ()) if name not in present
    ]


def _verdict(step_directory: Path, faults: list[str], notes: list[str], num_leaves: int, num_bytes: int) -> Verdict:
    return Verdict(
        step_directory=step_directory,
        faults=tuple(faults),
        notes=tuple(notes),
        num_leaves=num_leaves,
        num_bytes=num_bytes,
    )
