"""What fsdp shards never changes the answer: ZeRO-1 and ZeRO-2 against one device, as test_meshes does for ZeRO-3."""

import pytest

from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train

MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}]
TIED = {"family": "llama", "tie_embeddings": True}
LEARNED = {"family": "gpt2", "num_kv_heads": 8, "max_positions": 16}
EXPERTS = {"family": "qwen3", "num_experts": 4, "top_k": 2, "expert_mlp_dim": 32}
BIASED = {"family": "qwen2"}

QUICK = [({"fsdp": 4, "tensor": 2}, "grads", {}, 2), ({"data": 2, "fsdp": 2, "tensor": 2}, "optimizer", {}, 2)]
FULL = [
    *((mesh, strategy, {}, m) for mesh in MESHES for strategy in ("grads", "optimizer") for m in (1, 2)),
    *((mesh, strategy, TIED, 2) for mesh in MESHES[1:] for strategy in ("grads", "optimizer")),
    *(({"data": 2, "fsdp": 2, "tensor": 2}, strategy, BIASED, 4) for strategy in ("grads", "optimizer")),
    *(({"fsdp": 2, "expert": 2, "tensor": 2}, strategy, EXPERTS, 2) for strategy in ("grads", "optimizer")),
    *(({"fsdp": 2, "context": 2, "tensor": 2}, strategy, LEARNED, 2) for strategy in ("grads", "optimizer")),
    *(({"data": 2, "fsdp": 2, "context": 2}, strategy, {}, 2) for strategy in ("grads", "optimizer")),
    *(({"data": 2, "fsdp": 2, "expert": 2}, strategy, EXPERTS, 2) for strategy in ("grads", "optimizer")),
    *(({"fsdp": 2, "expert": 2, "context": 2}, strategy, EXPERTS, 2) for strategy in ("grads", "optimizer")),
]


def check(mesh: dict, strategy: str, model: dict, microbatches: int, rows: int, remat: str = "full") -> None:
    train_section = {"microbatches": microbatches, "remat": remat, "global_batch_size": rows}
    config = parity_config({**mesh, "fsdp_strategy": strategy}, model=dict(model_key(model)), train=train_section)
    assert_same(train(build(config)), single_device(model_key(model), microbatches, remat, rows))


@pytest.mark.parametrize(("mesh", "strategy", "model", "microbatches"), QUICK, ids=str)
def test_strategy_equals_one_device(mesh, strategy, model, microbatches):
    check(mesh, strategy, model, microbatches, rows=8)


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "strategy", "model", "microbatches"), FULL, ids=str)
def test_every_strategy_equals_one_device(mesh, strategy, model, microbatches):
    check(mesh, strategy, model, microbatches, rows=32)


@pytest.mark.proof
@pytest.mark.parametrize("strategy", ["grads", "optimizer"])
def test_without_recomputation(strategy):
    check({"fsdp": 4, "tensor": 2}, strategy, {}, 2, rows=16, remat="none")
