"""Chunks for a mesh and slabs within a bound: properties of the arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.checkpoint.chunks import (
    MAX_CHUNK_BYTES,
    as_index,
    box_bytes,
    boxes,
    chunk_for_shards,
    copy_slab,
    grid_amplification,
    slab_shape,
    touched_bytes,
)

dims = st.lists(st.integers(1, 12), min_size=0, max_size=4).map(tuple)


@st.composite
def sharded(draw):
    """(shape on disk, shape of a shard): shards tile a padded shape that holds the one on disk."""
    shard = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    ways = [draw(st.integers(1, 4)) for _ in shard]
    shape = tuple(max(1, size * n - draw(st.integers(0, size - 1))) for size, n in zip(shard, ways, strict=True))
    return shape, tuple(shard)


@given(dims, st.data())
def test_boxes_hold_every_element_once(shape, data):
    slab = tuple(data.draw(st.integers(1, size)) for size in shape)
    counts = np.zeros(shape, int)
    for box in boxes(shape, slab):
        counts[as_index(box)] += 1
    assert (counts == 1).all()


@given(sharded(), st.sampled_from([1, 2, 4]), st.integers(1, 400))
def test_chunks_stay_within_the_bound_and_within_the_array(layout, itemsize, max_bytes):
    shape, shard = layout
    chunk = chunk_for_shards(shape, shard, itemsize, max_bytes)
    assert math.prod(chunk) * itemsize <= max(max_bytes, itemsize)
    assert all(1 <= part <= size for part, size in zip(chunk, shape, strict=True))


@given(sharded())
def test_a_reader_of_a_shard_fetches_nothing_else_where_chunks_are_whole_shards(layout):
    shape, shard = layout
    chunk = chunk_for_shards(shape, shard, 4)
    needed, fetched = grid_amplification(shape, shard, chunk, 4)
    assert needed == math.prod(shape) * 4
    assert fetched == needed


def test_chunks_of_real_arrays_are_cut_by_layer_first():
    # 8B: mlp [32, 4096, 14336] on fsdp=8: 7.3 MB a layer and shard, four of them are 29 MB
    assert chunk_for_shards((32, 4096, 14336), (32, 512, 14336), 4) == (1, 512, 14336)
    assert chunk_for_shards((32, 4096, 1024), (32, 512, 1024), 4) == (16, 512, 1024)
    # embedding [128256, 4096] on fsdp=8 x tensor=2: rows are cut, at divisors of the shard
    chunk = chunk_for_shards((128256, 4096), (64128, 512), 4)
    assert 64128 % chunk[0] == 0
    assert MAX_CHUNK_BYTES / 4 <= math.prod(chunk) * 4 <= MAX_CHUNK_BYTES
    # a prime vocabulary is not cut into single rows
    assert chunk_for_shards((50257, 8192), (50257, 8192), 4)[0] == MAX_CHUNK_BYTES // (8192 * 4)
    assert chunk_for_shards((100514, 8192), (50257, 8192), 4)[0] == MAX_CHUNK_BYTES // (8192 * 4)


@given(sharded(), st.data(), st.sampled_from([2, 4]), st.integers(8, 2000))
def test_slabs_are_whole_chunks_within_the_bound(layout, data, itemsize, max_bytes):
    shape, _ = layout
    source, target = (tuple(data.draw(st.integers(1, size)) for size in shape) for _ in range(2))
    for slab, chunk in (
        (slab_shape(shape, target, itemsize, max_bytes), target),
        (copy_slab(shape, source, target, itemsize, max_bytes), target),
    ):
        assert all(part == size or part % step == 0 for part, size, step in zip(slab, shape, chunk, strict=True))
        one_chunk = math.prod(min(a, b) for a, b in zip(chunk, shape, strict=True)) * itemsize
        assert math.prod(slab) * itemsize <= max(max_bytes, one_chunk)


@given(sharded(), st.data())
def test_what_a_reader_fetches_is_counted_as_it_is(layout, data):
    """Against counting the elements of every chunk that overlaps the box."""
    shape, shard = layout
    chunk = tuple(data.draw(st.integers(1, size)) for size in shape)
    expected = 0
    for box in boxes(shape, shard):
        fetched = np.zeros(shape, bool)
        for piece in boxes(shape, chunk):
            overlaps = all(a < d and c < b for (a, b), (c, d) in zip(box, piece, strict=True))
            if overlaps:
                fetched[as_index(piece)] = True
        assert touched_bytes(box, shape, chunk, 2) == fetched.sum() * 2
        expected += fetched.sum() * 2
    assert grid_amplification(shape, shard, chunk, 2) == (math.prod(shape) * 2, expected)


def test_a_copy_reads_no_chunk_twice_where_memory_allows():
    shape, source, target = (8, 64, 64), (8, 8, 64), (1, 64, 16)
    slab = copy_slab(shape, source, target, 4, 2**20)
    touched = sum(touched_bytes(box, shape, source, 4) for box in boxes(shape, slab))
    assert touched == box_bytes(tuple((0, size) for size in shape), 4)
    little = copy_slab(shape, source, target, 4, 2**13)
    assert math.prod(little) * 4 <= 2**13


def test_scalars_have_one_box():
    assert list(boxes((), ())) == [()]
    assert chunk_for_shards((), (), 4) == ()
    assert slab_shape((), (), 4, 100) == ()
    assert list(itertools.islice(boxes((0, 3), (1, 3)), 2)) == []
