"""The state of every optimizer is layout-free on disk: bit-equal on another mesh, and resharded like the parameters."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.checkpoint.safetensors import TensorDirectory
from jaxpar.checkpoint.store import Store
from jaxpar.convert import export, plan_export
from jaxpar.data.order import Position
from jaxpar.program import Program
from jaxpar.reshard import plan_resharding, reshard
from jaxpar.resume import Place
from tests.parity.harness import build, parity_config
from tests.trainer.runs import saved_arrays

OPTIMIZERS = {
    "adafactor": {"min_factored_dim": 16, "momentum": 0.9, "ema_decay": 0.9},
    "muon": {},
    "lion": {},
    "sgd": {},
}
STEP = 7


class NoRows:
    """A dataset as far as saving knows it."""

    identity: dict = {}


def program_on(mesh: dict[str, int], name: str) -> Program:
    return build(parity_config(mesh, optim={"eps": None, "name": name, **OPTIMIZERS[name]}))


def sections_of(state: object) -> dict[str, object]:
    return state.sections


def random_state(program: Program) -> dict[str, np.ndarray]:
    """Random values in the shapes on disk, by name."""
    rng = np.random.default_rng(0)
    sections = sections_of(program.abstract_state)
    shapes = resume.stored_shapes(program, sections)
    values = {}
    for section, tree in sections.items():
        for path, leaf in leaves_by_path(tree, section).items():
            name = path_string(section, path)
            values[name] = np.asarray(9 * rng.standard_normal(shapes.get(name, leaf.shape))).astype(leaf.dtype)
    return values


def placed(program: Program, values: dict[str, np.ndarray]) -> object:
    """A training state with these values, padded as in memory."""

    def filled(section: str, tree: object) -> object:
        leaves = []
        for path, leaf in leaves_by_path(tree, section).items():
            value = values[path_string(section, path)]
            padded = np.zeros(leaf.shape, leaf.dtype)
            padded[tuple(map(slice, value.shape))] = value
            leaves.append(jax.device_put(padded, leaf.sharding))
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    abstract = program.abstract_state
    step = jax.device_put(np.int32(STEP), abstract.step.sharding)
    return dataclasses.replace(abstract, step=step, **{n: filled(n, t) for n, t in sections_of(abstract).items()})


QUICK = "adafactor"


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.proof) for name in OPTIMIZERS if name != QUICK)]
)
def test_state_moves_between_meshes_bit_for_bit(name, tmp_path):
    """Saved on data=2 x fsdp=2 x tensor=2, resharded for fsdp=4 x tensor=2, read there and on one device."""
    before = program_on({"data": 2, "fsdp": 2, "tensor": 2}, name)
    values = random_state(before)
    target = {"fsdp": 4, "tensor": 2}
    after = program_on(target, name)
    with Store(tmp_path / "saved") as store:
        resume.save(store, before, placed(before, values), Place(step=STEP, position=Position()), NoRows(), {})
        store.wait()
    planned = plan_resharding(str(tmp_path / "saved"), mesh=target)
    written = reshard(planned, str(tmp_path / "moved"), max_memory=4 * 2**30)

    copies = (tmp_path / "saved", tmp_path / "moved")
    for copy in copies:
        arrays = saved_arrays(copy, STEP, is_run=False)
        assert arrays.keys() == values.keys()
        for leaf, value in values.items():
            np.testing.assert_array_equal(arrays[leaf], value, err_msg=leaf)
    for program, copy in ((after, tmp_path / "moved"), (program_on({}, name), tmp_path / "saved")):
        expected = placed(program, values)
        with Store(copy) as store:
            state, _ = resume.restore(store, STEP, program)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, expected)
        jax.tree.map(np.testing.assert_array_equal, state, expected)

    if before.averages:
        exported = export(
            plan_export(str(written), step=STEP, dtype=None, tokenizer=None, weights="ema"),
            str(tmp_path / "hf"),
            max_memory=4 * 2**30,
        )
        with TensorDirectory(exported) as tensors:
            up = tensors.read("model.layers.1.mlp.up_proj.weight", (slice(0, 64), slice(0, 32)))
        np.testing.assert_array_equal(up, values["ema/layers/up"][1].T)

    stored = StepArrays(written).types
    assert planned.read_amplification({leaf: stored[leaf].read_chunk for leaf in values}) == 1.0
    held = {
        path_string(s, p): leaf
        for s, t in sections_of(after.abstract_state).items()
        for p, leaf in leaves_by_path(t, s).items()
    }
    for leaf, placement in planned.after.items():
        assert placement.shard == held[leaf].sharding.shard_shape(held[leaf].shape), leaf
