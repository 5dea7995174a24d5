"""Two processes meet a damaged checkpoint: both fall back on the one before, or both end; neither waits for ever."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar.checkpoint.store import Store
from tests.cli.command import PROGRAM, finish_all, start_all
from tests.recovery.expected import assert_rows_equal
from tests.trainer.runs import rows_of, run

NEWEST = 4


def largest_data_file(step_directory: Path) -> Path:
    return max(step_directory.glob("params/**/d/*"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def flip_data(step_directory: Path) -> None:
    flip(largest_data_file(step_directory))


def truncate_data(step_directory: Path) -> None:
    path = largest_data_file(step_directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_metadata(step_directory: Path) -> None:
    (step_directory / "_CHECKPOINT_METADATA").unlink()


def flip_tree(step_directory: Path) -> None:
    flip(step_directory / "params" / "_METADATA")


def nothing(_: Path) -> None:
    """For what only one process sees."""


@pytest.fixture(scope="module")
def saved(on_two_devices, tmp_path_factory) -> Path:
    """Working directory of a run with steps 2 and 4; tests damage copies of it."""
    directory = tmp_path_factory.mktemp("saved")
    results = finish_all(start_all(on_two_devices, f"train.stop_at={NEWEST}", cwd=directory))
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    return directory


def test_one_process_falls_back_from_a_flipped_bit(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted.directory, directory)
    for step in range(NEWEST + 2, 13, 2):
        shutil.rmtree(directory / "checkpoints" / str(step))
    flip_data(directory / "checkpoints" / str(NEWEST))
    again = run(directory, train={"stop_at": NEWEST + 1}, checkpoint={"every": 2, "keep": 20})
    assert_rows_equal(again.rows, uninterrupted.rows[: NEWEST + 1])
    log = (directory / "log.txt").read_text()
    assert f"checkpoint of step {NEWEST} is passed over: step {NEWEST} of" in log
    assert "params/" in log.partition("is passed over")[2]
    assert "resumed from step 2 of" in log


@pytest.mark.proof
@pytest.mark.parametrize(
    ("damage", "programs", "why"),
    [
        pytest.param(flip_data, (PROGRAM, PROGRAM), "params/", id="a bit of the data"),
        pytest.param(truncate_data, (PROGRAM, PROGRAM), "were written", id="data cut short"),
        pytest.param(remove_metadata, (PROGRAM, PROGRAM), "file _CHECKPOINT_METADATA is missing", id="no metadata"),
        pytest.param(flip_tree, (PROGRAM, PROGRAM), "file params/_METADATA is damaged", id="a bit of the tree"),
        pytest.param(
            nothing,
            (PROGRAM, ("-m", "tests.recovery.breaking", "unreadable", str(NEWEST))),
            "process 1: step 4",
            id="only process 1 cannot read",
        ),
        pytest.param(
            nothing,
            (("-m", "tests.recovery.breaking", "unreadable", str(NEWEST)), PROGRAM),
            "Input/output error",
            id="only process 0 cannot read",
        ),
    ],
)
def test_two_processes_fall_back_alike(
    saved, on_two_devices, uninterrupted, tmp_path, damage: Callable[[Path], None], programs, why
):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    damage(checkpoints / str(NEWEST))
    results = finish_all(start_all(on_two_devices, "train.stop_at=5", cwd=tmp_path, programs=programs))
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    passed_over = results[0].err.partition(f"warning: checkpoint of step {NEWEST} is passed over: ")[2]
    assert why in passed_over
    assert "resumed from step 2 of" in passed_over
    assert_rows_equal(rows_of(tmp_path / "run" / "metrics.jsonl"), uninterrupted.rows[:5])
    assert (checkpoints / f"{NEWEST}.damaged").is_dir()
    with Store(checkpoints) as store:
        assert store.steps() == [2, NEWEST, 5]


@pytest.mark.proof
def test_two_processes_end_when_every_step_is_damaged(saved, on_two_devices, tmp_path):
    """Never starts anew over a run that could be mended."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in (2, NEWEST):
        flip_data(tmp_path / "run" / "checkpoints" / str(step))
    results = finish_all(start_all(on_two_devices, "train.stop_at=5", cwd=tmp_path))
    assert [result.code for result in results] == [1, 1], [result.err for result in results]
    for result in results:
        assert "step 2 of" in result.err
        assert "there is none" in result.err
        assert "Traceback" not in result.err
    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
