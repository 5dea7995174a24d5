import collections
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.permutation import permuted

keys = st.tuples(st.integers(0, 2**70), st.integers(0, 2**40))


@given(st.integers(1, 600), keys)
def test_every_row_comes_exactly_once(num_rows, key):
    rows = permuted(np.arange(num_rows), num_rows, key)
    assert rows.dtype == np.int64
    assert sorted(rows) == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [4**8 - 1, 4**8, 4**8 + 1, 2**17 + 1, 4**9 + 1])
def test_every_row_comes_exactly_once_around_powers_of_two(num_rows):
    # Grain 0.2.18 loses the last of 4**k + 1 rows.
    assert (np.bincount(permuted(np.arange(num_rows), num_rows, (0, 1)), minlength=num_rows) == 1).all()


@given(st.integers(1, 2**62), keys, st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_a_place_does_not_depend_on_the_others_asked_for(num_rows, key, places):
    places = np.array(places) % num_rows
    rows = permuted(places, num_rows, key)
    assert rows.tolist() == [permuted(np.array([place]), num_rows, key)[0] for place in places]
    assert (rows >= 0).all()
    assert (rows < num_rows).all()
    assert len(set(rows)) == len(set(places))


@pytest.mark.parametrize("num_rows", [3, 5])
def test_all_permutations_are_equally_likely(num_rows):
    num_permutations = math.factorial(num_rows)
    counts = collections.Counter(tuple(permuted(np.arange(num_rows), num_rows, (key, 0))) for key in range(1200))
    expected = 1200 / num_permutations
    chi_squared = sum((count - expected) ** 2 for count in counts.values()) / expected
    chi_squared += expected * (num_permutations - len(counts))
    degrees = num_permutations - 1
    assert abs(chi_squared - degrees) < 4 * math.sqrt(2 * degrees)


def test_neighbours_are_scattered_over_all_rows():
    num_rows = 2**17 + 1
    rows = permuted(np.arange(num_rows), num_rows, (1, 0))
    assert all(np.ptp(part) > 0.9 * num_rows for part in np.array_split(rows, 1000))
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(num_rows), rows)[0, 1]) < 0.02
