"""The step on a context axis as the CUDA compiler makes it for 8 H100s, without one. Fails where it is missing."""

import pytest

from tests.h100.test_h100_programs import report_of

pytestmark = pytest.mark.proof

NUM_LAYERS, MEMBERS = 4, 8
LONG_ROWS = (
    "model.preset=llama-3.1-8b",
    f"model.num_layers={NUM_LAYERS}",
    f"mesh.context={MEMBERS}",
    "train.global_batch_size=1",
    "--devices",
    "8",
    "--gpu",
    "h100",
)

MATRICES = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Elements of a layer's."""


@pytest.fixture(scope="module")
def ring():
    return report_of(*LONG_ROWS, "data.seq_len=32768")["compiled"]


@pytest.fixture(scope="module")
def permutes(ring):
    return [row for row in ring["collectives"] if row["op"] == "collective-permute"]


def runs(rows):
    return sum(row["trips"] * row["count"] for row in rows) / NUM_LAYERS


def test_a_layer_permutes_once_per_other_member(permutes):
    """Keys and values forward, again when the block is computed again, and once more for the gradients; and those."""
    turns = MEMBERS - 1
    gradients = [row for row in permutes if row["dtype"] == "f32"]
    assert {row["axis"] for row in permutes} == {"context"}
    assert runs(row for row in permutes if row["loop"] == "forward") == turns
    assert runs(gradients) == turns
    # The recomputation's first permute is also the gradients'.
    assert runs(row for row in permutes if row["loop"] == "backward") == 3 * turns - 1


def test_every_permute_is_hidden(permutes):
    """Those of the loops over the other members' blocks, where nearly all are, behind attention's products."""
    assert all(row["async"] and row["overlapped"] for row in permutes), permutes
    inner = [row for row in permutes if row["trips"] > NUM_LAYERS]
    assert runs(inner) >= 4 * (MEMBERS - 3)
    assert all(row["products"] for row in inner), inner


def test_nothing_but_weights_is_gathered(ring):
    """No keys and values: what a layer gathers in each direction is its seven matrices."""
    gathers = [found for found in ring["collectives"] if found["op"] == "all-gather" and found["loop"]]
    for loop in ("forward", "backward"):
        assert sum(found["bytes"] for found in gathers if found["loop"] == loop) == 2 * MATRICES


def test_memory_is_what_the_arithmetic_says_and_no_lint_fires(ring):
    assert abs(ring["difference"]) <= 0.1, ring["difference"]
    assert ring["lints"] == []


def test_gathered_keys_and_values_are_for_a_fused_kernel():
    """One gather and one reduce-scatter a layer besides those of the seven matrices; attention forward and again."""
    compiled = report_of(*LONG_ROWS, "data.seq_len=32768", "mesh.context_mode=allgather")["compiled"]
    assert compiled["attention"].startswith("attention mosaic_gpu (auto; not cudnn: ")
    assert compiled["custom_calls"]["mosaic_gpu_v2 flash_attention_sm90"] == 2
    keys_values = 32768 * 2 * 8 * 128
    loops = [row for row in compiled["collectives"] if row["loop"]]
    bytes_of = lambda op, loop: sum(row["bytes"] for row in loops if (row["op"], row["loop"]) == (op, loop))  # noqa: E731
    assert bytes_of("all-gather", "forward") == 2 * (MATRICES + keys_values)
    assert bytes_of("reduce-scatter", "backward") == 4 * (MATRICES + keys_values) / MEMBERS
    assert abs(compiled["difference"]) <= 0.1, compiled["difference"]
    assert compiled["lints"] == []
