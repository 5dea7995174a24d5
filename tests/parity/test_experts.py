"""Mixtures of experts: every mesh against one device, whatever the router, the exchange and the accumulation."""

import pytest

from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train

SOFTMAX = {
    "family": "qwen3_moe",
    "num_experts": 8,
    "top_k": 2,
    "expert_mlp_dim": 16,
    "balance_coef": 0.1,
    "router_z_coef": 0.01,
}
SIGMOID = SOFTMAX | {
    "family": "mixtral",
    "router": "sigmoid",
    "balance_rate": 0.05,
    "num_expert_groups": 4,
    "top_k_groups": 2,
    "num_shared_experts": 2,
    "first_dense_layers": 1,
}
LIMITED = SOFTMAX | {"capacity_factor": 0.75, "norm_topk": False}

MESHES = [
    {"expert": 2},
    {"expert": 4},
    {"expert": 8},
    {"expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2},
    {"data": 2, "expert": 4},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 2, "context": 2, "fsdp": 2},
    {"expert": 2, "context": 2, "tensor": 2},
]
FULL = [
    *((mesh, SOFTMAX, 1, "full") for mesh in MESHES),
    *((mesh, SIGMOID, 2, "full") for mesh in MESHES),
    ({"fsdp": 4, "tensor": 2}, SIGMOID, 1, "full"),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, SOFTMAX, 4, "none"),
    ({"data": 2, "expert": 4}, LIMITED, 2, "full"),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, LIMITED, 1, "full"),
    ({"fsdp": 2, "expert": 4, "expert_exchange": "gather"}, SOFTMAX, 1, "full"),
    ({"expert": 2, "tensor": 2, "expert_exchange": "gather"}, SIGMOID, 1, "none"),
    ({"data": 2, "expert": 4, "expert_receive_factor": 4.0}, SOFTMAX, 1, "full"),
]


def check(mesh: dict, model: dict, microbatches: int, remat: str) -> None:
    options = {"microbatches": microbatches, "remat": remat, "global_batch_size": 8 * microbatches}
    config = parity_config(mesh, model=dict(model_key(model)), train=options)
    expected = single_device(model_key(model), microbatches, remat, 8 * microbatches)
    assert_same(train(build(config)), expected)


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "model", "microbatches", "remat"), FULL, ids=str)
def test_every_mesh_equals_one_device(mesh, model, microbatches, remat):
    check(mesh, model, microbatches, remat)
