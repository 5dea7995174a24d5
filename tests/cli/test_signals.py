"""Ctrl-C and SIGTERM in the middle of a run, and the same command once more."""

import collections
import json
import signal
from pathlib import Path

import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.config import config_to_toml
from tests.cli.command import Result, ended, finish, start, wait_until
from tests.trainer.runs import column, rows_of, tiny

STEPS = 300


@pytest.fixture
def config(tmp_path) -> Path:
    """A run on two fake devices, which takes some seconds after it was compiled."""
    path = tmp_path / "signals.toml"
    config = tiny(
        Path("run"),
        runtime={"cpu_devices": 2, "compilation_cache": "compiled"},
        mesh={"data": 1, "fsdp": 2, "tensor": 1},
        train={"steps": STEPS, "microbatches": 1},
        observe={"log_every": 100},
    )
    path.write_text(config_to_toml(config))
    return path


def saved_steps(run_dir: Path) -> list[int]:
    with Store(run_dir / "checkpoints") as store:
        return store.steps()


def last_step(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def train_until(config: Path, past: int, number: signal.Signals) -> Result:
    """Starts the run, sends it a signal some steps after step ``past``, and waits for it to end."""
    process = start("train", config, cwd=config.parent)
    with ended(process):
        wait_until(lambda: last_step(config.parent / "run") > past + 2, process)
        process.send_signal(number)
        return finish(process)


def test_interrupted_then_preempted_then_done(config):
    run_dir = config.parent / "run"
    result = train_until(config, 0, signal.SIGINT)
    first = last_step(run_dir)
    assert result.code == 130, result.err
    assert saved_steps(run_dir) == [first]
    assert 2 < first < STEPS
    assert "finishing this step; press Ctrl-C again" in result.err
    assert f"interrupted at step {first}" in result.err
    go_on = next(line for line in result.err.splitlines() if "go on" in line)
    assert go_on.endswith(f"-m jaxpar train {config}")

    result = train_until(config, first, signal.SIGTERM)
    second = last_step(run_dir)
    assert result.code == 75, result.err
    assert first < second < STEPS
    assert saved_steps(run_dir) == [first, second]
    assert f"resumed from step {first}" in result.err
    assert f"preempted at step {second}" in result.err

    process = start("train", config, cwd=config.parent)
    with ended(process):
        result = finish(process)
    assert result.code == 0, result.err
    assert f"done at step {STEPS}" in result.err
    rows = rows_of(run_dir / "metrics.jsonl")
    assert column(rows, "step") == list(range(1, STEPS + 1))
    # 300 batches of 8 are 100 epochs of 24 rows.
    seen = collections.Counter(i for ids in column(rows, "ids") for i in ids)
    assert seen == dict.fromkeys(range(24), 100)
    for place in range(0, STEPS, 3):
        assert len({i for ids in column(rows, "ids")[place : place + 3] for i in ids}) == 24


@pytest.mark.proof
@pytest.mark.parametrize(
    ("number", "code", "last_words"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        # Most likely inside the compiler: it ends at once, and a scheduler starts it again.
        (signal.SIGTERM, 75, "preempted while no step ran; the same command goes on from what is saved\n"),
    ],
    ids=["interrupted", "preempted"],
)
def test_told_to_stop_before_the_first_step(config, number, code, last_words):
    """Nothing is saved, and the same command starts anew."""
    process = start("train", config, cwd=config.parent)
    with ended(process):
        wait_until((config.parent / "run" / "log.txt").exists, process)
        process.send_signal(number)
        result = finish(process)
    assert result.code == code
    assert result.err.endswith(last_words)
    assert "Traceback" not in result.err
    assert saved_steps(config.parent / "run") == []


@pytest.mark.proof
def test_a_learning_rate_that_explodes_exits_1(config):
    """With 1e30 the parameters overflow float32 in products, and with them loss or gradient."""
    process = start("train", config, "optim.lr=1e30", "checkpoint.every=1", "checkpoint.keep=100", cwd=config.parent)
    with ended(process):
        result = finish(process)
    run_dir = config.parent / "run"
    *good, bad = rows_of(run_dir / "metrics.jsonl")
    assert result.code == 1
    assert f"error: step {bad['step']}: loss " in result.err
    assert "is not finite; the newest checkpoint is step" in result.err
    assert "Traceback" not in result.err
    assert None in (bad["loss"], bad["grad_norm"])
    assert None not in [row[name] for row in good for name in ("loss", "grad_norm")]
    assert saved_steps(run_dir) == column(good, "step")
