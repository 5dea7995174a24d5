"""Copies arrays slab by slab from any reader into a step, within a bound on memory, checked against their checksums."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.checksum import box_checksum, to_text
from jaxpar.checkpoint.chunks import as_index, box_bytes, boxes, copy_slab
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.step_writer import StepWriter
from jaxpar.checkpoint.tensors import Progress, TensorReader

COPIES_OF_A_SLAB = 7
"""What a copy takes at worst, in slabs: one as read, in flight, hashed, converted; and the one before being written."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""

MAX_SLAB_BYTES = 256 * 2**20
"""Bigger slabs make nothing faster."""


@contextlib.contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """What the operating system says against writing a copy, as an error that says how to go on."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be written: {error.strerror or error}\n-> mend that and give the same command again: "
            "it goes on from there"
        ) from error


def give_back_freed_memory() -> None:
    """Makes the C library return big blocks to the system as soon as they are freed.

    glibc raises the size from which it does so with every block that is freed, up to 32 MiB, and keeps smaller ones in
    an arena per thread: a copy with slabs of 40 MB grew to three times what it held (1.1 GB checkpoint, glibc 2.36).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**18)
        mallopt(_M_TRIM_THRESHOLD, 2**20)


def slab_bytes_within(max_memory: int) -> int:
    """Bytes of a slab such that the process stays below ``max_memory`` bytes of resident memory.

    Raises:
        CheckpointError: The process without any slab needs most of that; says what would do.
    """
    give_back_freed_memory()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    reserve = resident + 128 * 2**20  # index caches, compiled hash functions
    slab = (max_memory - reserve) // COPIES_OF_A_SLAB
    least = 8 * 2**20
    if slab < least:
        needed = (reserve + COPIES_OF_A_SLAB * least) / 2**20
        raise CheckpointError(f"{max_memory / 2**20:.0f} MiB of memory are too few; give at least {needed:.0f} MiB")
    return min(slab, MAX_SLAB_BYTES)


def refuse_big_chunks(what: str, chunk_bytes: int, slab_bytes: int) -> None:
    """Raises CheckpointError for chunks of which not even one fits a slab; says how much more memory would do."""
    if chunk_bytes > slab_bytes:
        more = (chunk_bytes - slab_bytes) * COPIES_OF_A_SLAB
        raise CheckpointError(
            f"{what} has chunks of {chunk_bytes / 2**20:.0f} MiB, too big for this bound on memory\n"
            f"-> give {more / 2**20:.0f} MiB more"
        )


def copy_arrays(
    reader: TensorReader,
    writer: StepWriter,
    checksums: Mapping[str, str],
    *,
    slab_bytes: int,
    progress: Progress = lambda _: None,
) -> None:
    """Copies every array of the step that is not on disk yet; float types are converted to those of the step.

    Args:
        reader: Where arrays come from, under the names of the step's leaves.
        writer: Where they go; not closed here.
        checksums: Checksums of the arrays as they are read, of those for which there is one.
        slab_bytes: Bytes held at a time, unless a single chunk is bigger.
        progress: Told what was copied, and what was found copied.

    Raises:
        DamagedCheckpointError: What was read is not what was saved; names the leaf.
        CheckpointError: An array is of a chunk too big for the bound, or cannot be read or written.
    """
    for name, target in writer.arrays.items():
        stored = reader.types[name]
        itemsize = np.dtype(stored.dtype).itemsize
        widest = max(itemsize, target.dtype.itemsize)
        slab = copy_slab(target.shape, getattr(stored, "read_chunk", target.chunk), target.chunk, widest, slab_bytes)
        refuse_big_chunks(name, math.prod(slab) * widest, slab_bytes)
        writer.begin(name, slab)
        read = np.zeros(2, np.uint32)
        for number, box in enumerate(boxes(target.shape, slab)):
            if not writer.done(name, number):
                values = reader.read(name, as_index(box))
                origin = [start for start, _ in box]
                sums = box_checksum(values, origin)
                converted = values.astype(target.dtype, copy=False)
                written = sums if converted is values else box_checksum(converted, origin)
                writer.write(name, number, as_index(box), converted, written, sums)
            read += writer.sums_read(name, number)
            progress(box_bytes(box, itemsize))
        if name in checksums and to_text(read) != checksums[name]:
            raise DamagedCheckpointError(
                f"{name}: its data is not what was saved (checksum {to_text(read)}, saved {checksums[name]}); "
                f"nothing was put in place, {writer.work} may be removed"
            )
