"""The coefficients of the balance and z losses multiply: gradients are linear in them, reach the router, and are those
of one device whatever the mesh and the accumulation."""

import functools

import jax
import numpy as np
import pytest

from jaxpar.experiments.parity import packed_batch
from jaxpar.step import matmul_precision
from tests.parity.harness import build, parity_config, placed
from tests.parity.test_experts import SOFTMAX

pytestmark = pytest.mark.proof

NAMES = ("balance", "router_z")
TERMS = {"balance": "balance_loss", "router_z": "router_z_loss"}
WEAK, STRONG = 0.1, 1.0


@functools.cache
def step_on(balance: float, router_z: float, microbatches: int = 1, **mesh: int) -> tuple[dict, dict]:
    """Gradients and metrics of the production step's first half, on the host."""
    model = {**SOFTMAX, "balance_coef": balance, "router_z_coef": router_z}
    program = build(parity_config(mesh, model=model, train={"microbatches": microbatches}))
    rows = packed_batch(parity_config({}, model=model))
    batch = {key: array.reshape(microbatches, -1, array.shape[-1]) for key, array in rows.items()}

    def gradients(params, batch):
        with matmul_precision(program.config):
            return program.accumulate(params, batch)

    with jax.set_mesh(program.mesh):
        params = program.init(program.config.run.seed).params
        grads, metrics = jax.jit(gradients)(params, placed(program, batch))
        return program.definition.without_padding(jax.device_get(grads)), jax.device_get(metrics)


def leaves(grads: dict) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}


def added_by(name: str, coefficient: float) -> dict[str, np.ndarray]:
    """What a coefficient adds to every gradient, on one device."""
    with_it = leaves(step_on(**{**dict.fromkeys(NAMES, 0.0), name: coefficient})[0])
    without = leaves(step_on(0.0, 0.0)[0])
    return {path: with_it[path] - without[path] for path in without}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_linear_in_the_coefficient(name):
    weak, strong = added_by(name, WEAK), added_by(name, STRONG)
    router = next(path for path in strong if "router" in path)
    assert np.linalg.norm(strong[router]) > 0.01 * np.linalg.norm(leaves(step_on(0.0, 0.0)[0])[router])
    for path, change in strong.items():
        size = max(np.linalg.norm(change), 1e-3 * np.linalg.norm(strong[router]))
        assert np.linalg.norm(change - STRONG / WEAK * weak[path]) <= 1e-3 * size, path


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_holds_the_reported_term_times_its_coefficient(name):
    before, after = step_on(0.0, 0.0)[1], step_on(**{**dict.fromkeys(NAMES, 0.0), name: STRONG})[1]
    assert after[TERMS[name]] == pytest.approx(before[TERMS[name]], rel=1e-6)
    assert after["loss"] - before["loss"] == pytest.approx(STRONG * before[TERMS[name]], rel=1e-5)


@pytest.mark.parametrize(
    ("microbatches", "mesh"),
    [(2, {}), (1, {"data": 2}), (2, {"data": 4}), (1, {"fsdp": 2, "expert": 2}), (1, {"context": 2, "tensor": 2})],
    ids=str,
)
def test_both_are_those_of_one_device_on_every_layout(microbatches, mesh):
    """Made up of what each coefficient adds alone, so that a term lost or counted twice on a mesh shows."""
    grads, metrics = step_on(WEAK, STRONG, microbatches, **mesh)
    balance, router_z = added_by("balance", STRONG), added_by("router_z", STRONG)
    expected = {
        path: leaf + WEAK / STRONG * balance[path] + router_z[path]
        for path, leaf in leaves(step_on(0.0, 0.0)[0]).items()
    }
    whole = np.sqrt(sum(np.sum(leaf**2) for leaf in expected.values()))
    for path, leaf in leaves(grads).items():
        scale = max(np.linalg.norm(expected[path]), 1e-3 * whole)
        assert np.linalg.norm(leaf - expected[path]) <= 1e-5 * scale, path
    for name in TERMS.values():
        assert metrics[name] == pytest.approx(step_on(0.0, 0.0)[1][name], rel=1e-5)
