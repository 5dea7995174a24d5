"""How arrays are cut on disk and in memory: chunks for a mesh, slabs within a bound, and what a reader reads too much.

Arithmetic only, on shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
"""Start and stop in every dim."""

MAX_CHUNK_BYTES = 32 * 2**20
"""Upper bound of a chunk: the smallest piece that a reader fetches, and what a copy holds several of in memory."""


def box_bytes(box: Box, itemsize: int) -> int:
    """Bytes of the elements of a box."""
    return math.prod(stop - start for start, stop in box) * itemsize


def as_index(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def chunk_for_shards(
    shape: Sequence[int], shard: Sequence[int], itemsize: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, ...]:
    """Shape of chunks such that no chunk lies in two shards, as big as ``max_bytes`` allows.

    The first dims are cut first: a stack of layers becomes chunks of one layer, which readers that shard layers (stages
    of a pipeline) or anything behind them read without waste.

    Args:
        shape: Of the whole array on disk.
        shard: Of one shard; the last ones may reach beyond the array (padding).
        itemsize: Bytes of an element.
        max_bytes: Bound of a chunk.
    """
    chunk = [max(1, min(size, part)) for size, part in zip(shape, shard, strict=True)]
    for dim in range(len(chunk)):
        if math.prod(chunk) * itemsize <= max_bytes:
            break
        others = math.prod(chunk) // chunk[dim] * itemsize
        fitting = max(1, max_bytes // others)
        is_cut = shard[dim] < shape[dim]
        chunk[dim] = _dividing(shard[dim], fitting) if is_cut else fitting
    return tuple(chunk)


def _dividing(size: int, limit: int) -> int:
    """The largest divisor of ``size`` up to ``limit``; ``limit`` itself where that is less than a quarter of it.

    Then a few chunks lie in two shards, which costs less than a multitude of small chunks.
    """
    small = [i for i in range(1, math.isqrt(size) + 1) if size % i == 0]
    divisor = max(d for i in small for d in (i, size // i) if d <= limit)
    return divisor if 4 * divisor >= limit else limit


def slab_shape(shape: Sequence[int], chunk: Sequence[int], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """Shape of the slabs that a copy holds at once: whole chunks, last dims first, within ``max_bytes``.

    One chunk is the least, even beyond the bound.
    """
    slab = [min(size, part) for size, part in zip(shape, chunk, strict=True)]
    for dim in reversed(range(len(slab))):
        others = math.prod(slab) // max(1, slab[dim]) * itemsize
        fitting = max_bytes // max(1, others)
        if shape[dim] <= fitting:
            slab[dim] = shape[dim]
            continue
        slab[dim] = max(slab[dim], fitting // chunk[dim] * chunk[dim])
        break
    return tuple(slab)


def copy_slab(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], itemsize: int, max_bytes: int
) -> tuple[int, ...]:
    """Shape of the slabs of a copy from one chunking to another: whole chunks of the target.

    Where they fit, whole chunks of the source too, so that none is read twice.
    """
    both = [-(max(a, b) // -b) * b for a, b in zip(source, target, strict=True)]
    if math.prod(min(a, b) for a, b in zip(both, shape, strict=True)) * itemsize <= max_bytes:
        return slab_shape(shape, both, itemsize, max_bytes)
    return slab_shape(shape, target, itemsize, max_bytes)


def grid_amplification(
    shape: Sequence[int], shard: Sequence[int], chunk: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """(bytes needed, bytes fetched) by readers of all shards of an array, each fetching whole chunks.

    Args:
        shape: Of the array on disk.
        shard: Of one shard; shards tile the array, the last ones may reach beyond it.
        chunk: Of one chunk.
        itemsize: Bytes of an element.
    """
    needed = fetched = itemsize
    for size, part, step in zip(shape, shard, chunk, strict=True):
        shards = [((start, min(start + part, size)),) for start in range(0, size, max(1, part))]
        needed *= sum(stop - start for ((start, stop),) in shards)
        fetched *= sum(touched_bytes(shard_box, (size,), (step,), 1) for shard_box in shards)
    return needed, fetched


def boxes(shape: Sequence[int], slab: Sequence[int]) -> Iterator[Box]:
    """The boxes of a grid with that spacing, in row-major order; the last ones of a dim may be smaller."""
    ranges = [
        [(start, min(start + step, size)) for start in range(0, size, max(1, step))]
        for size, step in zip(shape, slab, strict=True)
    ]
    yield from itertools.product(*ranges)


def touched_bytes(box: Box, shape: Sequence[int], chunk: Sequence[int], itemsize: int) -> int:
    """Bytes of the chunks that a reader of the box fetches; those at the end of a dim count as far as the array."""
    total = itemsize
    for (start, stop), size, step in zip(box, shape, chunk, strict=True):
        if stop <= start:
            return 0
        total *= min(size, -(stop // -step) * step) - start // step * step
    return total
