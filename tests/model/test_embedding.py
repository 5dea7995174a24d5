"""The embedding looks up what indexing looks up, and its gradient adds up what scattering adds up, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import defer_reduction, finish_reduction, spec_of
from jaxpar.mesh import make_mesh
from jaxpar.model.layers import embed
from jaxpar.sharding import batch_entry, sequence_entry, spec_for

VOCAB, EMBED, ROWS, LENGTH = 24, 16, 8, 8
MESHES = [
    {},
    {"tensor": 8},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
]


@pytest.fixture(scope="module", params=MESHES, ids=str)
def mesh(request) -> jax.sharding.Mesh:
    return make_mesh(request.param, jax.devices()[: 8 if request.param else 1])


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Table, tokens (the first and last id among them, many repeated), and a weight per looked-up element."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB // 2, (ROWS, LENGTH))
    tokens[0, :2] = 0, VOCAB - 1
    return rng.normal(size=(VOCAB, EMBED)).astype(np.float32), tokens, rng.integers(-4, 5, (ROWS, LENGTH, EMBED))


def placed(mesh, table, tokens, weights):
    table_spec = spec_for("embedding", ("vocab", "embed"), table.shape, mesh)
    rows = batch_entry(mesh)
    return (
        jax.device_put(table, NamedSharding(mesh, table_spec)),
        jax.device_put(tokens.astype(np.int32), NamedSharding(mesh, P(rows, None))),
        jax.device_put(weights.astype(np.float32), NamedSharding(mesh, P(rows, sequence_entry(mesh), None))),
    )


@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_those_of_the_table(mesh, rows, compute):
    with jax.set_mesh(mesh):
        table, tokens, weights = placed(mesh, *rows)
        looked_up = jax.jit(lambda table, tokens: embed(table, tokens, compute))(table, tokens)
    np.testing.assert_array_equal(looked_up, jnp.asarray(rows[0])[rows[1]].astype(compute))
    # Laid out as between blocks, so that no block has to move it.
    assert looked_up.sharding.is_equivalent_to(weights.sharding, 3)


def test_gradient_adds_up_every_use_of_a_row(mesh, rows):
    """With integers, so that sums are exact: each token of each device counts once; unused ids get exactly 0."""

    def gradient(table, tokens, weights):
        marked = defer_reduction(table)
        grad = jax.grad(lambda table: jnp.sum(embed(table, tokens, jnp.float32) * weights))(marked)
        return finish_reduction(grad)

    with jax.set_mesh(mesh):
        table, tokens, weights = placed(mesh, *rows)
        grad = jax.jit(gradient)(table, tokens, weights)
    expected = np.zeros((VOCAB, EMBED))
    np.add.at(expected, rows[1], rows[2])
    np.testing.assert_array_equal(grad, expected)
    assert spec_of(grad) == spec_of(table)


def test_gradient_without_deferral_is_the_same(mesh, rows):
    """A table that nobody marked: its gradient is complete at once."""
    with jax.set_mesh(mesh):
        table, tokens, weights = placed(mesh, *rows)
        loss = lambda table: jnp.sum(embed(table, tokens, jnp.float32) * weights)  # noqa: E731
        grad = jax.jit(jax.grad(loss))(table)
    expected = np.zeros((VOCAB, EMBED))
    np.add.at(expected, rows[1], rows[2])
    np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str, indirect=True)
def test_gradient_of_a_bfloat16_table_is_added_up_in_float32(mesh):
    """One token a thousand times: a sum in bfloat16 would stop at 256."""
    table = np.zeros((VOCAB, EMBED), jnp.bfloat16)
    tokens, ones = np.zeros((ROWS, 128)), np.ones((ROWS, 128, EMBED))

    def gradient(table, tokens, weights):
        marked = defer_reduction(table)
        return finish_reduction(jax.grad(lambda table: jnp.sum(embed(table, tokens, jnp.float32) * weights))(marked))

    with jax.set_mesh(mesh):
        grad = jax.device_get(jax.jit(gradient)(*placed(mesh, table, tokens, ones)))
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad[0].astype(np.float32), ROWS * 128)
