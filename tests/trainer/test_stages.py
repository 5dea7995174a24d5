"""A run that moves between stages, chunks, uneven layers and no pipeline at all is the run that stayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxpar.config.schema import MeshConfig
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.trainer import Trainer
from tests.trainer.runs import STEPS, assert_same_run, saved_arrays, tiny
from tests.trainer.test_resume_matrix import assert_restored_bit_by_bit

pytestmark = pytest.mark.proof

NUM_LAYERS = 9
LAYOUTS = {
    "2 stages": ({"pipeline": 2, "fsdp": 4}, {"layers_per_stage": [4, 5]}),
    "4 stages, interleaved": (
        {"pipeline": 4, "tensor": 2},
        {"schedule": "interleaved", "chunks": 2, "layers_per_stage": "balanced"},
    ),
    "none": ({"data": 2, "fsdp": 4}, {}),
}
"""In the order in which the run moves, four steps on each."""


def config_of(layout: str, directory: Path, **train: object):
    mesh, pipeline = LAYOUTS[layout]
    config = tiny(
        directory,
        model={"num_layers": NUM_LAYERS},
        data={"num_samples": 96},
        train={"global_batch_size": 32, "microbatches": 4, **train},
        pipeline=pipeline,
    )
    return dataclasses.replace(config, mesh=MeshConfig(**mesh))


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    """Twelve steps, with a checkpoint where each layout hands over to the next."""
    directory = tmp_path_factory.mktemp("moved") / "run"
    for layout, stop_at in zip(LAYOUTS, (4, 8, None), strict=True):
        Trainer(config_of(layout, directory, stop_at=stop_at)).run()
    return directory


def test_losses_and_parameters_are_those_of_the_run_that_stayed(moved, tmp_path):
    Trainer(config_of("none", tmp_path)).run()
    assert_same_run(moved, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_each_layout_wrote_is_restored_bit_by_bit_by_all(moved, layout):
    """Parameters and moments, without padded layers on disk."""
    config = config_of(layout, moved)
    program = Program.build(resolve(config, num_devices=8))
    for step in (4, 8, STEPS):
        saved = saved_arrays(moved, step)
        assert saved["params/layers/q"].shape[0] == NUM_LAYERS
        assert_restored_bit_by_bit(moved, step, program, saved)
