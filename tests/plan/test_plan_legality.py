"""The one-question form of legality agrees with the rules that explain themselves."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS, load_config
from jaxpar.config.schema import AXES, MeshConfig
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.legality import batch_objection, mesh_objection, schedule_objection
from jaxpar.plan.rules import LAYOUT_RULES, find_problems
from jaxpar.plan.shape import shape_of

SIZES = st.sampled_from([1, 1, 1, 2, 3, 4, 8])


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gpt2-1.5b", "tiny-bytes"]),
    st.fixed_dictionaries(dict.fromkeys(AXES, SIZES)),
    st.sampled_from([64, 96]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(
        [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 1), ("1f1b", 2), ("breadth_first", 2)]
    ),
    st.sampled_from([1000, 768]),
)
def test_the_two_forms_agree(preset, mesh, rows, microbatches, schedule_and_chunks, seq_len):
    schedule, chunks = schedule_and_chunks
    overrides = {
        "model.preset": preset,
        "train.global_batch_size": rows,
        "train.microbatches": microbatches,
        "pipeline.schedule": schedule,
        "pipeline.chunks": chunks,
        "data.seq_len": seq_len,
    }
    config = load_config(None, [f"{key}={value}" for key, value in overrides.items()])
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh))
    problems = find_problems(gather_facts(config), LAYOUT_RULES)
    shape = shape_of(PRESETS[preset].model)
    objections = [
        mesh_objection(shape, mesh, seq_len),
        batch_objection(mesh, rows, microbatches),
        schedule_objection(shape, mesh, schedule, chunks, microbatches),
    ]
    assert bool(problems) == any(objections), (problems, objections)
