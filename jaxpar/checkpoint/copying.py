"""Copies arrays slab by slab from any reader into a step, within a bound on memory, checked against their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.checksum import box_checksum, to_text
from jaxpar.checkpoint.chunks import as_index, box_bytes, boxes, copy_slab
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.step_writer import StepWriter
from jaxpar.checkpoint.tensors import TensorReader

Progress = Callable[[int], None]
"""Told the bytes of the source that were just copied."""

COPIES_OF_A_SLAB = 6
"""What a slab takes at worst, in slabs: as read, in flight, hashed, converted, being written."""

MAX_SLAB_BYTES = 256 * 2**20
"""Bigger slabs make nothing faster."""


def slab_bytes_within(max_memory: int) -> int:
    """Bytes of a slab such that the process stays below ``max_memory`` bytes of resident memory.

    Raises:
        CheckpointError: The process without any slab needs most of that; says what would do.
    """
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    reserve = resident + 128 * 2**20  # index caches, compiled hash functions
    slab = (max_memory - reserve) // COPIES_OF_A_SLAB
    least = 8 * 2**20
    if slab < least:
        needed = (reserve + COPIES_OF_A_SLAB * least) / 2**20
        raise CheckpointError(f"{max_memory / 2**20:.0f} MiB of memory are too few; give at least {needed:.0f} MiB")
    return min(slab, MAX_SLAB_BYTES)


def copy_arrays(
    reader: TensorReader,
    writer: StepWriter,
    sources: Mapping[str, str],
    checksums: Mapping[str, str],
    *,
    slab_bytes: int,
    progress: Progress = lambda _: None,
) -> None:
    """Copies every array of the step that is not on disk yet; float types are converted to those of the step.

    Args:
        reader: Where arrays come from.
        writer: Where they go; not closed here.
        sources: Name in the reader by leaf name of the step.
        checksums: Checksum by name in the reader, of those whose checksum is known.
        slab_bytes: Bytes held at a time, unless a single chunk is bigger.
        progress: Told what was copied, and what was found copied.

    Raises:
        DamagedCheckpointError: What was read is not what was saved; names the leaf.
        CheckpointError: An array is of a chunk too big for the bound, or cannot be read or written.
    """
    for name, source in sources.items():
        stored, target = reader.types[source], writer.arrays[name]
        itemsize = np.dtype(stored.dtype).itemsize
        slab = copy_slab(target.shape, getattr(stored, "read_chunk", target.chunk), target.chunk, itemsize, slab_bytes)
        whole = box_bytes(tuple((0, size) for size in slab), itemsize)
        if whole > slab_bytes:
            raise CheckpointError(
                f"{source} lies in chunks of {whole / 2**20:.0f} MiB; give at least "
                f"{(whole - slab_bytes) * COPIES_OF_A_SLAB / 2**20:.0f} MiB more memory"
            )
        read = np.zeros(2, np.uint32)
        for number, box in enumerate(boxes(target.shape, slab)):
            if not writer.done(name, number):
                values = reader.read(source, as_index(box))
                origin = [start for start, _ in box]
                sums = box_checksum(values, origin)
                converted = values.astype(target.dtype, copy=False)
                written = sums if converted is values else box_checksum(converted, origin)
                writer.write(name, number, as_index(box), converted, written, sums)
            read += writer.sums_read(name, number)
            progress(box_bytes(box, itemsize))
        if source in checksums and to_text(read) != checksums[source]:
            raise DamagedCheckpointError(
                f"{source}: its data is not what was saved (checksum {to_text(read)}, saved {checksums[source]}); "
                f"nothing was put in place, {writer.work} may be removed"
            )
