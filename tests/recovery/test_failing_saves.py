"""A disk that is full or cannot be written: the run ends by the next save, and names the last good checkpoint."""

import contextlib
import os
import resource
import threading
import time
from pathlib import Path

import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.config import config_to_toml
from tests.cli.command import PROGRAM, Command, ended, finish, start_all
from tests.recovery.breaking import breaking_check, breaking_save
from tests.recovery.expected import assert_rows_equal
from tests.trainer.runs import column, rows_of, tiny

# Writes that fail leave Orbax's own tasks behind, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BROKEN_AT = 4
LAST_GOOD = "the last good checkpoint is step 2"
NEXT_SAVE = 6


@pytest.fixture
def whole_again():
    """What mends the disk when called; called at the end anyway."""
    limits, mkdir = resource.getrlimit(resource.RLIMIT_FSIZE), os.mkdir

    def mend() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.mkdir = mkdir

    yield mend
    mend()


@pytest.mark.parametrize(
    ("kind", "reason", "left"),
    [
        ("full", "File too large", LAST_GOOD),
        ("read-only", "Read-only file system", LAST_GOOD),
        ("a file", "File exists", "there is no complete checkpoint"),
    ],
)
def test_one_process(jaxpar: Command, monkeypatch, tmp_path, uninterrupted, whole_again, kind, reason, left):
    run_dir = tmp_path / "run"
    (tmp_path / "config.toml").write_text(config_to_toml(tiny(run_dir, checkpoint={"every": 2, "keep": 20})))
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", breaking_save(kind, BROKEN_AT))
        result = jaxpar("train", tmp_path / "config.toml")
    whole_again()
    for thread in set(threading.enumerate()) - before:
        with contextlib.suppress(ValueError):  # a thread of Orbax gives again here what made it end
            thread.join(timeout=20)
        assert thread.daemon or not thread.is_alive(), f"the process would wait at its end for {thread.name}"
    assert result.code == 1
    last_line = result.err.splitlines()[-1]
    assert last_line.startswith(f"error: saving step {BROKEN_AT} to {run_dir}/checkpoints failed ("), result.err
    assert reason in last_line
    assert last_line.endswith(left)
    assert rows_of(run_dir / "metrics.jsonl")[-1]["step"] <= NEXT_SAVE

    if kind == "a file":
        (run_dir / "checkpoints").unlink()
    assert jaxpar("train", tmp_path / "config.toml", f"train.stop_at={NEXT_SAVE}").code == 0
    assert_rows_equal(rows_of(run_dir / "metrics.jsonl"), uninterrupted.rows[:NEXT_SAVE])
    assert jaxpar("verify-checkpoint", run_dir, "--step", BROKEN_AT).code == 0


def test_metrics_that_cannot_be_written(jaxpar: Command, monkeypatch, tmp_path, whole_again):
    """A disk that is full to the last byte shows there first, and log.txt must not hide it."""
    run_dir = tmp_path / "run"
    (tmp_path / "config.toml").write_text(config_to_toml(tiny(run_dir, checkpoint={"every": 2})))
    monkeypatch.setattr(Store, "check", breaking_check(5))
    result = jaxpar("train", tmp_path / "config.toml")
    whole_again()
    assert result.code == 1
    assert f"error: step 5: the metrics in {run_dir} cannot be written" in result.err
    assert f"; the newest checkpoint is step 4 in {run_dir}/checkpoints" in result.err
    assert "Traceback" not in result.err
    assert column(rows_of(run_dir / "metrics.jsonl"), "step") == [1, 2, 3, 4]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "step", "broken", "left"),
    [
        ("full", BROKEN_AT, 0, LAST_GOOD),
        ("full", BROKEN_AT, 1, LAST_GOOD),
        ("read-only", BROKEN_AT, 0, LAST_GOOD),
        ("full for metrics", 3, 0, "the newest checkpoint is step 2"),
    ],
)
def test_one_of_two_processes(on_two_devices, tmp_path: Path, kind, step, broken, left):
    programs = [PROGRAM, PROGRAM]
    programs[broken] = ("-m", "tests.recovery.breaking", kind, str(step))
    processes = start_all(on_two_devices, "train.steps=2000", cwd=tmp_path, programs=programs)
    with ended(*processes):
        culprit = finish(processes[broken])
        failed_at = time.monotonic()
        other = finish(processes[1 - broken])
        assert time.monotonic() - failed_at < 60
    assert culprit.code == 1, culprit.err
    assert left in culprit.err
    assert other.code == 1, other.err
    assert f"process {broken} of this run has failed; its own output says why" in other.err
    assert "Traceback" not in other.err
    assert rows_of(tmp_path / "run" / "metrics.jsonl")[-1]["step"] <= NEXT_SAVE
    with Store(tmp_path / "run" / "checkpoints") as store:
        assert store.steps() == [2]
