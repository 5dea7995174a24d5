"""A loss that is not finite: the run stops and names the step, or passes over it and counts."""

import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.loop import RunFailed
from tests.trainer.runs import column, poison, rows_of, run, saved_arrays


@pytest.fixture
def bad_row(uninterrupted) -> int:
    """A row of step 3 that is not in the other steps up to step 4."""
    third, fourth = (set(row["ids"]) for row in uninterrupted.rows[2:4])
    return min(third - fourth)


def test_the_run_stops_naming_the_step_keeps_its_checkpoint_and_can_go_on(
    tmp_path, monkeypatch, bad_row, uninterrupted
):
    with monkeypatch.context() as patch:
        poison(patch, {bad_row})
        with pytest.raises(RunFailed, match=r"step 3: loss inf, .* is not finite") as error:
            run(tmp_path, checkpoint={"every": 2})
    assert f"the newest checkpoint is step 2 in {tmp_path / 'checkpoints'}" in str(error.value)
    assert "optim.lr" in str(error.value)
    with Store(tmp_path / "checkpoints") as store:
        assert store.steps() == [2]
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert column(rows, "step") == [1, 2, 3]
    assert rows[-1]["loss"] is None
    assert rows[-1]["skipped"] == 1

    mended = run(tmp_path, train={"stop_at": 4}, checkpoint={"every": 2})
    np.testing.assert_allclose(column(mended.rows, "loss"), column(uninterrupted.rows, "loss")[:4], rtol=1e-6)


def test_skipping_leaves_parameters_and_moments_as_they_were(tmp_path, monkeypatch, bad_row, uninterrupted):
    poison(monkeypatch, {bad_row})
    skipped = run(
        tmp_path,
        train={"nonfinite": "skip", "max_skipped_steps": 1, "stop_at": 4},
        checkpoint={"every": 1},
    )
    assert column(skipped.rows, "skipped") == [0, 0, 1, 0]
    assert skipped.outcome.step == 4
    before, after = saved_arrays(tmp_path, 2), saved_arrays(tmp_path, 3)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert "step 3: loss inf" in (tmp_path / "log.txt").read_text()


def test_more_skipped_steps_in_a_row_than_allowed_end_the_run(tmp_path, monkeypatch, uninterrupted):
    poison(monkeypatch, {row["ids"][0] for row in uninterrupted.rows[:2]})
    expected = r"step 2: .*2 such steps in a row; train.max_skipped_steps = 1\); there is no checkpoint"
    with pytest.raises(RunFailed, match=expected):
        run(tmp_path, train={"nonfinite": "skip", "max_skipped_steps": 1})
    assert column(rows_of(tmp_path / "metrics.jsonl"), "skipped") == [1, 1]
    assert not list((tmp_path / "checkpoints").glob("*"))
