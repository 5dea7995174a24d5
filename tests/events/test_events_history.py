"""Metrics read back: whole, cut off, damaged, resumed, short, or not there."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.config.schema import ObserveConfig
from jaxpar.events import RunMetrics
from jaxpar.events.history import Series, read_history


def written(directory, *lines, name="metrics.jsonl"):
    directory.mkdir(exist_ok=True, parents=True)
    (directory / name).write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(directory)


def row(step, loss=1.0, **more):
    return {"step": step, "loss": loss, "lr": 0.1, **more}


def test_what_a_run_records_is_read(tmp_path):
    keys = {"grad_norm": 1, "tokens": 8, "tokens_per_s": 4.0, "data_wait_s": 0.5, "ids": [1, 2]}
    with RunMetrics(tmp_path, ObserveConfig(), resume_step=None) as metrics:
        for step, loss in ((1, 3.0), (2, math.nan), (3, 2.0)):
            metrics.train(row(step, loss, step_s=2.0, device_wait_s=1.0, host_s=0.25, save_s=0.25, **keys))
        metrics.evaluation({"step": 3, "eval_loss": 2.5, "eval_tokens": 8, "eval_s": 4.0})
    history = read_history(str(tmp_path))
    assert history.series["loss"] == Series([1, 3], [3.0, 2.0])
    assert history.series["eval_loss"] == Series([3], [2.5])
    assert "ids" not in history.series
    assert "step" not in history.series
    assert history.seconds == {"device_wait_s": 3, "data_wait_s": 1.5, "host_s": 0.75, "save_s": 0.75, "eval_s": 4}
    assert history.notes == (f"{tmp_path / 'metrics.jsonl'}: loss is not finite in 1 row",)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    history = read_history(written(tmp_path, row(1), row(2), '{"step": 3, "lo'))
    assert history.series["loss"].steps == [1, 2]
    assert "the last line was cut off" in history.notes[0]
    assert history.seconds == {}  # a run of before they were recorded


@pytest.mark.parametrize("line", ["not json\n", "[]\n", '{"loss": 1}\n', '{"step": "2"}\n', '{"step": true}\n', "\n"])
def test_damaged_lines_are_left_out_and_counted(tmp_path, line):
    history = read_history(written(tmp_path, row(1), line, line, row(4)))
    assert history.series["loss"].steps == [1, 4]
    assert "2 lines left out" in history.notes[0]
    assert "(line 2, 3)" in history.notes[0]


def test_bytes_that_are_no_text_are_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(row(1)).encode() + b"\n\xff\xfe\x00\n" + json.dumps(row(2)).encode() + b"\n")
    history = read_history(str(path))  # a file will do as well
    assert history.series["loss"].steps == [1, 2]
    assert "1 line left out" in history.notes[0]


def test_steps_that_come_again_count_once_and_late(tmp_path):
    history = read_history(written(tmp_path, row(1, 9.0), row(2, 8.0), row(3, 7.0), row(2, 5.0)))
    assert history.series["loss"] == Series([1, 2, 3], [9.0, 5.0, 7.0])
    assert "1 step recorded more than once" in history.notes[0]


def test_a_key_that_some_rows_have(tmp_path):
    history = read_history(written(tmp_path, row(1), row(2, memory_peak_bytes=7), row(3)))
    assert history.series["memory_peak_bytes"] == Series([2], [7.0])


def test_what_is_not_there_is_said(tmp_path):
    written(tmp_path / "runs" / "a", row(1))
    written(tmp_path / "empty")
    (tmp_path / "nothing").mkdir()
    for path, said in (
        ("nowhere", "there is no such run"),
        ("runs", f"runs below it: {tmp_path / 'runs' / 'a'}"),
        ("nothing", "it has no metrics.jsonl"),
        ("empty", "has no step yet"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_history(str(tmp_path / path))
        assert said in str(caught.value)
        assert str(tmp_path / path) in str(caught.value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_mean_ends_and_order(values, most):
    series = Series(list(range(len(values))), values)
    thin = series.thinned(most)
    assert len(thin.steps) == len(thin.values) == min(most, len(values))
    assert list(thin.steps) == sorted(set(thin.steps))
    assert min(values) - 1e-6 <= min(thin.values) <= max(thin.values) <= max(values) + 1e-6
    if len(values) % len(thin.values) == 0:
        assert sum(thin.values) / len(thin.values) == pytest.approx(sum(values) / len(values), abs=1e-5)
