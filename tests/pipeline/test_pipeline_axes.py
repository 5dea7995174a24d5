"""A pipeline together with a context axis: the step through stages equals the step on one device, as
``test_pipeline_training`` has it."""

import pytest

from tests.pipeline.test_pipeline_training import FOUR, GPT2, INTERLEAVED, TIED, check

RING, ALLGATHER = {"context_mode": "ring"}, {"context_mode": "allgather"}

FULL = {
    "ring": ({"pipeline": 2, "context": 2, "tensor": 2} | RING, FOUR, {}, 2),
    "allgather, interleaved": ({"pipeline": 2, "context": 2, "tensor": 2} | ALLGATHER, TIED, INTERLEAVED, 4),
    "ring of four": ({"pipeline": 2, "context": 4} | RING, FOUR, {}, 2),
    "ring, learned positions, uneven": (
        {"pipeline": 2, "data": 2, "context": 2} | RING,
        GPT2,
        {"layers_per_stage": "balanced"},
        2,
    ),
}


@pytest.mark.proof
@pytest.mark.parametrize("case", FULL)
def test_every_pipeline_equals_one_device(case):
    check(*FULL[case])
