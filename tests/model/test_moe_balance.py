"""The balance term: one definition on every layout, whose gradient reaches the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config.schema import ModelConfig
from jaxpar.mesh import make_mesh
from jaxpar.model.dispatch import Exchange
from jaxpar.model.moe import MixtureOfExperts
from jaxpar.sharding import batch_entry, context_entry, spec_for

EXPERTS, EMBED, LENGTH, ROWS = 8, 8, 4, 2
SIZES = {"norm": EMBED, "router": EXPERTS, "experts": EXPERTS, "expert_embed": EMBED, "expert_mlp": 4}


def routing_of(mesh_sizes, x, segment_ids, router, top_k=1, **options):
    """``Routing`` of one block, and the gradient of its balance terms with respect to the router."""
    model = ModelConfig(embed_dim=EMBED, num_experts=EXPERTS, top_k=top_k, expert_mlp_dim=4, **options)
    num_devices = int(np.prod(list(mesh_sizes.values()), dtype=int))
    mesh = make_mesh(mesh_sizes, jax.devices()[:num_devices])
    rng = np.random.default_rng(0)

    def new(*axes):
        values = router if axes == ("norm", "router") else rng.normal(size=[SIZES[axis] for axis in axes])
        spec = spec_for("weight", axes, values.shape, mesh)
        return nnx.Param(jax.device_put(np.asarray(values, np.float32), NamedSharding(mesh, spec)))

    rows = P(batch_entry(mesh), context_entry(mesh))
    with jax.set_mesh(mesh):
        graph, weights = nnx.split(MixtureOfExperts(model, Exchange(), new, new, new))
        x = jax.device_put(x, NamedSharding(mesh, P(*rows, None)))
        segment_ids = jax.device_put(segment_ids, NamedSharding(mesh, rows))

        def balance(weights, x, segment_ids):
            formats = (jnp.dtype("float32"), jnp.dtype("float32"), "full")
            _, routing = nnx.merge(graph, weights)(x, P(*rows, None), segment_ids, *formats)
            return routing["balance"].sum(), routing

        gradient, routing = jax.jit(jax.grad(balance, has_aux=True))(weights, x, segment_ids)
    return jax.device_get(routing), np.asarray(jax.device_get(gradient["router"][...]))


@pytest.mark.parametrize("mesh", [{}, {"data": 2}, {"expert": 2}, {"context": 2}], ids=str)
def test_the_term_is_that_of_each_row(mesh):
    """All tokens of row 0 go to expert 0, all of row 1 to expert 1: each row is as uneven as can be.

    Counted over the whole batch, two of eight experts would share the load, and the value would be 4.
    """
    x = np.zeros((ROWS, LENGTH, EMBED), np.float32)
    x[0, :, 0] = x[1, :, 1] = 1
    routing, _ = routing_of(mesh, x, np.ones((ROWS, LENGTH), np.int32), 100 * np.eye(EXPERTS))
    np.testing.assert_allclose(routing["balance"], [EXPERTS, EXPERTS], rtol=1e-6)
    assert routing["load"].tolist() == [LENGTH, LENGTH, *[0] * (EXPERTS - 2)]
    np.testing.assert_allclose(routing["router_z"], [1e4, 1e4], rtol=1e-5)
    assert int(routing["tokens"]) == ROWS * LENGTH


def test_values_and_gradients_are_those_of_the_formula():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)
    segment_ids = np.ones((ROWS, LENGTH), np.int32)
    segment_ids[1, 3:] = 0
    router = rng.normal(size=(EMBED, EXPERTS)).astype(np.float32)
    routing, gradient = routing_of({"expert": 2}, x, segment_ids, router, top_k=2)

    tokens = [x[row][segment_ids[row] != 0] for row in range(ROWS)]
    chosen = [np.argsort(-(rows @ router), -1)[:, :2] for rows in tokens]  # softmax keeps the order
    frequencies = [np.bincount(choices.reshape(-1), minlength=EXPERTS) / choices.size for choices in chosen]

    def formula(router):
        shares = [jax.nn.softmax(rows @ router, -1).mean(0) for rows in tokens]
        return jnp.stack([EXPERTS * (f * share).sum() for f, share in zip(frequencies, shares, strict=True)])

    np.testing.assert_allclose(routing["balance"], formula(router), rtol=1e-5)
    expected = jax.grad(lambda router: formula(router).sum())(router)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
