"""The metrics file: valid JSON whatever the numbers, and exactly the kept steps after a resume or a crash."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config.schema import ObserveConfig
from jaxpar.events import EVAL_KEYS, TRAIN_KEYS, MetricsLog, RunMetrics


def read_strictly(path):
    """Rows of the file, refusing NaN and Infinity, which Python's reader takes and others do not."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train_row(step, **others):
    return dict.fromkeys(TRAIN_KEYS, 0.5) | {"step": step, "tokens": 64} | others


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float32("inf")])
def test_values_that_are_not_finite_become_null(tmp_path, value):
    with MetricsLog(tmp_path / "m.jsonl", resume_step=None) as log:
        log.write({"step": 1, "loss": value})
    assert read_strictly(tmp_path / "m.jsonl") == [{"step": 1, "loss": None}]


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_equal(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("floats") / "m.jsonl"
    with MetricsLog(path, resume_step=None) as log:
        log.write({"step": 1, "loss": value})
    assert read_strictly(path)[0]["loss"].hex() == value.hex()


def test_numpy_scalars_and_ids_are_plain_numbers(tmp_path):
    row = {"step": np.int64(3), "loss": np.float32(0.1), "skipped": False, "ids": np.arange(3), "more": [np.int32(7)]}
    with MetricsLog(tmp_path / "m.jsonl", resume_step=None) as log:
        log.write(row)
    expected = {"step": 3, "loss": float(np.float32(0.1)), "skipped": False, "ids": [0, 1, 2], "more": [7]}
    assert read_strictly(tmp_path / "m.jsonl") == [expected]


def test_what_is_not_a_plain_number_is_refused(tmp_path):
    with (
        MetricsLog(tmp_path / "m.jsonl", resume_step=None) as log,
        pytest.raises(TypeError, match="plain numbers; got a object"),
    ):
        log.write({"step": 1, "loss": object()})
    assert read_strictly(tmp_path / "m.jsonl") == []


def test_each_row_is_on_disk_when_it_is_written(tmp_path):
    """A process that is killed loses nothing that it wrote."""
    program = (
        "import os, sys; from jaxpar.events import MetricsLog\n"
        "log = MetricsLog(sys.argv[1], resume_step=None)\n"
        "log.write({'step': 1}); log.write({'step': 2})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "m.jsonl"
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    assert [row["step"] for row in read_strictly(path)] == [1, 2]


@settings(max_examples=60)
@given(
    steps=st.lists(st.integers(0, 20), max_size=12),
    resume_step=st.one_of(st.none(), st.integers(0, 20)),
    cut=st.integers(0, 30),
)
def test_resume_keeps_exactly_the_steps_up_to_it(tmp_path_factory, steps, resume_step, cut):
    """Whatever order the rows are in, and wherever in its last line the crash cut the file off."""
    path = tmp_path_factory.mktemp("resume") / "m.jsonl"
    with MetricsLog(path, resume_step=None) as log:
        for step in steps:
            log.write({"step": step, "loss": step / 7})
    whole = path.read_bytes()
    last_line = len(whole.splitlines()[-1]) + 1 if whole else 0
    cut = min(cut, last_line)
    path.write_bytes(whole[: len(whole) - cut])
    survivors = steps[:-1] if cut else steps

    with MetricsLog(path, resume_step=resume_step) as log:
        log.write({"step": 21, "loss": 3.0})
        dropped = log.dropped_rows
    kept = [step for step in survivors if resume_step is not None and step <= resume_step]
    assert [row["step"] for row in read_strictly(path)] == [*kept, 21]
    half_line = 0 < cut < last_line
    assert dropped == len(survivors) - len(kept) + half_line
    assert os.listdir(path.parent) == ["m.jsonl"]


def test_zeros_left_by_a_power_failure_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(40))
    with MetricsLog(path, resume_step=1) as log:
        assert log.dropped_rows == 1
    assert read_strictly(path) == [{"step": 1}]


@pytest.mark.parametrize("damage", [b"nonsense", b'{"loss": 1}', b"[1]", b'{"step": null}'])
def test_damage_in_the_middle_is_named_and_nothing_is_touched(tmp_path, damage):
    path = tmp_path / "m.jsonl"
    before = b'{"step": 1}\n' + damage + b'\n{"step": 3}\n'
    path.write_bytes(before)
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2 is not a row of metrics.*repair or remove"):
        MetricsLog(path, resume_step=3)
    assert path.read_bytes() == before


def test_a_run_records_training_and_evaluation_apart(tmp_path):
    with RunMetrics(tmp_path, ObserveConfig(), resume_step=None) as metrics:
        metrics.evaluation({"step": 0, "eval_loss": 5.5, "eval_tokens": 128})
        for step in (1, 2, 3):
            metrics.train(train_row(step, ids=[1, 2]))
        metrics.evaluation({"step": 3, "eval_loss": 4.5, "eval_tokens": 128})
    with RunMetrics(tmp_path, ObserveConfig(), resume_step=2) as metrics:
        assert metrics.dropped_rows == 1
        metrics.train(train_row(3, loss=0.25))
    assert read_strictly(tmp_path / "metrics.jsonl") == [
        train_row(1, ids=[1, 2]),
        train_row(2, ids=[1, 2]),
        train_row(3, loss=0.25),
    ]
    assert read_strictly(tmp_path / "eval.jsonl") == [{"step": 0, "eval_loss": 5.5, "eval_tokens": 128}]


@pytest.mark.parametrize(
    ("method", "keys"), [("train", TRAIN_KEYS), ("evaluation", EVAL_KEYS)], ids=["train", "evaluation"]
)
def test_a_row_without_a_promised_key_is_a_bug(tmp_path, method, keys):
    with RunMetrics(tmp_path, ObserveConfig(), resume_step=None) as metrics:
        for missing in keys:
            with pytest.raises(AssertionError, match=missing):
                getattr(metrics, method)({key: 1 for key in keys if key != missing})
