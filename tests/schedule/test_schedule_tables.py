"""Properties of every schedule, over stages, microbatches and chunks; an executor of plain integers is the oracle."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.schedule import (
    KINDS,
    build_schedule,
    closed_form_idle_share,
    microbatches_below,
    schedule_problems,
)
from tests.schedule.numbers import expected, run, waiting


@st.composite
def sizes(draw):
    """Arguments of every schedule that there is, in small."""
    kind = draw(st.sampled_from(KINDS))
    stages = draw(st.integers(1, 6))
    return {
        "kind": kind,
        "num_stages": stages,
        "num_microbatches": draw(st.integers(1 if kind == "gpipe" else stages, 20)),
        "num_chunks": draw(st.integers(2, 4)) if kind in ("interleaved", "breadth_first") else 1,
    }


@settings(max_examples=80, deadline=None)
@given(sizes())
def test_a_table_computes_the_loss_and_every_gradient(arguments):
    schedule = build_schedule(**arguments)
    assert run(schedule) == expected(schedule)
    for lane in ("forward", "backward"):
        tables = schedule.stage_tables()
        units = [
            (microbatch, chunk, stage)
            for row in np.stack([tables[f"{lane}_microbatch"], tables[f"{lane}_chunk"]], -1).tolist()
            for stage, (microbatch, chunk) in enumerate(row)
            if microbatch >= 0
        ]
        count = arguments["num_microbatches"] * arguments["num_chunks"] * arguments["num_stages"]
        assert len(units) == len(set(units)) == count


@settings(max_examples=80, deadline=None)
@given(sizes())
def test_idle_share_is_that_of_filling_and_draining_whether_or_not_stages_divide_microbatches(arguments):
    schedule = build_schedule(**arguments)
    stages, microbatches, chunks = (arguments[f"num_{name}"] for name in ("stages", "microbatches", "chunks"))
    closed_form = Fraction(stages - 1, chunks * microbatches + stages - 1)
    assert closed_form_idle_share(stages, microbatches, chunks) == closed_form
    assert schedule.idle_share() == schedule.idle_share(1, 2) == schedule.idle_share(5, 7) == closed_form
    lanes = schedule.stage_tables()
    assert schedule.forward_runs.tolist() == [max(row) >= 0 for row in lanes["forward_microbatch"].tolist()]
    assert schedule.backward_runs.tolist() == [max(row) >= 0 for row in lanes["backward_microbatch"].tolist()]


@settings(max_examples=80, deadline=None)
@given(sizes())
def test_slots_are_as_many_as_values_wait_at_one_time_and_at_most_one_spare(arguments):
    schedule = build_schedule(**arguments)
    activations, gradients = waiting(schedule)
    assert schedule.num_activation_slots - max(1, activations) in (0, 1)
    assert schedule.num_gradient_slots - max(1, gradients) in (0, 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [2, 3, 5])
def test_1f1b_keeps_2_p_minus_r_minus_1_in_flight_however_many_microbatches(stages, groups):
    schedule = build_schedule("1f1b", num_stages=stages, num_microbatches=groups * stages)
    assert schedule.peak_in_flight() == tuple(2 * (stages - stage) - 1 for stage in range(stages))
    assert schedule.num_activation_slots == max(1, 2 * stages - 3)
    assert schedule.num_gradient_slots == 1


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_slots(stages, chunks):
    def slots(microbatches):
        schedule = build_schedule("interleaved", num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
        return schedule.num_activation_slots, schedule.num_gradient_slots

    assert {slots(groups * stages) for groups in (2, 3, 5)} == {((chunks + 1) * stages - 3, 1)}
    # The first group has one microbatch more: each chunk but the last keeps it, and so do gradients.
    assert slots(2 * stages + 1) == ((chunks + 1) * stages - 3 + chunks - 1, chunks)


def test_gpipe_keeps_every_microbatch():
    for microbatches in (2, 8, 32):
        schedule = build_schedule("gpipe", num_stages=4, num_microbatches=microbatches)
        assert schedule.peak_in_flight() == (microbatches,) * 4
        assert schedule.num_activation_slots in (microbatches, microbatches + 1)
    forward_ends = np.flatnonzero(schedule.forward_runs)[-1]
    assert np.flatnonzero(schedule.backward_runs)[0] == forward_ends


def test_gradients_are_added_up_in_the_order_of_microbatches():
    """As without a pipeline, so that rounding is the same as far as it can be."""
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("breadth_first", 3)):
        tables = build_schedule(kind, num_stages=4, num_microbatches=10, num_chunks=chunks).stage_tables()
        for stage in range(4):
            for chunk in range(chunks):
                mine = tables["backward_chunk"][:, stage] == chunk
                assert tables["backward_microbatch"][mine, stage].tolist() == list(range(10))


def test_gpipe_with_fewer_microbatches_than_stages_idles_60_percent():
    assert build_schedule("gpipe", num_stages=4, num_microbatches=2).idle_share() == Fraction(3, 5)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "breadth_first"])
def test_fewer_microbatches_than_stages_is_a_named_error(kind):
    chunks = 1 if kind == "1f1b" else 2
    with pytest.raises(ValueError, match=r"num_microbatches = 2: .* 2 < 4 stages") as caught:
        build_schedule(kind, num_stages=4, num_microbatches=2, num_chunks=chunks)
    assert "at least 4" in str(caught.value)
    assert "gpipe" in str(caught.value)
    assert "60.0%" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 4, 8, 2), ("num_chunks = 2", "1f1b has 1 chunk", "kind to interleaved")),
        (("gpipe", 4, 8, 2), ("num_chunks = 2", "gpipe has 1 chunk", "kind to breadth_first")),
        (("interleaved", 4, 8, 1), ("num_chunks = 1", "at least 2 chunks", "kind to 1f1b")),
        (("breadth_first", 4, 8, 1), ("num_chunks = 1", "at least 2 chunks", "kind to gpipe")),
        (("zigzag", 4, 8, 1), ("kind = 'zigzag'", "gpipe, 1f1b, interleaved, breadth_first")),
        (("1f1b", 0, 8, 1), ("num_stages = 0", "at least 1")),
        (("1f1b", 4, 0, 1), ("num_microbatches = 0", "at least 1")),
        (("1f1b", 4, 8, 0), ("num_chunks = 0", "at least 1")),
    ],
)
def test_what_is_not_a_schedule_is_refused_by_name(arguments, words):
    kind, stages, microbatches, chunks = arguments
    with pytest.raises(ValueError, match="->") as caught:
        build_schedule(kind, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
    assert all(word in str(caught.value) for word in words), caught.value


def test_problems_use_the_users_names():
    names = {"kind": "a.b", "num_stages": "c.d", "num_microbatches": "e.f", "num_chunks": "g.h"}
    problems = schedule_problems("1f1b", num_stages=4, num_microbatches=2, num_chunks=3, names=names)
    assert [problem.key for problem in problems] == ["g.h", "e.f"]
    assert "num_" not in "".join(map(str, problems))


@given(st.integers(2, 64), st.integers(1, 8), st.integers(1, 99))
def test_microbatches_below_is_the_fewest(stages, chunks, percent):
    limit = Fraction(percent, 100)
    fewest = microbatches_below(limit, stages, chunks)
    assert closed_form_idle_share(stages, fewest, chunks) < limit
    assert fewest == stages or closed_form_idle_share(stages, fewest - 1, chunks) >= limit
