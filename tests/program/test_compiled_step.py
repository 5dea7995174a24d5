"""The compiled training step is part of the contract: which collectives, where, how many bytes, how much memory."""

import collections
import math
import re

import jax
import numpy as np
import pytest

from jaxpar.audit import (
    audit,
    capture_compiler_warnings,
    gathers_of_stacked_weights,
    weight_sized_all_reduces,
)
from jaxpar.experiments.parity import run_steps
from tests.parity.harness import TINY, build, parity_config

NUM_LAYERS = 5  # a size that no other dim and no other loop has
MODEL = {"family": "llama", "num_layers": NUM_LAYERS}
D, H, K, h, F = (TINY[name] for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"))
LAYER_WEIGHTS = [D * H * h, D * K * h, D * K * h, H * h * D, D * F, D * F, F * D]
PADDED_VOCAB = 152


def compiled_report(mesh, *, model=None, **sections):
    program = build(parity_config(mesh, model={**MODEL, **(model or {})}, **sections))
    with capture_compiler_warnings() as warnings:
        compiled = program.lower_train_step().compile()
    assert warnings.rematerializations == (), "the compiler re-lays out an array by replicating it"
    return audit(compiled, program.mesh)


@pytest.fixture(scope="module")
def fsdp8():
    return compiled_report({"fsdp": 8})


@pytest.fixture(scope="module")
def hybrid_tensor():
    return compiled_report({"data": 2, "fsdp": 2, "tensor": 2}, train={"microbatches": 2})


def wire_bytes(collectives):
    return sum(found.wire_bytes for found in collectives)


def test_weights_are_gathered_block_by_block(fsdp8):
    forward, backward = fsdp8.per_layer(NUM_LAYERS)
    assert forward.counts == {("all-gather", ("fsdp",)): 7}
    assert backward.counts == {("all-gather", ("fsdp",)): 7, ("reduce-scatter", ("fsdp",)): 7}
    assert gathers_of_stacked_weights(fsdp8, num_layers=NUM_LAYERS) == ()
    # Forward, 7/8 of each weight arrives over the wire; backward the same again, and 7/8 leaves as gradient.
    per_layer = 7 / 8 * 4 * sum(LAYER_WEIGHTS)
    assert forward.wire_bytes == pytest.approx(per_layer)
    assert backward.wire_bytes == pytest.approx(2 * per_layer)


def test_gradients_are_reduce_scattered(fsdp8):
    assert weight_sized_all_reduces(fsdp8, weight_bytes=4 * min(LAYER_WEIGHTS)) == ()
    for found in fsdp8.select("reduce-scatter", axes="fsdp", in_loop=True):
        (array,) = found.arrays
        assert math.prod(array.dims) * 8 in LAYER_WEIGHTS, f"{array} is not an eighth of a weight"


def test_embedding_moves_activations(fsdp8):
    """Two all-to-alls (one each way), and outside the loop only the tokens and the head are gathered."""
    assert fsdp8.count("all-to-all", axes="fsdp") == 2
    gathered = sorted(found.bytes for found in fsdp8.select("all-gather", in_loop=False))
    tokens, head = 4 * 8 * 16, 4 * D * PADDED_VOCAB
    assert gathered == [tokens, head]


def test_loss_chunks_do_not_communicate_over_fsdp(fsdp8):
    assert fsdp8.count(in_loop=True) == 7 + 14, "something besides the layers communicates in a loop"


def test_hybrid_reduces_over_data_once_and_only_shards(hybrid_tensor):
    """Only the loss crosses the data axis inside a loop, microbatches included; 1/N shards do after it."""
    inside = [found for found in hybrid_tensor.select(in_loop=True) if "data" in found.axes]
    assert sum(found.bytes for found in inside) <= 3 * 4, inside
    reduced = hybrid_tensor.select("all-reduce", axes="data", in_loop=False)
    elements = NUM_LAYERS * sum(LAYER_WEIGHTS) + 2 * D * PADDED_VOCAB
    assert sum(found.bytes for found in reduced) == pytest.approx(4 * elements / 4, rel=0.01)


def test_tensor_collectives_per_block(hybrid_tensor):
    """Sequence parallel: gather before attention and MLP, reduce-scatter after; never an all-reduce of activations."""
    forward, backward = hybrid_tensor.per_layer(NUM_LAYERS)
    assert forward.counts["all-gather", ("tensor",)] == 2
    assert forward.counts["reduce-scatter", ("tensor",)] == 2
    # Backward: both gathers and the first reduce-scatter again for the recomputation, then their transposes.
    assert backward.counts["all-gather", ("tensor",)] == 4
    assert backward.counts["reduce-scatter", ("tensor",)] == 3
    assert forward.counts["all-gather", ("fsdp",)] == backward.counts["all-gather", ("fsdp",)] == 7
    for loop in (forward, backward):
        assert not any(op == "all-reduce" for op, _ in loop.counts), loop.counts


COLLECTIVE = re.compile(
    r'"stablehlo\.(?P<op>all_gather|reduce_scatter|all_to_all)".*?: \(tensor<(?:\d+x)+(?P<dtype>\w+)>\) ->', re.DOTALL
)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_types_on_the_wire(reduce):
    """Weights and activations travel in the compute type, gradients in the reduce type.

    Read from the program as handed to the compiler: the CPU backend widens bfloat16 collectives to float32.
    """
    program = build(parity_config({"fsdp": 8}, model=MODEL, precision={"compute": "bfloat16", "reduce": reduce}))
    found = COLLECTIVE.findall(program.lower_train_step().as_text())
    sent = {"float32": "f32", "bfloat16": "bf16"}[reduce]
    assert collections.Counter(found) == {
        ("all_gather", "i32"): 1,  # tokens
        ("all_gather", "bf16"): 7 + 7 + 1,  # blocks forward and backward, head
        ("reduce_scatter", sent): 7 + 1,
        ("all_to_all", "bf16"): 2,  # embedding
    }


@pytest.mark.proof
def test_gradients_are_summed_over_data_in_the_type_that_was_asked_for():
    """In bfloat16 they are rounded, and no more than that; the parameters' own type comes back."""

    def gradients(reduce: str) -> dict:
        config = parity_config({"data": 8}, model=MODEL, precision={"reduce": reduce})
        return run_steps(build(config), num_steps=1).grads

    exact, rounded = gradients("float32"), gradients("bfloat16")
    for want, got in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert got.dtype == want.dtype == np.float32
        off = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-4 < off < 1e-2


WIDE = {"embed_dim": 128, "mlp_dim": 512, "num_layers": 8, "head_dim": 16}


@pytest.mark.proof
def test_remat_none_does_not_keep_gathered_weights():
    """With few tokens, memory is weights: keeping the gathered ones would take a whole model."""
    temp = {
        remat: compiled_report({"fsdp": 8}, model=WIDE, train={"remat": remat}).memory.temp
        for remat in ("none", "full")
    }
    layers = 4 * 8 * (2 * 128 * 8 * 16 + 2 * 128 * 4 * 16 + 3 * 128 * 512)
    assert temp["full"] < 0.45 * layers, temp
    assert temp["none"] < 0.6 * layers, temp


@pytest.mark.proof
def test_remat_full_keeps_only_block_inputs():
    """With many tokens, memory is activations: recomputing must be the smaller program by far."""
    long = {"data": {"seq_len": 256}, "train": {"global_batch_size": 16, "loss_chunk_tokens": 64}}
    temp = {
        remat: compiled_report({"fsdp": 8}, data=long["data"], train={**long["train"], "remat": remat}).memory.temp
        for remat in ("none", "full")
    }
    assert temp["full"] < 0.6 * temp["none"], temp


@pytest.mark.proof
@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}], ids=str
)
def test_no_involuntary_rematerialization_anywhere(mesh):
    report = compiled_report(mesh)
    assert report.unknown_loops == ()
