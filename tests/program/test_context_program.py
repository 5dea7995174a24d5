"""What context parallelism makes of the compiled step: the permutes of the ring and nothing else, and little memory."""

import collections
import re

import pytest

import jaxpar.model.attention_blocks
from jaxpar.audit import audit
from tests.parity.harness import TINY, build, parity_config

NUM_LAYERS = 5  # a size that no other dim and no other loop has
CONTEXT, ROWS, LENGTH = 4, 2, 32
H, K, h = (TINY[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
PERMUTED_TYPE = re.compile(r'"stablehlo\.collective_permute".*?: \(tensor<(?:\d+x)+(\w+)>\) ->', re.DOTALL)
PERMUTE = "collective-permute"
SHARED = 1  # The recomputation's first permute (or gather) is also the gradients': the compiler does one.
KV_BYTES = 4 * 2 * ROWS * LENGTH // CONTEXT * K * h  # float32 keys and values of one member


def report_of(mode, context=CONTEXT, length=LENGTH, remat="full", **model):
    """Audit of the step on a context axis alone."""
    program = build(
        parity_config(
            {"context": context, "context_mode": mode},
            model={"family": "llama", "num_layers": NUM_LAYERS, **model},
            data={"seq_len": length},
            train={"global_batch_size": ROWS, "remat": remat},
        )
    )
    return audit(program.lower_train_step().compile(), program.mesh)


@pytest.fixture(scope="module")
def ring():
    return report_of("ring")


def over_context(loop, op):
    return loop.counts.get((op, ("context",)), 0)


def permuted(loop):
    """Bytes that one member passes on per layer."""
    return sum(found.wire_bytes * found.trips / NUM_LAYERS for found in loop.collectives if found.op == PERMUTE)


def test_a_layer_permutes_once_per_other_member(ring):
    """Forward c - 1; backward the recomputation, once more around for the gradients, and the gradients' own way."""
    forward, backward = ring.per_layer(NUM_LAYERS)
    turns = CONTEXT - 1
    assert over_context(forward, PERMUTE) == turns
    assert over_context(backward, PERMUTE) == 3 * turns - SHARED
    assert permuted(forward) == turns * KV_BYTES
    assert permuted(backward) == (3 * turns - SHARED) * KV_BYTES


def test_keys_and_values_are_not_gathered(ring):
    """Weights travel over context as over fsdp: seven gathers each way, seven reduce-scatters. That is all."""
    forward, backward = ring.per_layer(NUM_LAYERS)
    assert forward.counts == {("all-gather", ("context",)): 7, (PERMUTE, ("context",)): CONTEXT - 1}
    assert backward.counts == {
        ("all-gather", ("context",)): 7,
        ("reduce-scatter", ("context",)): 7,
        (PERMUTE, ("context",)): 3 * (CONTEXT - 1) - SHARED,
    }


@pytest.mark.proof
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_of_keys_and_values_travel_in_the_reduce_type(reduce):
    """In the program as handed to the compiler, where a loop is written once; the rest are keys and values."""
    program = build(
        parity_config(
            {"context": 4, "context_mode": "ring"},
            model={"family": "llama"},
            train={"remat": "none"},
            precision={"compute": "bfloat16", "reduce": reduce},
        )
    )
    found = collections.Counter(PERMUTED_TYPE.findall(program.lower_train_step().as_text()))
    sent = {"float32": "f32", "bfloat16": "bf16"}[reduce]
    # Forward the first and the loop's; backward the first two and the loop's, with gradients in the loop and two after.
    assert found == collections.Counter({"bf16": 2 + 3}) + collections.Counter({sent: 1 + 2})


@pytest.mark.proof
def test_gathered_keys_and_values_are_one_collective_per_layer():
    forward, backward = report_of("allgather").per_layer(NUM_LAYERS)
    assert forward.counts == {("all-gather", ("context",)): 7 + 1}
    assert backward.counts == {("all-gather", ("context",)): 7 + 2 - SHARED, ("reduce-scatter", ("context",)): 7 + 1}


@pytest.mark.proof
@pytest.mark.parametrize(("context", "shared"), [(2, 1), (3, 2), (8, 1)])
def test_no_rotation_is_wasted_at_any_size(context, shared):
    """Three members need no loops, so the compiler sees that both permutes of keys are those of the recomputation."""
    num_layers = 9  # no loop of the ring is as long
    report = report_of("ring", context, 48, embed_dim=48, num_layers=num_layers)
    forward, backward = report.per_layer(num_layers)
    assert over_context(forward, PERMUTE) == context - 1
    assert over_context(backward, PERMUTE) == 3 * (context - 1) - shared


@pytest.mark.proof
def test_without_recomputation_the_forward_ring_runs_once():
    forward, backward = report_of("ring", remat="none").per_layer(NUM_LAYERS)
    assert over_context(forward, PERMUTE) == CONTEXT - 1
    assert over_context(backward, PERMUTE) == 2 * (CONTEXT - 1)


@pytest.mark.proof
def test_memory_of_the_ring_falls_with_the_context_axis():
    """The same row on four times the members: a quarter of the temporaries, but for what does not depend on it."""
    temp = {context: report_of("ring", context, 1024).memory.temp for context in (2, 8)}
    assert temp[8] < 0.3 * temp[2], temp


@pytest.mark.proof
def test_memory_of_the_ring_grows_with_the_row_and_not_with_its_square(monkeypatch):
    monkeypatch.setattr(jaxpar.model.attention_blocks, "SCORE_BYTES", 2**18)
    temp = {length: report_of("ring", 4, length).memory.temp for length in (512, 2048)}
    assert temp[2048] < 4.4 * temp[512], temp
