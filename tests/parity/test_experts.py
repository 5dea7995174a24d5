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

MODELS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "limited": LIMITED}

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
    *((mesh, "softmax", 1, "full") for mesh in MESHES),
    *((mesh, "sigmoid", 2, "full") for mesh in MESHES),
    ({"fsdp": 4, "tensor": 2}, "sigmoid", 2, "full"),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, "softmax", 4, "none"),
    ({"data": 2, "expert": 4}, "limited", 1, "full"),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, "limited", 1, "full"),
    ({"expert": 2, "context": 2, "tensor": 2}, "limited", 1, "full"),
    ({"context": 4, "fsdp": 2}, "limited", 1, "full"),
    ({"data": 2, "context": 2, "tensor": 2}, "limited", 1, "full"),
    ({"data": 2, "fsdp": 2, "expert": 2}, "limited", 1, "full"),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "sigmoid", 2, "full"),
    ({"data": 2, "expert": 2, "context": 2}, "sigmoid", 2, "full"),
    ({"data": 2, "expert": 2, "tensor": 2}, "sigmoid", 2, "full"),
    ({"fsdp": 2, "expert": 4, "expert_exchange": "gather"}, "softmax", 1, "full"),
    ({"expert": 2, "tensor": 2, "expert_exchange": "gather"}, "sigmoid", 2, "full"),
    ({"data": 2, "expert": 4, "expert_receive_factor": 4.0}, "softmax", 1, "full"),
]


def check(mesh: dict, name: str, microbatches: int, remat: str) -> None:
    model, rows = model_key(MODELS[name]), 8 * microbatches
    options = {"microbatches": microbatches, "remat": remat, "global_batch_size": rows}
    config = parity_config(mesh, model=dict(model), train=options)
    assert_same(train(build(config)), single_device(model, microbatches, remat, rows))


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "name", "microbatches", "remat"), FULL, ids=str)
def test_every_mesh_equals_one_device(mesh, name, microbatches, remat):
    check(mesh, name, microbatches, remat)
