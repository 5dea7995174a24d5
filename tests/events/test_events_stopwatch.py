"""The parts of a step's time: they add up, and validation is not among them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.events.stopwatch import PARTS, Stopwatch, describe_shares


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_row_says_where_the_step_went():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 2
    watch.add("data_wait", 2)
    clock.now += 1
    with watch.part("device_wait"):
        clock.now += 4
    assert watch.row() == {"step_s": 7, "data_wait_s": 2, "device_wait_s": 4, "save_s": 0, "host_s": 1}
    with watch.part("eval"):
        clock.now += 10
    with watch.part("save"):
        clock.now += 3
    clock.now += 0.5
    assert watch.row() == {"step_s": 3.5, "data_wait_s": 0, "device_wait_s": 0, "save_s": 3, "host_s": 0.5}
    clock.now += 1  # after the last step
    totals = watch.totals()
    assert totals == {
        "total_s": 21.5,
        "data_wait_s": 2,
        "device_wait_s": 4,
        "save_s": 3,
        "eval_s": 10,
        "host_s": 2.5,
    }
    assert describe_shares(totals) == "device 18.6%, data 9.3%, host 11.6%, saving 14.0%, validation 46.5%"


def test_an_error_in_a_part_counts_it():
    clock = Clock()
    watch = Stopwatch(clock)

    def failing():
        with watch.part("save"):
            clock.now += 3
            raise TimeoutError

    with pytest.raises(TimeoutError):
        failing()
    assert watch.row()["save_s"] == 3


@given(st.lists(st.tuples(st.sampled_from(["data_wait", "device_wait", "save", "eval", "", "row"]), st.floats(0, 100))))
def test_parts_add_up(events):
    clock = Clock()
    watch, rows = Stopwatch(clock), []
    for part, seconds in events:
        if part == "row":
            rows.append(watch.row())
            continue
        clock.now += seconds
        if part:
            watch.add(part, seconds)
    rows.append(watch.row())
    totals = watch.totals()
    assert sum(totals[key] for key in PARTS) == pytest.approx(totals["total_s"], abs=1e-6)
    assert sum(row["step_s"] for row in rows) + totals["eval_s"] == pytest.approx(totals["total_s"], abs=1e-6)
    for row in rows:
        parts = sum(value for key, value in row.items() if key != "step_s")
        assert parts == pytest.approx(row["step_s"], abs=1e-6)


def test_no_time_has_no_shares():
    assert describe_shares({}) == ""
    assert describe_shares({"host_s": 1.0}) == "host 100.0%"
