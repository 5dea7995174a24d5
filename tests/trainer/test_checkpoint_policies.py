"""When a run saves, what it keeps, what it goes on from when checkpoints are damaged, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.commit import Keep
from jaxpar.checkpoint.describe import read_metadata
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.verify import verify_step
from jaxpar.config import ConfigError
from tests.trainer.runs import BATCH, BATCHES_PER_EPOCH, MESH, STEPS, column, copied, rows_of, run, tiny


@pytest.fixture
def stopped(every_third, tmp_path) -> Path:
    return copied(every_third, tmp_path / "stopped")


def steps_of(run_dir: Path) -> list[int]:
    return Store(run_dir / "checkpoints").steps()


def flip_a_weight(step: Path, *, section: str = "params") -> None:
    """One bit in the middle of a section's biggest data file: in an array, which makes up nearly all of it."""
    data = max((step / section).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)


# --- when to save and what to keep ------------------------------------------------------------------------------------


def test_saves_by_the_clock_come_at_any_step(tmp_path):
    run(tmp_path / "run", train={"stop_at": 5}, checkpoint={"every_minutes": 1e-6, "keep": 9, "final": False})
    assert steps_of(tmp_path / "run") == [2, 4]  # a step hears the vote of the one before, and a save ends the vote


def test_a_clock_that_is_not_due_saves_nothing(tmp_path):
    run(tmp_path / "run", train={"stop_at": 3}, checkpoint={"every_minutes": 60.0, "final": False})
    assert steps_of(tmp_path / "run") == []


def test_newest_best_and_periodic_checkpoints_are_kept(tmp_path):
    directory = tmp_path / "run"
    run(
        directory,
        train={"steps": STEPS},
        checkpoint={"every": 1, "keep": 1, "keep_every": 5, "keep_best": 2, "best_metric": "loss"},
    )
    losses = {row["step"]: row["loss"] for row in rows_of(directory / "metrics.jsonl")}
    best = sorted(losses, key=losses.get)[:2]
    assert steps_of(directory) == sorted({STEPS, 5, 10, *best})
    for step in steps_of(directory):
        mark = commit.read_commit_mark(directory / "checkpoints" / str(step))
        assert mark.metrics == {"loss": losses[step]}


@given(
    st.dictionaries(st.integers(1, 60), st.one_of(st.none(), st.floats(0, 10)), min_size=1),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(0, 4),
)
def test_what_is_kept_is_the_newest_the_periodic_and_the_best(losses, latest, every, best):
    keep = Keep(latest=latest, every=every, best=best, metric="eval_loss")
    steps = {step: {} if loss is None else {"eval_loss": loss} for step, loss in losses.items()}
    kept = keep.kept(steps)
    assert kept <= steps.keys()
    assert set(sorted(steps)[-latest:]) <= kept
    assert {step for step in steps if every and step % every == 0} <= kept
    compared = {step: metrics["eval_loss"] for step, metrics in steps.items() if metrics}
    assert len(kept & compared.keys()) >= min(best, len(compared))
    dropped = [loss for step, loss in compared.items() if step not in kept]
    if dropped:
        assert sum(compared[step] <= min(dropped) for step in kept & compared.keys()) >= best


def test_the_best_by_validation_need_a_validation_pass_at_their_step(tmp_path):
    with pytest.raises(ConfigError, match=r"set checkpoint\.every=4") as error:
        run(
            tmp_path / "run",
            data={"validation_fraction": 0.5},
            train={"eval_every": 2},
            checkpoint={"every": 5, "keep_best": 1},
        )
    assert error.value.problems[0].key == "checkpoint.keep_best"


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_newest_checkpoint_sends_the_run_back_to_the_one_before(stopped, uninterrupted):
    newest = stopped / "checkpoints" / "9"
    flip_a_weight(newest)
    again = run(stopped, train={"stop_at": 10}, checkpoint={"every": 3})
    log = (stopped / "log.txt").read_text()
    assert "checkpoint of step 9 is passed over" in log
    assert "is not what was saved" in log
    assert f"resumed from step 6 of {stopped}" in log
    assert column(again.rows, "ids") == column(uninterrupted.rows[:10], "ids")
    assert column(again.rows, "loss") == pytest.approx(column(uninterrupted.rows[:10], "loss"), rel=1e-5)
    assert steps_of(stopped) == [6, 9, 10]
    assert verify_step(newest).faults == ()
    assert (stopped / "checkpoints" / "9.damaged").is_dir()


def test_damaged_metadata_is_passed_over_too(stopped):
    path = stopped / "checkpoints" / "9" / "_CHECKPOINT_METADATA"
    content = path.read_text()
    path.write_text(content.replace('"offset": ', '"offset": 1', 1))
    assert path.read_text() != content
    again = run(stopped, train={"stop_at": 10})
    assert column(again.rows, "step") == list(range(1, 11))
    assert "resumed from step 6" in (stopped / "log.txt").read_text()


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_anew(stopped):
    for step in (3, 6, 9):
        flip_a_weight(stopped / "checkpoints" / str(step), section="optimizer")
    with pytest.raises(DamagedCheckpointError, match=r"(?s)step 3 .*resume from another step: there is none"):
        run(stopped)
    assert column(rows_of(stopped / "metrics.jsonl"), "step") == list(range(1, 10))


def test_the_comparison_can_be_turned_off(stopped):
    flip_a_weight(stopped / "checkpoints" / "9")
    again = run(stopped, train={"stop_at": 10}, checkpoint={"verify": False})
    assert "resumed from step 9" in (stopped / "log.txt").read_text()
    assert again.outcome.step == 10


def test_a_named_step_that_is_damaged_is_not_replaced_by_another(stopped, tmp_path):
    flip_a_weight(stopped / "checkpoints" / "9")
    with pytest.raises(DamagedCheckpointError, match="step 9"):
        run(tmp_path / "other", checkpoint={"resume": str(stopped / "checkpoints" / "9")})
    other = run(tmp_path / "other", train={"stop_at": 10}, checkpoint={"resume": str(stopped)})
    assert column(other.rows, "step") == [7, 8, 9, 10]
    assert steps_of(stopped) == [3, 6, 9]  # a directory that is only read from is left as it is


# --- what is saved, and what is said ----------------------------------------------------------------------------------


def test_a_checkpoint_says_what_it_is(every_third):
    metadata = read_metadata(every_third / "checkpoints" / "9")
    rows = rows_of(every_third / "metrics.jsonl")
    assert metadata["position"] == {"epoch": 9 // BATCHES_PER_EPOCH, "offset": 9 % BATCHES_PER_EPOCH * BATCH}
    assert metadata["tokens_seen"] == sum(column(rows, "tokens"))
    assert metadata["mesh"] == {"pipeline": 1, "expert": 1, "context": 1, **MESH}
    assert metadata["metrics"] == {"loss": rows[-1]["loss"]}
    assert (metadata["step"], metadata["seed"], metadata["processes"]) == (9, 0, 1)
    assert metadata["dataset"]["source"] == "synthetic 1"
    assert len(metadata["model_fingerprint"]) == 64
    assert metadata["config"]["optim"]["lr"] == tiny(every_third).optim.lr
    mark = commit.read_commit_mark(every_third / "checkpoints" / "9")
    assert {name.partition("/")[0] for name in mark.checksums} == {"params", "optimizer"}


def test_a_save_that_fails_ends_the_run_at_the_next_step_naming_the_last_good_one(tmp_path, monkeypatch):
    write_mark = commit.write_commit_mark

    def full_disk(step_directory: Path, **arguments) -> None:
        if step_directory.name == "4":
            raise OSError(28, "No space left on device")
        write_mark(step_directory, **arguments)

    monkeypatch.setattr(commit, "write_commit_mark", full_disk)
    with pytest.raises(CheckpointError, match=r"saving step 4 .*No space left.*the last good checkpoint is step 2"):
        run(tmp_path / "run", train={"steps": STEPS}, checkpoint={"every": 2})
    last = rows_of(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert 4 <= last < STEPS
    assert steps_of(tmp_path / "run") == [2]


def test_a_run_with_nothing_left_to_train_compiles_nothing(every_third, tmp_path):
    again = run(copied(every_third, tmp_path / "again"), train={"stop_at": 9})
    assert again.outcome.checkpoint.name == "9"
    assert again.outcome.to_dict() == json.loads(json.dumps(again.outcome.to_dict()))
    assert again.compilations.count("train_step") == 0
    assert "nothing is left to train" in (tmp_path / "again" / "log.txt").read_text()
