"""The grouped product of the CPU against one product per group, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.model.grouped import TILE_ROWS, grouped_product, tiled_product

ROWS, INNER, OUTER = 300, 6, 10


def reference(x, w, sizes):
    """numpy, group by group."""
    y, start = np.zeros((len(x), w.shape[2]), np.float32), 0
    for group, size in enumerate(sizes):
        y[start : start + size] = x[start : start + size] @ w[group]
        start += size
    return y


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(lambda x, w, sizes, dy: (tiled_product(x, w, sizes), *jax.vjp(tiled_product, x, w, sizes)[1](dy)))


@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 0, 0), (1, 0, 0, 2), (TILE_ROWS, TILE_ROWS, 0, 1), (5, 130, 64, 101), (300, 0, 0, 0), (0, 3, 0, 297)],
)
def test_every_group_has_its_own_matrix(compiled, sizes):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(ROWS, dim)).astype(np.float32) for dim in (INNER, OUTER))
    w = rng.normal(size=(4, INNER, OUTER)).astype(np.float32)
    y, dx, dw, _ = compiled(x, w, np.asarray(sizes, np.int32), dy)
    np.testing.assert_allclose(y, reference(x, w, sizes), atol=1e-5)
    np.testing.assert_allclose(dx, reference(dy, w.swapaxes(1, 2), sizes), atol=1e-5)
    starts = np.cumsum((0, *sizes))
    for group in range(4):
        rows = slice(starts[group], starts[group + 1])
        np.testing.assert_allclose(dw[group], x[rows].T @ dy[rows], atol=1e-4)


def test_rows_past_the_last_group_are_ignored_even_if_not_finite(compiled):
    x, dy = np.full((ROWS, INNER), np.nan, np.float32), np.full((ROWS, OUTER), np.nan, np.float32)
    x[:7], dy[:7] = 1, 1
    w = np.ones((4, INNER, OUTER), np.float32)
    y, dx, dw, _ = compiled(x, w, np.asarray((3, 0, 4, 0), np.int32), dy)
    assert np.all(np.asarray(y)[:7] == INNER)
    assert not np.asarray(y)[7:].any()
    assert np.all(np.asarray(dx)[:7] == OUTER)
    assert not np.asarray(dx)[7:].any()
    assert np.asarray(dw)[:, 0, 0].tolist() == [3, 0, 4, 0]


def test_elsewhere_it_is_the_product_of_lax():
    assert grouped_product("cpu") is tiled_product
    x, w = np.ones((8, 3), np.float32), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    sizes = jnp.asarray([5, 2])
    np.testing.assert_allclose(grouped_product("gpu")(x, w, sizes), tiled_product(x, w, sizes))
