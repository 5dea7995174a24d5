"""A sequence split over devices gives the answer of one device: packed rows and whole ones, both ways of attention."""

import functools

import numpy as np
import pytest

from tests.parity import harness
from tests.parity.harness import assert_same, build, model_key, parity_config, train
from tests.parity.test_meshes import GEMMA, GPT2

MESHES = [
    {"context": 8},
    {"fsdp": 2, "context": 4},
    {"context": 2, "tensor": 2, "fsdp": 2},
    {"data": 2, "context": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "context": 2},
]
KEY = model_key({})


def config_on(mesh: dict, microbatches: int, remat: str = "full", model: tuple = KEY, rows: int = 8):
    sections = {"microbatches": microbatches, "remat": remat, "global_batch_size": rows}
    return parity_config(mesh, model=dict(model), train=sections)


def one_document(batch: dict) -> dict:
    """The batch with every row a single document."""
    whole = np.broadcast_to(np.arange(batch["tokens"].shape[-1], dtype=np.int32), batch["tokens"].shape)
    return {**batch, "segment_ids": np.ones_like(batch["segment_ids"]), "positions": whole}


def test_context_with_tensor_and_fsdp_equals_one_device():
    mesh = {"context": 2, "tensor": 2, "fsdp": 2, "context_mode": "ring"}
    assert_same(train(build(config_on(mesh, 2))), harness.single_device(KEY, 2, "full", 8))


@pytest.mark.proof
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("mode", "microbatches", "packed"),
    [("ring", 1, True), ("ring", 2, False), ("allgather", 1, False), ("allgather", 2, True)],
    ids=str,
)
def test_every_context_mesh_equals_one_device(mesh, mode, microbatches, packed, monkeypatch):
    if not packed:
        random_batch = harness.random_batch
        monkeypatch.setattr(
            harness, "random_batch", lambda *args, **options: one_document(random_batch(*args, **options))
        )
    expected = reference(microbatches, packed)
    assert_same(train(build(config_on({**mesh, "context_mode": mode}, microbatches))), expected)


@functools.cache
def reference(microbatches: int, packed: bool) -> harness.Outcome:
    """One device, on the batches that the test has chosen."""
    return harness.single_device(KEY, microbatches, "full", 8) if packed else train(build(config_on({}, microbatches)))


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("mesh", MESHES[1:3], ids=str)
def test_without_recomputation(mesh, mode):
    assert_same(
        train(build(config_on({**mesh, "context_mode": mode}, 2, "none"))), harness.single_device(KEY, 2, "none", 8)
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    "model", [{"family": "qwen2"}, {"family": "llama", "tie_embeddings": True}, GEMMA, GPT2], ids=str
)
def test_other_families(model):
    """Biases, tied embeddings, norms with biases, learned positions."""
    key = model_key(model)
    mesh = {**MESHES[2], "context_mode": "ring"}
    assert_same(train(build(config_on(mesh, 2, model=key))), harness.single_device(key, 2, "full", 8))
