"""The script for whoever has one GPU: rehearsed as a whole on the CPU, and what it takes for a failure."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import attention_numerics
import single_gpu

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SMALL = attention_numerics.cases(small=True)


def test_xla_attention_is_within_rounding_of_the_reference():
    for case in SMALL:
        xla, *others = attention_numerics.compare(case)
        assert xla["ok"], xla
        assert max(xla["differences"].values()) > 1e-4  # bfloat16 against float32, not one against itself
        assert [other["kernel"] for other in others] == ["tokamax", "cudnn"]
        assert all("it runs on GPUs" in other["left_out"] for other in others)


def without_documents(q, k, v, segment_ids):
    return attention_numerics.reference(q, k, v, jnp.ones_like(segment_ids))


def with_one_kv_head(q, k, v, segment_ids):
    return attention_numerics.reference(q, k[:, :, :1], v[:, :, :1], segment_ids)


@pytest.mark.parametrize("wrong", [without_documents, with_one_kv_head])
def test_a_wrong_kernel_is_found(monkeypatch, wrong):
    monkeypatch.setattr(attention_numerics, "attend", wrong)
    packed = next(case for case in SMALL if case.packed)
    found = next(iter(attention_numerics.compare(packed)))
    assert not found["ok"]
    assert "TOO FAR OFF" in single_gpu.attention_words(found)


def test_a_kernel_that_raises_does_not_hide_the_others(monkeypatch):
    def broken(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(attention_numerics, "attend", broken)
    found, *others = attention_numerics.compare(SMALL[0])
    assert (found["ok"], found["error"], len(others)) == (False, "RuntimeError: no luck", 2)


@pytest.mark.parametrize(
    ("row", "fails"),
    [
        ({"status": "ok"}, False),
        ({"status": "illegal"}, False),
        ({"status": "left out"}, False),
        ({"status": "out of memory", "predicted_fits": False}, False),
        ({"status": "out of memory", "predicted_fits": True}, True),
        ({"status": "timeout"}, True),
        ({"status": "failed"}, True),
    ],
)
def test_what_counts_as_a_failure(row, fails):
    assert single_gpu.is_failure(row) == fails


@pytest.mark.proof
def test_the_rehearsal_runs_every_part(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPTS / "single_gpu.py", "--cpu", "--json", tmp_path / "found.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failures"] == []
    assert [row["kernel"] for row in found["attention"] if row.get("ok")] == ["xla", "xla"]
    ran, refused = found["steps"]
    assert (ran["attention"], ran["status"], ran["steps"]) == ("xla", "ok", single_gpu.STEPS)
    assert ran["step_s"] > 0
    assert ran["compiled_bytes"] > ran["planned_bytes"] / 2 > 0
    assert ran["mfu"] is None
    assert (refused["attention"], refused["status"]) == ("cudnn", "illegal")
    assert "it runs on GPUs, and this is cpu" in refused["reason"]


@pytest.mark.proof
def test_a_machine_without_a_gpu_is_told_so_and_what_time_does_not_allow_is_left_out(tmp_path):
    command = [sys.executable, SCRIPTS / "single_gpu.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "no GPU: JAX sees the CPU alone; --cpu rehearses without one" in result.stdout
    wrong = subprocess.run([*command, "model.presett=x"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2
    assert "model.presett" in wrong.stderr
    clock = single_gpu.Clock(0)
    settings = single_gpu.settings_of(["train.global_batch_size=4"], on_cpu=True)
    assert [setting for setting in settings if "batch_size" in setting] == ["train.global_batch_size=4"]
    (row,) = single_gpu.step_rows(clock, tmp_path, [("xla", "full")], settings)
    assert (row["status"], row["reason"]) == ("left out", "no time is left (--budget)")
