"""What each remat mode computes again and holds, counted in the compiled program."""

import re

import pytest

from jaxpar.config import ConfigError
from tests.parity.harness import TINY, build, parity_config
from tests.program.test_compiled_step import MODEL, NUM_LAYERS, PADDED_VOCAB, compiled_report

SEQ_LEN, ROWS = 16, 8
D, H, K, h, F = (TINY[name] for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"))
# FLOPs of one device's products, forward, of one layer: a row of 16 tokens.
QUERY, KEY, OUT, WIDE = (2 * SEQ_LEN * size for size in (D * H * h, D * K * h, H * h * D, D * F))
SCORES = 2 * SEQ_LEN * SEQ_LEN * H * h
FORWARD = QUERY + 2 * KEY + 2 * SCORES + OUT + 3 * WIDE
HEAD = 3 * 2 * SEQ_LEN * D * PADDED_VOCAB

AGAIN = {
    # The last product's result is not needed by the backward pass.
    "full": FORWARD - WIDE,
    # Scores belong to the backward pass of any attention that does not store them; weighting values does not.
    "selective": SCORES + 2 * WIDE,
}


def report_of(remat: str, **sections):
    train = {"remat": remat, "loss_chunk_tokens": 0, **sections.pop("train", {})}
    return compiled_report({"fsdp": 8}, train=train, **sections)


def test_selective_runs_attention_and_its_projections_once():
    report = report_of("selective")
    # Three products in all for each of the forward pass: itself, and two gradients.
    assert report.matmul_flops == pytest.approx(NUM_LAYERS * (3 * FORWARD + AGAIN["selective"]) + HEAD, rel=0.01)
    forward, backward = report.per_layer(NUM_LAYERS)
    # Weights are gathered again, never kept.
    assert forward.counts == {("all-gather", ("fsdp",)): 7}
    assert backward.counts == {("all-gather", ("fsdp",)): 7, ("reduce-scatter", ("fsdp",)): 7}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("remat", "save", "again"),
    [
        ("full", None, AGAIN["full"]),
        ("selective", (), AGAIN["full"]),
        ("selective", ("query", "key", "value"), AGAIN["full"] - QUERY - 2 * KEY),
        ("selective", ("gate", "up"), AGAIN["full"] - 2 * WIDE),
        ("selective", ("query", "key", "value", "attention", "attention_out", "gate", "up"), SCORES),
    ],
    ids=str,
)
def test_products_that_are_computed_again(remat, save, again):
    train = {} if save is None else {"remat_save": save}
    report = report_of(remat, train=train)
    assert report.matmul_flops == pytest.approx(NUM_LAYERS * (3 * FORWARD + again) + HEAD, rel=0.01)


@pytest.mark.proof
def test_memory_is_what_each_mode_keeps():
    """With many tokens, memory is activations; what selective adds to full is what it names, to the byte per token."""
    long = {"data": {"seq_len": 128}, "train": {"global_batch_size": 32, "loss_chunk_tokens": 64}}
    temp = {
        remat: report_of(remat, data=long["data"], train=long["train"]).memory.temp
        for remat in ("full", "selective", "none")
    }
    tokens = 4 * 128
    added = 4 * tokens * NUM_LAYERS * (H * h + 2 * K * h + H * h + D)
    assert temp["selective"] - temp["full"] == pytest.approx(added, rel=0.1), temp
    assert temp["none"] > 1.5 * temp["selective"], temp


def test_angles_of_positions_are_not_kept_once_per_layer():
    text = build(parity_config({"fsdp": 8}, model=MODEL, train={"remat": "full"})).lower_train_step().as_text()
    kept = set(re.findall(rf"tensor<{NUM_LAYERS}x{ROWS}x{SEQ_LEN}x\S*>", text))
    assert kept == {f"tensor<{NUM_LAYERS}x{ROWS}x{SEQ_LEN}x{D}xf32>"}


@pytest.mark.proof
def test_selective_keeps_no_gathered_weight():
    wide = {"embed_dim": 128, "mlp_dim": 512, "num_layers": 8, "head_dim": 16}
    temp = {remat: report_of(remat, model=wide).memory.temp for remat in ("full", "selective")}
    layers = 4 * 8 * (2 * 128 * 8 * 16 + 2 * 128 * 4 * 16 + 3 * 128 * 512)
    assert temp["selective"] - temp["full"] < 0.1 * layers, temp


def test_offload_is_refused_on_the_cpu_by_name():
    with pytest.raises(ConfigError) as caught:
        build(parity_config({"fsdp": 2}, model=MODEL, train={"remat": "offload"}))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("train.remat", "offload")
    assert "selective" in problem.remedy
