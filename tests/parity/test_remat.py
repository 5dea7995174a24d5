"""What the backward pass keeps never changes the answer: selective recomputation against a device that keeps all."""

import pytest

from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train

MLP_ONLY = ("gate", "up")
ALL = ("query", "key", "value", "attention", "attention_out", "gate", "up")
GPT2 = {"family": "gpt2", "num_kv_heads": 8, "max_positions": 16}

QUICK = [({"data": 2, "fsdp": 2, "tensor": 2}, "full", None, {})]
FULL = [
    *((mesh, "full", None, {}) for mesh in ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4})),
    *(({"fsdp": 4, "tensor": 2}, "full", save, {}) for save in (MLP_ONLY, ALL, ())),
    *(({"fsdp": 4, "tensor": 2}, strategy, None, {}) for strategy in ("grads", "optimizer")),
    ({"fsdp": 2, "context": 2, "tensor": 2}, "full", None, {}),
    ({"fsdp": 2, "tensor": 2}, "full", None, GPT2),
]


def check(mesh: dict, strategy: str, save: tuple[str, ...] | None, model: dict, rows: int) -> None:
    """Against remat full on one device, so that both are tested at once."""
    section = {"microbatches": 2, "remat": "selective", "global_batch_size": rows}
    if save is not None:
        section["remat_save"] = save
    config = parity_config({**mesh, "fsdp_strategy": strategy}, model=dict(model_key(model)), train=section)
    assert_same(train(build(config)), single_device(model_key(model), 2, "full", rows))


@pytest.mark.parametrize(("mesh", "strategy", "save", "model"), QUICK, ids=str)
def test_selective_equals_one_device(mesh, strategy, save, model):
    check(mesh, strategy, save, model, rows=8)


@pytest.mark.proof
@pytest.mark.parametrize(("mesh", "strategy", "save", "model"), FULL, ids=str)
def test_every_selection_equals_one_device(mesh, strategy, save, model):
    check(mesh, strategy, save, model, rows=16)
