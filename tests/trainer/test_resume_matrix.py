"""A checkpoint does not know its mesh: bit-equal on any other, and a run that moves is the run that stayed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.unpad import leading_box
from jaxpar.config import AXES, config_to_toml
from jaxpar.config.schema import MeshConfig
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from tests.cli.command import ended, finish, start
from tests.trainer.runs import MESH, STEPS, assert_same_run, saved_arrays, tiny

MESHES = (
    {},
    {"data": 2},
    {"fsdp": 8},
    {"data": 8},
    {"tensor": 4},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 4},
    {"pipeline": 2, "tensor": 2},
    {"context": 2, "tensor": 2},
    {"fsdp": 2, "context": 4},
)


def name_of(mesh: dict[str, int]) -> str:
    return "x".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"


@pytest.fixture(scope="module")
def saved(uninterrupted) -> dict[str, np.ndarray]:
    """The last checkpoint of a run on data=2 x fsdp=2 x tensor=2."""
    return saved_arrays(uninterrupted.directory, STEPS)


def program_on(mesh: dict[str, int]) -> Program:
    num_devices = math.prod(mesh.values())
    config = tiny(Path("unused"), train={"global_batch_size": 16}, runtime={"cpu_devices": 0})
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh))
    return Program.build(resolve(config, num_devices=num_devices), jax.devices()[:num_devices])


def assert_restored_bit_by_bit(directory: Path, step: int, program: Program, saved: dict[str, np.ndarray]) -> None:
    """What a program restores from a run's checkpoint is what the checkpoint holds, laid out as the program has it."""
    with Store(directory / "checkpoints") as store:
        state, place = resume.restore(store, step, program)
    assert place.step == int(state.step) == step
    sections = {"params": state.params, "optimizer": state.optimizer}
    targets = jax.tree.leaves((program.abstract_state.params, program.abstract_state.optimizer))
    shapes = resume.stored_shapes(program, sections)
    compared = 0
    for (section, tree), leaf in itertools.product(sections.items(), saved):
        if leaf.startswith(f"{section}/"):
            array = next(a for p, a in leaves_by_path(tree, section).items() if path_string(section, p) == leaf)
            assert np.array_equal(np.asarray(leading_box(array, shapes.get(leaf, array.shape))), saved[leaf]), leaf
            compared += 1
    assert compared == len(saved)
    assert [a.sharding for a in jax.tree.leaves((state.params, state.optimizer))] == [t.sharding for t in targets]


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_parameters_moments_and_count_are_bit_equal_on_every_mesh_and_number_of_devices(uninterrupted, saved, mesh):
    assert_restored_bit_by_bit(uninterrupted.directory, STEPS, program_on(mesh), saved)


def test_a_tied_weight_is_stored_once_and_moves_between_tensor_sizes(tmp_path):
    """With its one set of moments; five times, as the order of names must not matter."""
    rng = np.random.default_rng(0)

    def tied(tensor: int) -> Program:
        config = tiny(Path("unused"), model={"tie_embeddings": True}, runtime={"cpu_devices": 0})
        config = dataclasses.replace(config, mesh=MeshConfig(tensor=tensor))
        return Program.build(resolve(config, num_devices=tensor), jax.devices()[:tensor])

    program = tied(4)
    sections = {name: getattr(program.abstract_state, name) for name in resume.SECTIONS}
    shapes = resume.stored_shapes(program, sections)

    def filled(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.asarray(rng.standard_normal(leaf.shape) * 9).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    state = jax.tree_util.tree_map_with_path(filled, sections)
    vocab = program.config.model.vocab_size
    others = [tied(2), tied(1)]
    for attempt in range(5):
        with Store(tmp_path / str(attempt)) as store:
            metadata = {"position": {"epoch": 0, "offset": 0}, "tokens_seen": 0}
            store.save(attempt, state, metadata, stored_shapes=shapes)
            store.wait()
            names = store.leaves(attempt)
            assert "params/head" not in names
            assert sum("embedding" in name for name in names) == 3  # itself, mu, nu
            for other in others:
                restored, _ = resume.restore(store, attempt, other)
                got = jax.tree.leaves((restored.params, restored.optimizer))
                want = jax.tree.leaves((state["params"], state["optimizer"]))
                for a, b in zip(got, want, strict=True):
                    a, b = (np.asarray(x)[:vocab] if x.shape[:1] == (152,) else np.asarray(x) for x in (a, b))
                    assert np.array_equal(a, b)


# --- whole runs, in processes of their own ----------------------------------------------------------------------------

LEGS = {
    "8, 4 and 1 devices": ({"fsdp": 8}, {"data": 2, "fsdp": 2}, {}),
    "1, 8 and 2 devices": ({}, MESH, {"tensor": 2}),
    "4, 8 and 8 devices": ({"fsdp": 2, "tensor": 2}, {"data": 8}, {"fsdp": 4, "tensor": 2}),
    "stages, none and stages": ({"pipeline": 2, "fsdp": 2}, {"data": 4}, {"pipeline": 2, "data": 2, "tensor": 2}),
    "three strategies": (
        {"pipeline": 2, "fsdp": 2, "fsdp_strategy": "optimizer"},
        {"pipeline": 2, "fsdp": 2, "fsdp_strategy": "grads"},
        {"fsdp": 2},
    ),
    "8, 2 and 4 devices, by context": ({"context": 8}, {"context": 2}, {"fsdp": 2, "context": 2}),
}


def leg(directory: Path, mesh: dict[str, int | str], tmp_path: Path, **train: object) -> None:
    """One run of the command on as many fake devices as the mesh has; one compilation of the training step."""
    train = {"global_batch_size": 16, **train}  # two microbatches on eight batch shards
    runtime = {"cpu_devices": math.prod(mesh.get(axis, 1) for axis in AXES)}
    config = tiny(directory, train=train, data={"num_samples": 48}, runtime=runtime)
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh))
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    process = start("train", "config.toml", cwd=tmp_path, environment={"JAX_LOG_COMPILES": "1"})
    with ended(process):
        result = finish(process)
    assert result.code == 0, result.err[-3000:]
    assert result.err.count("Finished XLA compilation of jit(train_step)") == 1


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory) -> Path:
    """Twelve steps without a stop, in a process with one device."""
    directory = tmp_path_factory.mktemp("one")
    leg(directory / "run", {}, directory)
    return directory / "run"


@pytest.mark.proof
@pytest.mark.parametrize("legs", LEGS)
def test_a_run_that_moves_twice_is_the_run_that_stayed_on_one_device(legs, on_one_device, tmp_path):
    directory = tmp_path / "run"
    for mesh, stop_at in zip(LEGS[legs], (4, 8, None), strict=True):
        leg(directory, mesh, tmp_path, stop_at=stop_at)
    assert_same_run(directory, on_one_device)
