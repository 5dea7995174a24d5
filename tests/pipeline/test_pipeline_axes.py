"""A pipeline together with experts and with a context axis: the step through stages equals the step on one device, as
``test_pipeline_training`` has it, and routers say the same."""

import pytest

from tests.parity.test_experts import LIMITED, SIGMOID, SOFTMAX
from tests.pipeline.test_pipeline_training import CASE, FOUR, GPT2, INTERLEAVED, TIED, UNEVEN, check

RING, ALLGATHER = {"context_mode": "ring"}, {"context_mode": "allgather"}
BALANCED = {"layers_per_stage": "balanced"}
UNEVEN_CHUNKS = INTERLEAVED | BALANCED
SOFTMAX_4 = SOFTMAX | FOUR
SIGMOID_4 = {name: value for name, value in SIGMOID.items() if name != "first_dense_layers"} | FOUR

QUICK = {"experts and ring": ({"pipeline": 2, "expert": 2, "context": 2} | RING, SOFTMAX, {}, 2)}
FULL = {
    "ring and tensor, uneven": ({"pipeline": 2, "context": 2, "tensor": 2} | RING, UNEVEN, BALANCED, 2),
    "allgather and tensor, interleaved": (
        {"pipeline": 2, "context": 2, "tensor": 2} | ALLGATHER,
        TIED,
        INTERLEAVED,
        4,
    ),
    "ring of four": ({"pipeline": 2, "context": 4} | RING, FOUR, {}, 2),
    "ring and data, learned positions, uneven chunks": (
        {"pipeline": 2, "data": 2, "context": 2} | RING,
        GPT2 | UNEVEN,
        UNEVEN_CHUNKS,
        2,
    ),
    "ring and fsdp, uneven chunks": ({"pipeline": 2, "fsdp": 2, "context": 2} | RING, UNEVEN, UNEVEN_CHUNKS, 4),
    "data and tensor, uneven chunks": ({"pipeline": 2, "data": 2, "tensor": 2}, TIED | UNEVEN, UNEVEN_CHUNKS, 4),
    "weights gathered once, with data, uneven chunks": (
        {"pipeline": 2, "data": 2, "fsdp": 2},
        UNEVEN,
        {**UNEVEN_CHUNKS, "gather": "per_step"},
        4,
    ),
    "experts and tensor, with a capacity": ({"pipeline": 2, "expert": 2, "tensor": 2}, LIMITED | FOUR, {}, 2),
    "experts and tensor, uneven chunks": (
        {"pipeline": 2, "expert": 2, "tensor": 2},
        SOFTMAX | UNEVEN,
        UNEVEN_CHUNKS,
        4,
    ),
    "experts and data, uneven chunks": ({"pipeline": 2, "data": 2, "expert": 2}, SOFTMAX | UNEVEN, UNEVEN_CHUNKS, 4),
    "experts and allgather, interleaved": (
        {"pipeline": 2, "expert": 2, "context": 2} | ALLGATHER,
        SOFTMAX_4,
        INTERLEAVED,
        2,
    ),
    "sigmoid router and fsdp, uneven chunks": (
        {"pipeline": 2, "fsdp": 2, "expert": 2},
        SIGMOID_4 | UNEVEN,
        UNEVEN_CHUNKS,
        4,
    ),
    "capacity of split rows, gathered tokens, uneven": (
        {"pipeline": 2, "expert": 2, "context": 2, "expert_exchange": "gather"},
        LIMITED | {"num_layers": 3},
        BALANCED,
        4,
    ),
    "experts with a capacity, weights gathered once per step": (
        {"pipeline": 2, "data": 2, "fsdp": 2, "fsdp_strategy": "grads"},
        LIMITED | FOUR,
        {},
        2,
    ),
    "experts and gradients scattered once per step": (
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        SIGMOID_4,
        {**INTERLEAVED, "gather": "per_step"},
        4,
    ),
}


@pytest.mark.parametrize(CASE, QUICK.values(), ids=QUICK)
def test_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)


@pytest.mark.proof
@pytest.mark.parametrize(CASE, FULL.values(), ids=FULL)
def test_every_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)
