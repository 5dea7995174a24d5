"""The training step of a mixture of experts as the CUDA compiler makes it, without a GPU: a small Qwen3-MoE on 8 GPUs,
experts over the expert axis, tokens exchanged raggedly. Fails where that compiler is missing."""

import pytest

from jaxpar.experiments.compile import launch
from tests.h100.test_h100_programs import report_of

pytestmark = pytest.mark.proof

QWEN3_MOE = (
    "model.preset=qwen3-30b-a3b",
    "model.num_layers=4",
    "model.balance_coef=0.001",
    "mesh.expert=8",
    "mesh.expert_receive_factor=2",
    "data.seq_len=4096",
    "train.global_batch_size=8",
    "--devices",
    "8",
)
PRODUCT, OF_WEIGHTS = "mosaic_gpu_v2 ragged_dot_sm90", "mosaic_gpu_v2 ragged_contracting_dim_dot_sm90"


@pytest.fixture(scope="module")
def compiled():
    return report_of(*QWEN3_MOE, "--gpu", "h100")["compiled"]


def test_every_product_of_the_experts_is_grouped(compiled):
    """Three matrices: forward, forward again under remat full, and two gradients each."""
    assert compiled["grouped"] == "experts multiplied by tokamax mosaic_gpu"
    assert compiled["custom_calls"][PRODUCT] == 3 + 3 + 3
    assert compiled["custom_calls"][OF_WEIGHTS] == 3
    assert "masked dense product" not in {lint["rule"] for lint in compiled["lints"]}


def test_a_masked_dense_product_would_be_found(compiled, monkeypatch):
    monkeypatch.setattr(launch, "WORKER", "tests.h100.masked_worker")
    masked = report_of.__wrapped__(*QWEN3_MOE, "--gpu", "h100")["compiled"]
    assert "masked dense product" in {lint["rule"] for lint in masked["lints"]}
    assert PRODUCT not in masked["custom_calls"]
    assert masked["peak_bytes"] > 2 * compiled["peak_bytes"]


def test_memory_is_what_the_arithmetic_says(compiled):
    assert abs(compiled["difference"]) <= 0.1, compiled["difference"]


def test_only_rows_that_are_there_travel(compiled):
    """Out and back, forward, forward again and backward; never a dense exchange of the worst case."""
    rows = [row for row in compiled["collectives"] if row["axis"] == "expert" and row["loop"]]
    ragged = [row for row in rows if row["op"] == "ragged-all-to-all"]
    assert sum(row["count"] for row in ragged) == 6
    assert {row["dtype"] for row in ragged} == {"bf16"}
    assert sum(row["bytes"] for row in rows if row["op"] == "all-to-all") < 2**10


@pytest.mark.parametrize(("gpu", "products"), [("a100", {"mosaic_gpu_v2 ragged_dot_sm80": 3 + 3 + 3}), ("b200", {})])
def test_other_generations_multiply_no_masked_dense_product(gpu, products):
    compiled = report_of(*QWEN3_MOE, "--gpu", gpu)["compiled"]
    assert "tile by tile in a loop (not tokamax: " in compiled["grouped"]
    assert {name: count for name, count in compiled["custom_calls"].items() if "ragged" in name} == products
    assert "masked dense product" not in {lint["rule"] for lint in compiled["lints"]}
