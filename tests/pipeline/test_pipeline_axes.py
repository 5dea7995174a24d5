"""A pipeline together with experts and with a context axis: the step through stages equals the step on one device, as
``test_pipeline_training`` has it, and routers say the same."""

import os
import subprocess
import sys

import pytest

from tests.parity.test_experts import LIMITED, SIGMOID, SOFTMAX
from tests.pipeline.test_pipeline_training import CASE, FOUR, GPT2, INTERLEAVED, TIED, check

RING, ALLGATHER = {"context_mode": "ring"}, {"context_mode": "allgather"}
BALANCED = {"layers_per_stage": "balanced"}
SOFTMAX_4 = SOFTMAX | FOUR
SIGMOID_4 = {name: value for name, value in SIGMOID.items() if name != "first_dense_layers"} | FOUR

QUICK = {"experts and ring": ({"pipeline": 2, "expert": 2, "context": 2} | RING, SOFTMAX, {}, 2)}
FULL = {
    "ring and tensor": ({"pipeline": 2, "context": 2, "tensor": 2} | RING, FOUR, {}, 2),
    "allgather and tensor, interleaved": (
        {"pipeline": 2, "context": 2, "tensor": 2} | ALLGATHER,
        TIED,
        INTERLEAVED,
        4,
    ),
    "ring of four": ({"pipeline": 2, "context": 4} | RING, FOUR, {}, 2),
    "ring and data, learned positions, uneven": ({"pipeline": 2, "data": 2, "context": 2} | RING, GPT2, BALANCED, 2),
    "experts and tensor": ({"pipeline": 2, "expert": 2, "tensor": 2}, SOFTMAX_4, {}, 2),
    "experts and data": ({"pipeline": 2, "data": 2, "expert": 2}, SOFTMAX_4, {}, 2),
    "experts and allgather": ({"pipeline": 2, "expert": 2, "context": 2} | ALLGATHER, SOFTMAX_4, {}, 2),
    "sigmoid router and fsdp, interleaved": ({"pipeline": 2, "fsdp": 2, "expert": 2}, SIGMOID_4, INTERLEAVED, 4),
    "capacity of split rows, gathered tokens, uneven": (
        {"pipeline": 2, "expert": 2, "context": 2, "expert_exchange": "gather"},
        LIMITED | {"num_layers": 3},
        BALANCED,
        4,
    ),
    "experts and weights gathered once per step": (
        {"pipeline": 2, "data": 2, "fsdp": 2, "fsdp_strategy": "grads"},
        SOFTMAX_4,
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
SIXTEEN = {
    "fsdp, experts and tensor": ({"pipeline": 2, "fsdp": 2, "expert": 2, "tensor": 2}, SOFTMAX, {}, 2),
    "experts, ring and tensor": ({"pipeline": 2, "expert": 2, "context": 2, "tensor": 2} | RING, SOFTMAX, {}, 2),
}


@pytest.mark.parametrize(CASE, QUICK.values(), ids=QUICK)
def test_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)


@pytest.mark.proof
@pytest.mark.parametrize(CASE, FULL.values(), ids=FULL)
def test_every_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)


@pytest.mark.proof
@pytest.mark.parametrize(CASE, SIXTEEN.values(), ids=SIXTEEN)
def test_sixteen_devices_equal_one(mesh, model, pipeline, microbatches):
    """In a process of its own: a process has the same fake devices for life."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=16"
    child = subprocess.run(
        [sys.executable, "-c", f"from {check.__module__} import check; check{(mesh, model, pipeline, microbatches)}"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert child.returncode == 0, child.stderr[-3000:]
