"""The two step scripts that bench_step.py compares do the same work, and both learn."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import baseline_step
import product_step

from jaxpar.audit import audit

SHAPE = baseline_step.Shape(
    vocab_size=256, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64, seq_len=16, rows=8
)


@pytest.fixture(scope="module")
def built():
    return {module: module.build(SHAPE, baseline_step.Layout(fsdp=8)) for module in (baseline_step, product_step)}


def test_both_do_the_same_matrix_products(built):
    baseline, product = (audit(one.compiled) for one in built.values())
    assert product.matmul_flops == baseline.matmul_flops
    tokens, layers = SHAPE.rows * SHAPE.seq_len // 8, SHAPE.num_layers
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    # Forward, recomputed (the last product of a block is not needed), and twice backward; the head is not recomputed.
    weights = 2 * tokens * (layers * (4 * block - 32 * 64) + 3 * 32 * 256)
    attention = layers * 4 * (2 * 2 * tokens * SHAPE.seq_len * 32)
    assert product.matmul_flops == weights + attention


def test_both_learn_the_repeated_batches(built):
    for one in built.values():
        measured = baseline_step.run(one, 9)
        losses = measured["losses"]
        assert max(losses[4:8]) < min(losses[:4])
        assert len(measured["step_s"]) == len(measured["step_cpu_s"]) == 9
        assert measured["first_step_at"] > 0
        assert one.num_params == sum(
            [2 * 256 * 32, 32, SHAPE.num_layers * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)]
        )


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}, {"fsdp": 8, "remat": "none"}],
    ids=str,
)
def test_both_do_the_same_matrix_products_on_every_layout(layout):
    programs = [module.build(SHAPE, baseline_step.Layout(**layout)) for module in (baseline_step, product_step)]
    baseline, product = (audit(program.compiled).matmul_flops for program in programs)
    assert product == pytest.approx(baseline, rel=0.02)
