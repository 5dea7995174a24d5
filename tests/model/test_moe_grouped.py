"""Every grouped product that runs on a CPU against one product per group, and its gradients."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.experiments.compile.targets import SIDE_DIRECTORY
from jaxpar.model.grouped import GROUPED_PRODUCTS, differentiable

ROWS, INNER, OUTER = 301, 6, 10
SIZES = [(0, 0, 0, 0), (1, 0, 0, 2), (64, 64, 0, 1), (5, 130, 64, 101), (301, 0, 0, 0), (0, 3, 0, 297)]


def reference(x, w, sizes):
    """numpy, group by group."""
    y, start = np.zeros((len(x), w.shape[2]), np.float32), 0
    for group, size in enumerate(sizes):
        y[start : start + size] = x[start : start + size] @ w[group]
        start += size
    return y


def with_gradients(product):
    """Compiled (x, w, sizes, dy) -> y, dx, dw."""
    return jax.jit(lambda x, w, sizes, dy: (product(x, w, sizes), *jax.vjp(product, x, w, sizes)[1](dy)[:2]))


def check(compiled, sizes):
    """A product and both gradients against the loop over groups; rows past the last group hold numbers too."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(ROWS, dim)).astype(np.float32) for dim in (INNER, OUTER))
    w = rng.normal(size=(4, INNER, OUTER)).astype(np.float32)
    y, dx, dw = compiled(x, w, np.asarray(sizes, np.int32), dy)
    np.testing.assert_allclose(y, reference(x, w, sizes), atol=1e-5)
    np.testing.assert_allclose(dx, reference(dy, w.swapaxes(1, 2), sizes), atol=1e-5)
    starts = np.cumsum((0, *sizes))
    for group in range(4):
        rows = slice(starts[group], starts[group + 1])
        np.testing.assert_allclose(dw[group], x[rows].T @ dy[rows], atol=1e-4)


@pytest.fixture(scope="module")
def compiled():
    return with_gradients(GROUPED_PRODUCTS["tiles_64"])


@pytest.mark.parametrize("sizes", SIZES)
def test_every_group_has_its_own_matrix(compiled, sizes):
    check(compiled, sizes)


def test_a_tile_may_be_longer_than_all_rows():
    check(with_gradients(GROUPED_PRODUCTS["tiles_512"]), (5, 0, 64, 101))


def test_rows_past_the_last_group_are_ignored_even_if_not_finite(compiled):
    x, dy = np.full((ROWS, INNER), np.nan, np.float32), np.full((ROWS, OUTER), np.nan, np.float32)
    x[:7], dy[:7] = 1, 1
    w = np.ones((4, INNER, OUTER), np.float32)
    y, dx, dw = (np.asarray(a) for a in compiled(x, w, np.asarray((3, 0, 4, 0), np.int32), dy))
    assert np.all(y[:7] == INNER)
    assert not y[7:].any()
    assert np.all(dx[:7] == OUTER)
    assert not dx[7:].any()
    assert dw[:, 0, 0].tolist() == [3, 0, 4, 0]


def test_what_a_kernel_leaves_past_the_last_group_is_not_used():
    """GPU kernels do not write those rows: they hold whatever was in memory."""
    tiles = GROUPED_PRODUCTS["tiles_64"]

    def multiply(x, w, sizes):
        return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), tiles(x, w, sizes), jnp.nan)

    def sums(x, dy, sizes):
        return jax.vjp(lambda w: tiles(x, w, sizes), jnp.zeros((len(sizes), INNER, OUTER)))[1](dy)[0]

    check(with_gradients(differentiable(multiply, sums)), (5, 0, 64, 101))


TOKAMAX_AGAINST_A_LOOP = """
from functools import partial
from jaxpar.model.grouped import _tokamax, _tokamax_sums, differentiable
from tests.model.test_moe_grouped import SIZES, check, with_gradients

compiled = with_gradients(differentiable(partial(_tokamax, "xla"), partial(_tokamax_sums, "xla")))
for sizes in SIZES:
    check(compiled, sizes)
print("equal")
"""


@pytest.mark.proof
def test_tokamax_is_called_so_that_it_computes_our_product():
    """Its reference implementation on the CPU: both gradients, empty groups, rows past the last one, and an odd number
    of rows."""
    places = [*sys.path, str(SIDE_DIRECTORY)]
    finished = subprocess.run(
        [sys.executable, "-c", TOKAMAX_AGAINST_A_LOOP],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.stdout.strip() == "equal", finished.stderr[-3000:]
