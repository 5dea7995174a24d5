"""Runs production code on a mesh and returns everything that must not depend on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.config.schema import ModelConfig
from jaxpar.experiments.parity import packed_batch as random_batch
from jaxpar.experiments.parity import relative_differences as gradient_errors
from jaxpar.experiments.parity import scaled_differences
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.step import matmul_precision, update

DATA = Path(__file__).parents[1] / "data"

TINY = {
    "family": "qwen3",
    "vocab_size": 151,  # prime: divides by no axis
    "vocab_multiple": 8,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "mlp_dim": 64,
}


def parity_config(sizes: dict[str, int], **sections: dict) -> Config:
    """A tiny float32 run: 8 rows of 16 tokens; AdamW with eps 1e-3, so that rounding of small gradients stays small."""
    base = {
        "model": TINY,
        "mesh": sizes,
        "data": {"seq_len": 16, "num_samples": 64},
        "train": {"steps": 8, "global_batch_size": 8, "z_loss": 1e-3, "loss_chunk_tokens": 24},
        "precision": {"compute": "float32"},
        "optim": {"lr": 1e-2, "eps": 1e-3, "warmup_steps": 2, "clip_norm": 0.5},
    }
    return Config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


def build(config: Config) -> Program:
    """The program on as many of the fake devices as the mesh needs."""
    mesh = config.mesh
    num_devices = math.prod((mesh.pipeline, mesh.data, mesh.fsdp, mesh.expert, mesh.context, mesh.tensor))
    return Program.build(resolve(config, num_devices=num_devices), jax.devices()[:num_devices])


def placed(program: Program, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The batch on the program's mesh."""
    return {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in program.abstract_batch.items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a few steps computed, on the host."""

    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, float]]
    """What else each step reports."""
    grads: dict
    """Of the first step, before clipping."""
    init: dict
    params: dict
    """After the last step."""


def train(program: Program, num_steps: int = 3, params: dict | None = None) -> Outcome:
    """Some steps through ``accumulate`` and ``update``, the two halves of the production step, compiled as one."""
    config = program.config

    def step(state, batch):
        with matmul_precision(config):
            grads, metrics = program.accumulate(state.params, batch)
        return (*update(config, program.optimizer, state, grads, metrics), grads)

    state = program.init(config.run.seed) if params is None else program.start_from(params)
    on_host = lambda tree: program.definition.without_padding(jax.device_get(tree))  # noqa: E731
    init = on_host(state.params)
    losses, norms, others, grads = [], [], [], None
    with jax.set_mesh(program.mesh):
        compiled = jax.jit(step).lower(state, placed(program, random_batch(config))).compile()
        for index in range(num_steps):
            state, metrics, step_grads = compiled(state, placed(program, random_batch(config, seed=index)))
            losses.append(float(metrics.pop("loss")))
            norms.append(float(metrics.pop("grad_norm")))
            others.append(jax.device_get(metrics))
            grads = on_host(step_grads) if grads is None else grads
            assert_replicas_equal(state)
    params = on_host(state.params)
    return Outcome(losses=losses, grad_norms=norms, metrics=others, grads=grads, init=init, params=params)


@functools.cache
def single_device(model: tuple, microbatches: int, remat: str, rows: int = 8) -> Outcome:
    """The reference: one device, one microbatch layout; ``model`` is a tuple of (key, value)."""
    train_section = {"microbatches": microbatches, "remat": remat, "global_batch_size": rows}
    config = parity_config({}, model=dict(model), train=train_section)
    return train(build(config))


def assert_replicas_equal(tree: object) -> None:
    """Devices that hold the same part of an array hold the same bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts: dict = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            first = parts.setdefault(str(shard.index), data)
            assert first.tobytes() == data.tobytes(), f"{jax.tree_util.keystr(path)} differs between replicas"


def assert_same(actual: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    """The parity criterion: every metric, every gradient leaf, parameters after the steps; init bit for bit."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected.init):
        other = dict(jax.tree_util.tree_leaves_with_path(actual.init))[path]
        assert np.array_equal(leaf, other), f"initial {jax.tree_util.keystr(path)} depends on the mesh"
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=tolerance)
    np.testing.assert_allclose(actual.grad_norms, expected.grad_norms, rtol=tolerance)
    for step, (found, wanted) in enumerate(zip(actual.metrics, expected.metrics, strict=True)):
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=tolerance, err_msg=f"{name} of step {step}")
    errors = gradient_errors(actual.grads, expected.grads)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"gradient of {worst} is off by {errors[worst]:.1e}"
    for name, error in scaled_differences(actual.params, expected.params).items():
        assert error <= tolerance, f"{name} after the steps is off by {error:.1e}"


def model_key(model: ModelConfig | dict) -> tuple:
    """Hashable form of model options for ``single_device``."""
    return tuple(sorted({**TINY, **model}.items()))
