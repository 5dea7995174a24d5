"""Every token counts the same, however tokens are spread over microbatches, rows and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.mesh import make_mesh
from jaxpar.sharding import batch_sharding
from jaxpar.state import ModelDefinition
from jaxpar.step import accumulate
from tests.model.samples import sample_params
from tests.parity.harness import build, gradient_errors, parity_config, placed

MESHES = [{}, {"data": 2}, {"fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}]


class Scale(nnx.Module):
    """The least model: one number, times which every loss is."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        self.scale = nnx.Param(jnp.ones((2,)), logical_axes=("embed",))


def scaled(model: Scale, microbatch: dict) -> tuple:
    """Losses that the batch holds itself, times the mean of the scale, which is 1."""
    weights = microbatch["weights"]
    total = jnp.mean(model.scale[...]) * jnp.sum(microbatch["losses"] * weights)
    return total, jnp.sum(weights), {"cross_entropy": 10 * total}


@functools.cache
def accumulated(mesh_sizes: tuple):
    """Host arrays [microbatches, rows, sequence] -> gradients and metrics on the host."""
    sizes = dict(mesh_sizes)
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))])
    definition = ModelDefinition(Scale)
    params = jax.tree.map(
        lambda leaf: jax.device_put(jnp.ones(leaf.shape), leaf.sharding), definition.abstract_on(mesh)
    )
    compiled = jax.jit(lambda params, batch: accumulate(definition, scaled, params, batch))

    def run(losses: np.ndarray, weights: np.ndarray):
        batch = {"losses": losses.astype(np.float32), "weights": weights.astype(np.float32)}
        with jax.set_mesh(mesh):
            on_mesh = {name: jax.device_put(array, batch_sharding(mesh)) for name, array in batch.items()}
            return jax.device_get(compiled(params, on_mesh))

    return run


def uneven(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Two microbatches: 11 tokens with mean loss 2.0 and 101 with mean loss 3.0, spread over rows; others have none."""
    rng = np.random.default_rng(0)
    losses, weights = rng.normal(size=(2, num_rows, 64)), np.zeros((2, num_rows, 64))
    for index, (count, mean) in enumerate(((11, 2.0), (101, 3.0))):
        # A few in the first row, the rest from the last row backwards.
        places = [index, 0], [index, -1]
        weights[*places[0], :5] = 1
        weights[index].reshape(-1)[-(count - 5) :] = 1
        counted = weights[index] > 0
        losses[index][counted] += mean - losses[index][counted].mean()
        assert counted.sum() == count
    return losses, weights


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_microbatches_count_by_their_tokens(sizes):
    """(11 x 2.0 + 101 x 3.0) / 112 = 2.9018, where a mean of means would be 2.5."""
    losses, weights = uneven(num_rows=4)
    grads, metrics = accumulated(tuple(sizes.items()))(losses, weights)
    assert metrics["loss"] == pytest.approx(2.9018, abs=5e-5)
    assert metrics["loss"] == pytest.approx((11 * 2.0 + 101 * 3.0) / 112, rel=1e-6)
    assert metrics["cross_entropy"] == pytest.approx(10 * metrics["loss"], rel=1e-6)
    assert metrics["tokens"] == 112
    # Not divided by the number of devices, nor added up more than once.
    np.testing.assert_allclose(grads["scale"], metrics["loss"] / 2, rtol=1e-6)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_batch_without_tokens_gives_zeros(sizes):
    losses, weights = uneven(num_rows=4)
    grads, metrics = accumulated(tuple(sizes.items()))(losses, 0 * weights)
    assert metrics == {"loss": 0, "cross_entropy": 0, "tokens": 0}
    assert not grads["scale"].any()


def test_fractional_weights_are_weights():
    losses, weights = uneven(num_rows=4)
    weights *= np.random.default_rng(1).random(weights.shape)
    _, metrics = accumulated(())(losses, weights)
    assert metrics["loss"] == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-5)


@functools.cache
def decoder_gradients(microbatches: int) -> tuple[dict, dict]:
    """A real decoder on two rows with 10 and 100 labelled tokens, in one microbatch or two."""
    program = build(
        parity_config(
            {},
            model={"num_layers": 1},
            data={"seq_len": 128},
            train={"global_batch_size": 2, "microbatches": microbatches},
        )
    )
    rng = np.random.default_rng(0)
    length = np.arange(128)
    batch = {
        "tokens": rng.integers(0, 151, (2, 128)),
        "labels": rng.integers(0, 151, (2, 128)),
        "positions": np.stack([length, length]),
        "segment_ids": np.stack([length < 11, length < 101]),
        "weights": np.stack([length < 10, length < 100]),
    }
    shape = (microbatches, 2 // microbatches, 128)
    arrays = {name: batch[name].astype(leaf.dtype).reshape(shape) for name, leaf in program.abstract_batch.items()}
    with jax.set_mesh(program.mesh):
        run = jax.jit(lambda params, batch: accumulate(program.definition, program.loss_fn, params, batch))
        return jax.device_get(run(sample_params(program), placed(program, arrays)))


def test_one_row_at_a_time_equals_both_at_once():
    (together, both), (apart, each) = decoder_gradients(1), decoder_gradients(2)
    assert both["tokens"] == each["tokens"] == 110
    assert each["loss"] == pytest.approx(float(both["loss"]), rel=1e-6)
    errors = gradient_errors(apart, together)
    assert max(errors.values()) < 1e-6, errors


def test_padding_of_the_vocabulary_gets_no_gradient():
    """The padded rows of these parameters are not zero, and the id of the padding is never looked up."""
    grads, _ = decoder_gradients(1)
    assert grads["embedding"].shape == grads["head"].T.shape == (152, 32)
    assert not grads["embedding"][151:].any()
    assert not grads["head"][:, 151:].any()
    assert grads["embedding"][:151].any(axis=0).all()
    assert grads["head"][:, :151].any(axis=0).all()
