"""A checkpoint does not know stages, chunks, how layers were shared out, or where experts and parts of rows are.

Bit-equal from any to any, and to none.
"""

import itertools

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.store import Store
from tests.parity.harness import build, parity_config
from tests.pipeline.test_pipeline_axes import SIGMOID_4

NUM_LAYERS = 5
LAYOUTS = {
    "none": ({"fsdp": 2}, {}),
    "experts and context": ({"expert": 4, "context": 2}, {}),
    "4 stages, balanced": ({"pipeline": 4}, {"layers_per_stage": "balanced"}),
    "2 stages, experts and context": ({"pipeline": 2, "expert": 2, "context": 2}, {"layers_per_stage": "balanced"}),
    "2 stages, 2 chunks": (
        {"pipeline": 2, "tensor": 2},
        {"schedule": "interleaved", "chunks": 2, "layers_per_stage": [2, 1, 1, 1]},
    ),
}


def program_of(layout):
    mesh, pipeline = LAYOUTS[layout]
    train = {"microbatches": 4, "global_batch_size": 16}
    model = SIGMOID_4 | {"num_layers": NUM_LAYERS}
    return build(parity_config(mesh, model=model, train=train, pipeline=pipeline))


@pytest.mark.proof
def test_states_move_between_layouts_bit_by_bit(tmp_path):
    programs = {layout: program_of(layout) for layout in LAYOUTS}
    states = {layout: program.init(0) for layout, program in programs.items()}
    for layout, program in programs.items():
        with Store(tmp_path / layout) as store:
            sections = states[layout].sections
            place = {"position": {"epoch": 0, "offset": 0}, "tokens_seen": 0}
            store.save(3, sections, place, stored_shapes=resume.stored_shapes(program, sections))
            store.wait()
            assert store.leaves(3)["params/layers/q"].shape[0] == NUM_LAYERS
    for source, target in itertools.permutations(LAYOUTS, 2):
        with Store(tmp_path / source) as store:
            restored, _ = resume.restore(store, 3, programs[target])
        for got, want in zip(jax.tree.leaves(restored.params), jax.tree.leaves(states[target].params), strict=True):
            assert got.sharding == want.sharding
            assert np.array_equal(np.asarray(got), np.asarray(want)), (source, target)
