"""How every array of the training state lies on the mesh, per config, against files that a person has read.

A change of layout shows up as a diff of ``tests/golden/*.txt``. After a change that is meant:

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/golden
"""

import math
import os
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding

from jaxpar.config import load_config
from jaxpar.config.schema import AXES
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.parameters import padding_param_count, param_count
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.sharding import axes_of, sharding_report

GOLDEN = Path(__file__).parent
NUM_DEVICES = 8
CONFIGS = [
    path
    for path in sorted((GOLDEN.parents[1] / "configs").glob("*.toml"))
    if gather_facts(load_config(path)).axes_product(AXES) == NUM_DEVICES
]
"""Recipes for as many devices as there are here; ``jaxpar verify`` shrinks the meshes of the others."""

MODELS = {
    "llama-3.1-8b fsdp8": ("model.preset=llama-3.1-8b", "mesh.fsdp=8"),
    "llama-3.1-8b fsdp4 tensor2": ("model.preset=llama-3.1-8b", "mesh.fsdp=4", "mesh.tensor=2"),
    "llama-3.1-8b data2 fsdp4": ("model.preset=llama-3.1-8b", "mesh.data=2", "mesh.fsdp=4"),
    "llama-3.1-8b bfloat16 data8": ("model.preset=llama-3.1-8b", "mesh.data=8", "precision.params=bfloat16"),
    "qwen2.5-0.5b fsdp4 tensor2": ("model.preset=qwen2.5-0.5b", "mesh.fsdp=4", "mesh.tensor=2"),
    "gemma-7b fsdp4 tensor2": ("model.preset=gemma-7b", "mesh.fsdp=4", "mesh.tensor=2"),
    "gpt2-124m fsdp4 tensor2": ("model.preset=gpt2-124m", "mesh.fsdp=4", "mesh.tensor=2"),
    "qwen3-8b data2 fsdp2 tensor2": ("model.preset=qwen3-8b", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "mixtral-8x7b fsdp4 expert2": ("model.preset=mixtral-8x7b", "mesh.fsdp=4", "mesh.expert=2"),
    "qwen3-30b-a3b expert4 tensor2": (
        *("model.preset=qwen3-30b-a3b", "mesh.expert=4", "mesh.tensor=2"),
        *("model.router=sigmoid", "model.num_shared_experts=1", "model.first_dense_layers=1"),
    ),
}
"""Public models on meshes of interest: name -> overrides."""

# The layout does not depend on the data, whose files may be elsewhere.
ANY_DATA = ("data.source=synthetic", "data.paths=[]", "data.chat_template=none")

CASES = {f"config_{path.stem}": (path, ANY_DATA) for path in CONFIGS} | {
    name.replace(" ", "_"): (None, overrides) for name, overrides in MODELS.items()
}
"""File name of the golden -> config file and overrides."""


def program_of(path: Path | None, overrides: tuple[str, ...]) -> Program:
    return Program.build(resolve(load_config(path, overrides), num_devices=NUM_DEVICES))


def spec_text(sharding: NamedSharding) -> str:
    """The mesh axes of each dim, ``-`` where there is none."""
    return ", ".join("+".join(axes_of(entry)) or "-" for entry in sharding.spec.partitions)


def layout(program: Program) -> str:
    """One line per leaf, in the order of the tree."""
    state = program.abstract_state
    rows = [("array", "shape", "dtype", "mesh axes", "bytes per device")]
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total += size
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        rows.append((name, " x ".join(map(str, leaf.shape)), str(leaf.dtype), spec_text(leaf.sharding), f"{size:,}"))
    rows.append(("all", "", "", "", f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    mesh = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1)
    return "\n".join([f"mesh {mesh}", *lines, ""])


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request) -> tuple[str, Program]:
    return request.param, program_of(*CASES[request.param])


def test_layout_is_as_written(case):
    name, program = case
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(layout(program))
    assert path.exists(), f"{path.name} is missing: see the head of this file"
    assert layout(program) == path.read_text()


def test_the_state_is_the_model_three_times(case):
    """Parameters, and two moments, add up to the planner's exact count, and the copies to the whole mesh."""
    _, program = case
    state = program.abstract_state
    model = program.config.model
    expected = param_count(model) + padding_param_count(model)
    moments = state.optimizer[0]
    for tree in (state.params, moments.mu, moments.nu):
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree)) == expected
    for leaf in sharding_report(state, program.mesh).leaves:
        assert leaf.bytes_per_device * NUM_DEVICES == leaf.total_bytes * leaf.num_copies, leaf.path


def test_moments_lie_as_their_parameters(case):
    _, program = case
    state = program.abstract_state
    for tree in (state.optimizer[0].mu, state.optimizer[0].nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, tree) == jax.tree.map(lambda leaf: leaf.sharding, state.params)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
