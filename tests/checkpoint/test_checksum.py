"""The checksum of an array: the same however the array is cut, another for every change."""

from __future__ import annotations

import itertools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint.checksum import array_checksums, box_checksum, to_text
from jaxpar.checkpoint.chunks import as_index, boxes

DTYPES = (np.float32, np.int32, np.uint8, np.bool_, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)


def whole(values: np.ndarray) -> str:
    return to_text(box_checksum(values, (0,) * values.ndim))


def sample(dtype, shape=(6, 5, 4)) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * 3).astype(dtype)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_of_any_partition_into_boxes_add_up_to_those_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    values = data.draw(hnp.arrays(data.draw(st.sampled_from([np.uint8, np.float32])), shape))
    slab = tuple(data.draw(st.integers(1, size)) for size in shape)
    parts = [box_checksum(values[as_index(box)], [start for start, _ in box]) for box in boxes(shape, slab)]
    assert to_text(sum(parts, np.zeros(2, np.uint32))) == whole(values)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_devices_and_host_give_the_same_sums_on_every_mesh(axis_type):
    arrays = {
        "float32": sample(np.float32, (8, 16)),
        "bfloat16": sample(ml_dtypes.bfloat16, (8, 16)),
        "bool": sample(np.bool_, (8, 16)),
        "scalar": np.int32(7),
    }
    expected = [whole(np.asarray(values)) for values in arrays.values()]
    for shape, spec in (((8, 1), P("a")), ((2, 4), P("b", "a")), ((1, 1), P())):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"), axis_types=(axis_type,) * 2)
        on_mesh = {
            name: jax.device_put(values, NamedSharding(mesh, spec if np.ndim(values) else P()))
            for name, values in arrays.items()
        }
        sums = array_checksums(on_mesh, {})
        assert [to_text(row) for row in np.asarray(sums)] == expected
        assert sums.is_fully_replicated


def test_padding_does_not_count_whatever_it_holds():
    values = sample(np.float32, (5, 6))
    for filling in (0.0, 1.0):
        padded = jnp.pad(values, ((0, 3), (0, 2)), constant_values=filling)
        assert to_text(np.asarray(array_checksums({"a": padded}, {"a": (5, 6)}))[0]) == whole(values)
    assert to_text(np.asarray(array_checksums({"a": padded}, {}))[0]) != whole(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_flipped_bit_changes_the_first_sum(dtype):
    values = sample(dtype, (3, 5))
    clean, bits = box_checksum(values, (0, 0)), values.nbytes * 8
    for bit in range(0, bits, 1 if np.dtype(dtype) != np.bool_ else 8):
        damaged = bytearray(values.tobytes())
        damaged[bit // 8] ^= 1 << bit % 8
        again = np.frombuffer(bytes(damaged), dtype).reshape(values.shape)
        assert box_checksum(again, (0, 0))[0] != clean[0], bit


def test_elements_that_change_places_change_the_sums():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    seen = {whole(values)}
    for first, second in itertools.combinations(range(24), 2):
        swapped = values.copy().reshape(-1)
        swapped[[first, second]] = swapped[[second, first]]
        seen.add(whole(swapped.reshape(values.shape)))
    assert len(seen) == 1 + 24 * 23 // 2


def test_zeros_have_sums_too():
    """Otherwise a chunk that reads as zeros in place of a lost one would add nothing."""
    assert whole(np.zeros((4, 4), np.float32)) != whole(np.zeros((4, 5), np.float32)) != "0" * 16
