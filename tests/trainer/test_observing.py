"""What a run tells of itself: where its time went, and a profile of the steps that were asked for."""

import jax
import pytest

from jaxpar.config.schema import ObserveConfig
from jaxpar.runtime.profile import ProfileWindow
from tests.trainer.runs import column, rows_of, run

PARTS = ("data_wait_s", "device_wait_s", "save_s", "host_s")


def test_the_parts_of_every_step_add_up(tmp_path):
    result = run(tmp_path / "run", train={"stop_at": 4}, checkpoint={"every": 2, "final": False})
    for row in result.rows:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"])
        assert all(row[part] >= 0 for part in PARTS)
    assert all(seconds > 0 for seconds in column(result.rows, "device_wait_s"))
    # what was saved after step 2 held step 3 up
    assert [row["save_s"] > 0 for row in result.rows] == [False, False, True, False]
    seconds = result.outcome.seconds
    assert sum(value for key, value in seconds.items() if key != "total_s") == pytest.approx(seconds["total_s"])
    assert seconds["total_s"] >= sum(column(result.rows, "step_s"))
    assert result.outcome.to_dict()["seconds"] == seconds
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "time in the loop 0:" in log
    assert "device " in log


@pytest.mark.proof
def test_validation_is_not_part_of_a_step(tmp_path):
    result = run(tmp_path / "run", train={"stop_at": 4, "eval_every": 2}, data={"validation_fraction": 0.2})
    evaluations = rows_of(tmp_path / "run" / "eval.jsonl")
    assert len(evaluations) == 3
    assert all(row["eval_s"] > 0 for row in evaluations)
    seconds = result.outcome.seconds
    assert seconds["eval_s"] == pytest.approx(sum(column(evaluations, "eval_s")))
    assert seconds["total_s"] >= sum(column(result.rows, "step_s")) + seconds["eval_s"]
    assert "validation " in (tmp_path / "run" / "log.txt").read_text()


def traces(directory):
    return list((directory / "profile").rglob("*.xplane.pb"))


def test_a_window_of_steps_is_profiled(tmp_path):
    plain = run(tmp_path / "plain", train={"stop_at": 5})
    result = run(tmp_path / "run", train={"stop_at": 5}, observe={"profile_start": 3, "profile_steps": 2})
    (trace,) = traces(result.directory)
    found = jax.profiler.ProfileData.from_file(str(trace))
    names = {event.name for plane in found.planes for line in plane.lines for event in line.events}
    assert {"train"} <= names
    assert f"profile of steps 3 to 4: {result.directory / 'profile'}" in (result.directory / "log.txt").read_text()
    assert column(result.rows, "loss") == column(plain.rows, "loss")
    assert traces(plain.directory) == []


def test_a_window_that_the_run_does_not_fill_is_still_written(tmp_path):
    result = run(tmp_path / "run", train={"stop_at": 3}, observe={"profile_start": 3, "profile_steps": 5})
    assert len(traces(result.directory)) == 1
    assert "profile of steps 3 to 3 (cut short: asked for up to step 7)" in (result.directory / "log.txt").read_text()


def test_who_profiles_and_when(tmp_path):
    said = []
    observe = ObserveConfig(profile_start=3, profile_steps=2)
    window = ProfileWindow(observe, tmp_path, process_id=1, say=said.append)
    assert [window.begins(step) for step in range(1, 6)] == [False, False, True, False, False]
    assert [window.ends(step) for step in range(1, 6)] == [False, False, False, True, False]
    window.start(3)
    window.stop(4)
    assert list(tmp_path.iterdir()) == []  # process 0 does
    window.check_reached(1, 3)
    assert said == []
    window.check_reached(4, 9)
    assert said == ["observe.profile_start = 3 is not among the steps 4 to 9 that are left: no profile"]
    none = ProfileWindow(ObserveConfig(), tmp_path, process_id=0, say=said.append)
    none.check_reached(1, 9)
    assert not any(none.begins(step) or none.ends(step) for step in range(1, 9))
    assert len(said) == 1


@pytest.mark.proof
def test_another_profiler_does_not_end_the_run(tmp_path):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        result = run(tmp_path / "run", train={"stop_at": 3}, observe={"profile_start": 2})
    finally:
        jax.profiler.stop_trace()
    assert result.outcome.step == 3
    assert "warning: no profile: " in (result.directory / "log.txt").read_text()
