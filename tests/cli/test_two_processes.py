"""One run on two processes of four fake devices: the same answer as one process of eight, and one end for both."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from tests.cli.command import PROGRAM, ended, finish, finish_all, start_all, wait_until
from tests.trainer.runs import column, rows_of, run, tiny

pytestmark = pytest.mark.proof

GLOO_PIECES = re.compile(
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d+"
)
"""Native threads tell of their connections at once and piece by piece, so that their lines come apart anywhere."""

FAILING = (
    "-c",
    """
import sys
from jaxpar.cli.main import main
from jaxpar.data.synthetic import SyntheticRows

read = SyntheticRows.__getitem__
def fail_later(self, i, reads=[]):
    reads.append(i)
    if len(reads) > 40:
        raise OSError("the disk of this node is gone")
    return read(self, i)
SyntheticRows.__getitem__ = fail_later
main()
""",
)


def start_both(tmp_path: Path, *overrides: str, programs: tuple = (PROGRAM, PROGRAM)) -> list[subprocess.Popen]:
    # Above the test's own directory, so that the tests share compiled programs.
    runtime = {"cpu_devices": 4, "compilation_cache": str(tmp_path.parent / "compiled_for_two")}
    return start_all(tiny(Path("run"), runtime=runtime), *overrides, cwd=tmp_path, programs=programs)


def test_the_same_run_as_one_process_of_eight_devices(tmp_path):
    first, second = finish_all(start_both(tmp_path, "train.stop_at=4", "--json"))
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert "2 processes x 4 = 8 devices (cpu)" in first.err
    assert "step 4/4" in first.err
    assert json.loads(first.out)["step"] == 4
    assert second.out == ""
    assert not GLOO_PIECES.sub("", second.err).strip()

    alone = run(tmp_path / "alone", train={"stop_at": 4})
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert column(rows, "step") == [1, 2, 3, 4]
    assert column(rows, "ids") == column(alone.rows, "ids")
    for name in ("loss", "grad_norm", "lr", "tokens"):
        np.testing.assert_allclose(column(rows, name), column(alone.rows, name), rtol=1e-5, err_msg=name)

    # Written by two processes, read by one.
    on = run(tmp_path / "run", train={"stop_at": 5}, checkpoint={"resume": "must"})
    reference = run(tmp_path / "alone", train={"stop_at": 5}, checkpoint={"resume": "must"})
    assert on.rows[4]["loss"] == pytest.approx(reference.rows[4]["loss"], rel=1e-5)


@pytest.mark.parametrize("told", [(0, 1), (1,)], ids=["both", "only the second"])
def test_an_interruption_ends_both_after_the_same_step(tmp_path, told):
    processes = start_both(tmp_path, "train.steps=2000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ended(*processes):
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, processes[0])
        for i in told:
            processes[i].send_signal(signal.SIGINT)
        results = [finish(process) for process in processes]
    assert [result.code for result in results] == [130, 130], [result.err for result in results]
    step = rows_of(metrics)[-1]["step"]
    with Store(tmp_path / "run" / "checkpoints") as store:
        assert store.steps() == [step]
        assert store.skipped() == []

    again = finish_all(start_both(tmp_path, f"train.stop_at={step + 3}", "train.steps=2000"))
    assert [result.code for result in again] == [0, 0], [result.err for result in again]
    assert column(rows_of(metrics), "step") == list(range(1, step + 4))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_both(tmp_path, failing):
    """Soon, in words, and with a checkpoint to go on from: not when heartbeats or collectives time out."""
    programs = (FAILING, PROGRAM) if failing == 0 else (PROGRAM, FAILING)
    processes = start_both(tmp_path, "checkpoint.every=2", programs=programs)
    with ended(*processes):
        culprit = finish(processes[failing])
        failed_at = time.monotonic()
        other = finish(processes[1 - failing])
        assert time.monotonic() - failed_at < 60
    assert culprit.code == 1
    assert "OSError: the disk of this node is gone" in culprit.err
    assert "while reading row" in culprit.err
    assert other.code != 0
    with Store(tmp_path / "run" / "checkpoints") as store:
        latest = store.latest()
    assert latest

    again = finish_all(start_both(tmp_path, f"train.stop_at={latest + 1}"))
    assert [result.code for result in again] == [0, 0], [result.err for result in again]
    assert f"resumed from step {latest}" in again[0].err


def test_bad_input_that_shows_late_exits_2_on_both(tmp_path):
    """The seed is compared with the checkpoint's only after the processes have met."""
    assert [result.code for result in finish_all(start_both(tmp_path, "train.stop_at=1"))] == [0, 0]
    results = finish_all(start_both(tmp_path, "run.seed=1"))
    assert [result.code for result in results] == [2, 2], [result.err for result in results]
    for result in results:
        assert "run.seed = 1" in result.err
        assert "Traceback" not in result.err


def test_a_loss_that_is_not_finite_ends_both_with_the_step(tmp_path):
    results = finish_all(start_both(tmp_path, "optim.lr=1e30"))
    assert [result.code for result in results] == [1, 1]
    step = rows_of(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    for result in results:
        assert f"step {step}: loss" in result.err
        assert "Traceback" not in result.err
