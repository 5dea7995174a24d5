"""The same elements are dropped on every mesh, accumulation and recomputation; the others keep the mean."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.experiments.parity import packed_batch
from jaxpar.mesh import make_mesh
from jaxpar.model.dropout import ATTENTION, EMBEDDING, MLP, dropped, layer_keys, token_keys
from tests.parity.harness import build, parity_config

RATE = 0.25
ROWS, LENGTH = 8, 16


def keys(seed: int = 0, step: int = 0, microbatches: int = 1, rows: int = ROWS) -> np.ndarray:
    like = jnp.zeros((microbatches, rows // microbatches, LENGTH), jnp.int32)
    return np.asarray(token_keys(seed, jnp.int32(step), like)).reshape(rows, LENGTH)


def kept(keys_bs: np.ndarray, place: int = MLP, width: int = 64) -> np.ndarray:
    return np.asarray(dropped(jnp.ones((*keys_bs.shape, width)), jnp.asarray(keys_bs), place, RATE)) > 0


def test_a_share_is_dropped_and_the_mean_stays():
    x = np.asarray(dropped(jnp.ones((8, 256, 64)), jnp.asarray(keys(rows=128).reshape(8, 256)), MLP, RATE))
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / (1 - RATE))}
    deviation = math.sqrt(RATE * (1 - RATE) / x.size)
    assert (x == 0).mean() == pytest.approx(RATE, abs=5 * deviation)
    for dims in ((0, 1), (2,)):  # neither features nor tokens are favoured
        means = (x == 0).mean(dims)
        assert np.abs(means - RATE).max() < 6 * math.sqrt(RATE * (1 - RATE) / (x.size / means.size))


def test_masks_of_different_things_are_unrelated():
    """Two masks agree where chance makes them agree."""
    first = kept(keys())
    agree = RATE**2 + (1 - RATE) ** 2
    others = {
        "seed": kept(keys(seed=1)),
        "step": kept(keys(step=1)),
        "layer": kept(np.asarray(layer_keys(jnp.asarray(keys()), jnp.uint32(0)))),
        "place": kept(keys(), ATTENTION),
        "embedding": kept(keys(), EMBEDDING),
        "next row": np.roll(first, 1, 0),
        "next position": np.roll(first, 1, 1),
        "next feature": np.roll(first, 1, 2),
    }
    for name, other in others.items():
        assert (first == other).mean() == pytest.approx(agree, abs=0.03), name


def test_keys_depend_on_the_row_of_the_batch_and_not_on_its_microbatch_or_mesh():
    expected = keys()
    np.testing.assert_array_equal(keys(microbatches=2), expected)
    np.testing.assert_array_equal(keys(microbatches=4), expected)
    assert len(np.unique(expected)) == expected.size
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    like = jax.device_put(
        np.zeros((2, ROWS // 2, LENGTH), np.int32), NamedSharding(mesh, P(None, ("data", "fsdp"), None))
    )
    with jax.set_mesh(mesh):
        sharded = jax.jit(functools.partial(token_keys, 0))(jnp.int32(0), like)
    assert sharded.sharding == like.sharding
    np.testing.assert_array_equal(np.asarray(sharded).reshape(ROWS, LENGTH), expected)


def test_nothing_is_dropped_without_keys_or_rate():
    x = jnp.ones((2, 4, 8))
    assert dropped(x, None, MLP, RATE) is x
    assert dropped(x, jnp.zeros((2, 4), jnp.uint32), MLP, 0.0) is x


def trained(mesh: dict, remat: str, microbatches: int, pipeline: dict = {}, **model: object) -> dict:  # noqa: B006
    """Two production steps of plain gradient descent, so that parameters show every gradient."""
    train = {"dropout": RATE, "remat": remat, "microbatches": microbatches, "global_batch_size": ROWS}
    optim = {"name": "sgd", "eps": None, "momentum": 0.0, "lr": 1.0, "warmup_steps": 0, "clip_norm": 0.0}
    program = build(parity_config(mesh, model=model, train=train, optim=optim, pipeline=pipeline))
    one = parity_config({}, model=model, train={"global_batch_size": ROWS})
    step, state, losses = program.lower_train_step().compile(), program.init(0), []
    for seed in range(2):
        batch = packed_batch(one, seed)  # the same rows, however they are cut into microbatches
        placed = {
            name: jax.device_put(batch[name].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.abstract_batch.items()
        }
        state, metrics = step(state, placed)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return {"losses": losses, **program.definition.without_padding(jax.device_get(state.params))}


@functools.cache
def alone(**model: object) -> dict:
    return trained({}, "full", 1, **model)


def assert_alike(actual: dict, expected: dict) -> None:
    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-5)
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1e-2, np.abs(want).max()), err_msg=str(path))


def test_training_is_the_same_on_a_mesh_with_other_microbatches_and_recomputation():
    assert_alike(trained({"fsdp": 4, "tensor": 2}, "none", 2), alone())


@pytest.mark.proof
@pytest.mark.parametrize(
    ("mesh", "remat", "microbatches"),
    [
        ({"fsdp": 8}, "full", 1),
        ({"fsdp": 4, "tensor": 2}, "full", 2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "none", 1),
        ({"context": 2, "tensor": 2}, "full", 1),
        ({"fsdp": 2, "context": 2}, "none", 2),
        ({}, "none", 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_every_way_to_train_drops_the_same(mesh, remat, microbatches, family):
    model = {"family": family, **({"max_positions": LENGTH, "num_kv_heads": 8} if family == "gpt2" else {})}
    assert_alike(trained(mesh, remat, microbatches, **model), alone(**model))


EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "top_k": 2, "expert_mlp_dim": 16, "num_layers": 2}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("mesh", "model", "pipeline"),
    [
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"num_layers": 4}, {}),
        (
            {"pipeline": 2, "fsdp": 2, "tensor": 2},
            {"num_layers": 5},
            {"schedule": "interleaved", "chunks": 2, "layers_per_stage": [1, 2, 1, 1]},
        ),
        ({"pipeline": 2, "data": 2, "context": 2}, {"num_layers": 4}, {}),
        ({"pipeline": 2, "data": 2, "expert": 2}, EXPERTS, {}),
    ],
    ids=("1f1b", "interleaved, uneven", "context", "experts"),
)
def test_stages_drop_what_one_device_drops(mesh, model, pipeline):
    assert_alike(trained(mesh, "full", 2, pipeline, **model), alone(**model))


@pytest.mark.proof
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 2, "context": 2, "tensor": 2}], ids=str
)
def test_experts_get_what_one_device_leaves_them(mesh):
    assert_alike(trained(mesh, "full", 1, **EXPERTS), alone(**EXPERTS))
