"""Layout never changes the answer: every shipped mesh against one device, in float32, through production code."""

import pytest

from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train

# Eight kv heads, so that tensor=8 is legal.
WIDE = {"num_kv_heads": 8}
GEMMA = {"family": "gemma", "tie_embeddings": True}
GPT2 = {"family": "gpt2", "tie_embeddings": True, "num_kv_heads": 8, "max_positions": 16}

QUICK = [
    ({"fsdp": 8}, {}, 1, "full"),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {}, 2, "full"),
    ({"tensor": 8}, WIDE, 1, "none"),
]
MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 4, "tensor": 2},
]
FULL = [
    *((mesh, {}, microbatches, "full") for mesh in MESHES for microbatches in (1, 2, 4)),
    *(({"tensor": 8}, WIDE, microbatches, "full") for microbatches in (1, 2, 4)),
    *((mesh, {}, 2, "none") for mesh in ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})),
    *(
        (mesh, model, 2, "full")
        for mesh in ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
        for model in ({"family": "qwen2"}, {"family": "llama", "tie_embeddings": True}, GEMMA, GPT2)
    ),
]


def check(mesh: dict, model: dict, microbatches: int, remat: str, rows: int) -> None:
    train_section = {"microbatches": microbatches, "remat": remat, "global_batch_size": rows}
    config = parity_config(mesh, model=dict(model_key(model)), train=train_section)
    assert_same(train(build(config)), single_device(model_key(model), microbatches, remat, rows))


@pytest.mark.parametrize(("mesh", "model", "microbatches", "remat"), QUICK, ids=str)
def test_mesh_equals_one_device(mesh, model, microbatches, remat):
    check(mesh, model, microbatches, remat, rows=8)


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "model", "microbatches", "remat"), FULL, ids=str)
def test_every_mesh_equals_one_device(mesh, model, microbatches, remat):
    check(mesh, model, microbatches, remat, rows=32)
