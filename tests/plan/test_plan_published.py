"""Predictions of published runs: how far off, that no outcome can leak into them, and how the script says it.

The sample is a seventh of a table of 866 public runs of other frameworks.
"""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jaxpar.plan.calibration import Measured, fit_shares, implied_share, leave_one_source_out, with_shares
from jaxpar.plan.efficiency import BANDS, GEMM_SHARE, closest_share, error_band, generation
from jaxpar.plan.published import predict_tokens_per_s, read_row
from jaxpar.plan.published_memory import call_fit, state_gib
from jaxpar.plan.published_score import fit_calls, rank_order, time_errors

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "tests" / "data" / "published_runs_sample.csv"
ROWS = list(csv.DictReader(SAMPLE.open(encoding="utf-8")))
OUTCOME = (
    "tok_s_gpu",
    "step_s",
    "rep_tflops",
    "rep_mfu",
    "mem_gib",
    "mem_kind",
    "status",
    "grade_time",
    "grade_memory",
)


def measured_runs():
    return [
        Measured(run=read_row(row), tokens_per_s=float(row["tok_s_gpu"])) for row in ROWS if row["grade_time"] == "1"
    ]


def test_outcomes_are_not_read():
    for row in ROWS:
        blank = {name: "" if name in OUTCOME else value for name, value in row.items()}
        assert read_row(blank) == read_row(row)
        without = {name: value for name, value in row.items() if name not in OUTCOME}
        assert read_row(without) == read_row(row)


def test_shipped_constants_predict_the_sample():
    predicted = with_shares(measured_runs(), GEMM_SHARE)
    errors = time_errors(predicted)
    assert sum(errors[name]["n"] for name in errors) == len(predicted) > 40
    assert errors["dense_short"]["median"] <= 0.09
    assert errors["dense_short"]["p90"] <= 0.20
    assert errors["dense_long_or_blackwell"]["median"] <= 0.15
    rank = rank_order(predicted)
    assert rank["right"] >= 0.92 * rank["pairs"] > 0


def test_fit_or_out_of_memory():
    calls = fit_calls([(read_row(row), row["status"] == "ok") for row in ROWS if row["grade_memory"] == "1"])
    assert calls["called"] >= 0.8 * calls["rows"]
    assert calls["right"] >= 0.9 * calls["called"]


def test_every_row_is_predicted_or_has_no_batch():
    assert all((read_row(row) is None) == (not row["gbs"]) for row in ROWS)


def test_an_implied_share_predicts_its_own_run_exactly():
    for measured in measured_runs()[::6]:
        share = implied_share(measured)
        if 0.06 < share < 1.9:
            assert predict_tokens_per_s(measured.run, share) == pytest.approx(measured.tokens_per_s, rel=2e-3)


def test_a_left_out_source_has_no_say_in_its_own_prediction():
    runs = measured_runs()
    stack = "llm-foundry"
    doubled = [Measured(run=m.run, tokens_per_s=m.tokens_per_s * (2 if m.run.stack == stack else 1)) for m in runs]
    predicted = {m.run.id: speed for m, speed in leave_one_source_out(runs) if m.run.stack == stack}
    again = {m.run.id: speed for m, speed in leave_one_source_out(doubled) if m.run.stack == stack}
    assert len(predicted) > 10
    assert predicted == again
    others = {m.run.id: speed for m, speed in leave_one_source_out(runs) if m.run.stack != stack}
    assert others != {m.run.id: speed for m, speed in leave_one_source_out(doubled) if m.run.stack != stack}


def test_constants_are_of_dense_runs_only():
    pairs = [(measured, 0.5) for measured in measured_runs()]
    assert set(fit_shares(pairs)) == {m.run.efficiency_key for m, _ in pairs if not m.run.shape.num_experts}
    assert all(0.2 < share < 1 for share in GEMM_SHARE.values())


@pytest.mark.parametrize(
    ("changes", "gpu", "precision", "native"),
    [
        ({"gpu": "H100-94-custom", "stack": "nemo-new"}, "H100 SXM", "bfloat16", True),
        ({"gpu": "L40S", "stack": "unheard-of", "precision": "fp8_block"}, "L40S", "float8", False),
        ({"mbs": "", "data": "", "precision": "fp16"}, "A100 SXM 80GB", "bfloat16", False),
    ],
)
def test_rows_of_other_kinds_are_read(changes, gpu, precision, native):
    row = next(row for row in ROWS if row["stack"] == "aleph-alpha" and row["precision"] == "bf16")
    run = read_row(row | changes)
    assert (run.cluster.gpu.name, run.layout.precision, run.framework.native_attention) == (gpu, precision, native)
    assert run.layout.num_devices == int(row["gpus"])
    assert predict_tokens_per_s(run, 0.5) > 0


def test_experts_fold_into_the_data_axis():
    row = next(row for row in ROWS if int(row["expert"]) > 1 and int(row["pipe"]) == 1)
    run = read_row(row)
    assert run.layout.expert > 1
    assert run.layout.batch_shards == float(row["data"])
    assert run.layout.num_devices == int(row["gpus"])


def test_state_of_a_distributed_optimizer():
    row = next(row for row in ROWS if row["stack"] == "aleph-alpha" and int(row["pipe"]) == 1)
    run = read_row(row)
    params = (run.shape.block_params + run.shape.embedding_params) / int(row["tensor"])
    by_hand = params * (2 + 2 + 12 / float(row["data"])) / 2**30
    assert state_gib(run) == pytest.approx(by_hand)


def test_a_run_near_the_limit_is_not_called():
    calls = {call_fit(read_row(row)) for row in ROWS if row["grade_memory"] == "1"}
    assert calls == {True, False, None}


def test_related_gpus_lend_their_constant():
    assert generation("RTX A6000") == "ampere"
    assert [generation(name) for name in ("L40S", "GB200", "GH200 96GB", "X1")] == [
        "ada",
        "blackwell",
        "hopper",
        "other",
    ]
    shares = {("H100 SXM", "bfloat16"): 0.7, ("H100 SXM", "float8"): 0.5, ("B200", "mxfloat8"): 0.4}
    assert closest_share("H200", "bfloat16", shares) == 0.7
    assert closest_share("B200", "float8", shares) == 0.4
    assert closest_share("A100 SXM 80GB", "bfloat16", shares) == 0.7
    assert closest_share("A100 SXM 80GB", "float32", shares) == 0.6


def test_bands_are_said_for_what_is_predicted():
    assert error_band("H100 SXM", "bfloat16", 8192, is_moe=False)["class"] == "dense_short"
    assert error_band("H100 SXM", "bfloat16", 65536, is_moe=False)["class"] == "dense_long_or_blackwell"
    assert error_band("GB200", "bfloat16", 4096, is_moe=True)["median"] == BANDS["moe"][0]
    assert error_band("L40S", "bfloat16", 4096, is_moe=False)["note"]


def run_script(*arguments):
    command = [sys.executable, str(REPOSITORY / "scripts" / "plan_published.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def test_script_prints_the_names_relied_on():
    scores = json.loads(run_script(str(SAMPLE), "--json").stdout)
    assert scores.keys() == {"dense_short", "dense_long_or_blackwell", "moe", "rank_20pct", "fit"}
    assert scores["moe"].keys() == {"n", "median", "p90"}
    assert scores["rank_20pct"].keys() == {"pairs", "right"}
    assert scores["fit"].keys() == {"rows", "called", "right"}


@pytest.mark.proof
def test_script_writes_the_page_and_its_plots(tmp_path):
    scores = json.loads(run_script(str(SAMPLE), "--json", "--docs", str(tmp_path)).stdout)
    page = (tmp_path / "plan-accuracy.md").read_text(encoding="utf-8")
    for name in ("plan-accuracy-shipped.svg", "plan-accuracy-left-out.svg"):
        assert name in page
        circles = [e for e in ET.parse(tmp_path / name).iter() if e.tag.endswith("circle")]
        assert len(circles) >= scores["dense_short"]["n"]


def test_script_keeps_predictions_when_outcomes_change(tmp_path):
    doubled = tmp_path / "doubled.csv"
    with doubled.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROWS[0]))
        writer.writeheader()
        for row in ROWS:
            speed = str(2 * float(row["tok_s_gpu"])) if row["tok_s_gpu"] else ""
            writer.writerow(row | {"tok_s_gpu": speed})
    once = json.loads(run_script(str(SAMPLE), "--json").stdout)
    twice = json.loads(run_script(str(doubled), "--json").stdout)
    # The same predictions, of twice the speed: every one is now about half.
    assert 0.4 < twice["dense_short"]["median"] < 0.6
    assert twice["rank_20pct"] == once["rank_20pct"]
