"""Loss and every gradient of the pipelined stack equal jax.grad of the plain one, for every schedule and mesh."""

import functools

import jax
import numpy as np
import pytest

from tests.pipeline.stack import Pipelined, plain, problem

CASES = {
    "1f1b on 4 stages": ("1f1b", {"pipeline": 4}, 8, 6),
    "interleaved with fsdp and tensor": ("interleaved", {"pipeline": 2, "fsdp": 2, "tensor": 2}, 4, 3, 2),
    "gpipe with fewer microbatches than stages, uneven layers": ("gpipe", {"pipeline": 4}, 6, 2, 1, "balanced"),
}
MORE_CASES = {
    "1f1b on 8 stages": ("1f1b", {"pipeline": 8}, 8, 8),
    "1f1b with fsdp and tensor": ("1f1b", {"pipeline": 2, "fsdp": 2, "tensor": 2}, 4, 4),
    "1f1b with data and fsdp": ("1f1b", {"pipeline": 2, "data": 2, "fsdp": 2}, 4, 4),
    "interleaved with data and tensor": ("interleaved", {"pipeline": 2, "data": 2, "tensor": 2}, 4, 4, 2),
    "1f1b with tensor": ("1f1b", {"pipeline": 4, "tensor": 2}, 4, 16),
    "1f1b with fsdp": ("1f1b", {"pipeline": 2, "fsdp": 4}, 4, 4),
    "1f1b on layers given by hand": ("1f1b", {"pipeline": 4, "fsdp": 2}, 7, 4, 1, [1, 3, 2, 1]),
    "gpipe": ("gpipe", {"pipeline": 4, "fsdp": 2}, 4, 8),
    "interleaved, 4 chunks": ("interleaved", {"pipeline": 2, "tensor": 2}, 8, 4, 4),
    "interleaved, stages do not divide microbatches": ("interleaved", {"pipeline": 4}, 8, 6, 2),
    "interleaved, uneven layers": ("interleaved", {"pipeline": 2, "fsdp": 2}, 6, 4, 2, "balanced"),
    "breadth first": ("breadth_first", {"pipeline": 4, "fsdp": 2}, 8, 5, 2),
}


@functools.cache
def oracle(num_layers, num_microbatches):
    """(loss, aux, tokens, squares), (gradients of layers, gradients of ends)."""
    gradient = jax.jit(jax.grad(plain, argnums=(0, 1), has_aux=True))
    gradients, sums = gradient(*problem(num_layers, num_microbatches))
    return jax.device_get((sums, gradients))


def assert_parity(kind, sizes, num_layers, num_microbatches, *rest):
    stack = Pipelined(kind, sizes, num_layers, num_microbatches, *rest)
    result = jax.device_get(stack.compile()(*stack.arguments))
    (*sums, squares), (layer_grads, end_grads) = oracle(num_layers, num_microbatches)
    np.testing.assert_allclose((result.loss, result.aux, result.sums["tokens"]), sums, rtol=1e-5)
    found = result.stage_sums["squares"].reshape(-1)[stack.split.place_of_layer]
    np.testing.assert_allclose(found, squares, rtol=1e-5)
    assert result.weight_grads["mask"] is None
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves((layer_grads, end_grads))))
    expected = {**layer_grads, **{f"end {name}": leaf for name, leaf in end_grads.items()}}
    for name, leaf in expected.items():
        if name.startswith("end "):
            found = result.end_grads[name.removeprefix("end ")]
        else:
            places = result.weight_grads[name].reshape(-1, *leaf.shape[1:])
            found = places[stack.split.place_of_layer]
            padded = np.delete(places, stack.split.place_of_layer, axis=0)
            assert not padded.any(), f"{name}: padding has a gradient"
        error = np.abs(found - leaf).max() / max(np.linalg.norm(leaf), 1e-3 * norm)
        assert error <= 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("case", CASES)
def test_parity(case):
    assert_parity(*CASES[case])


@pytest.mark.proof
@pytest.mark.parametrize("case", MORE_CASES)
def test_parity_of_all_schedules_and_meshes(case):
    assert_parity(*MORE_CASES[case])
