"""The check refuses tables that go wrong, and only those."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.schedule import NOTHING, ScheduleError, build_schedule
from jaxpar.schedule.check import check
from tests.schedule.numbers import expected, run

SMALL = build_schedule("1f1b", num_stages=4, num_microbatches=8)
CHUNKED = build_schedule("interleaved", num_stages=2, num_microbatches=5, num_chunks=2)
GPIPE = build_schedule("gpipe", num_stages=3, num_microbatches=4)


def changed(schedule, **cells):
    """The schedule with some cells changed: column name -> {(tick, stage) or tick: value}."""
    columns = {}
    for name, values in cells.items():
        columns[name] = getattr(schedule, name).copy()
        for place, value in values.items():
            columns[name][place] = value
    return dataclasses.replace(schedule, **columns)


MUTANTS = {
    "a unit is left out": (
        {name: {(3, 0): NOTHING} for name in ("forward_microbatch", "forward_chunk", "forward_slot")}
        | {"embed_microbatch": {3: NOTHING}},
        "never run|overwrites|holds",
    ),
    "a unit runs twice": ({"forward_microbatch": {(3, 0): 2}, "embed_microbatch": {3: 2}}, "second time"),
    "two microbatches are swapped": ({"forward_microbatch": {(3, 1): 3, (4, 1): 2}}, "forward_slot = .* is to be read"),
    "an arrival overwrites what is needed": ({"activation_arrival": {(3, 1): 0}}, "arrival overwrites the activation"),
    "an arrival lands elsewhere": ({"activation_arrival": {(1, 1): 3}}, "forward_slot = 0 holds nothing"),
    "a slot is misread": ({"backward_slot": {(6, 1): 2}}, "backward_slot = 2 holds"),
    "a gradient slot is not read": ({"gradient_slot": {(6, 1): NOTHING}}, "gradient_slot = -1"),
    "a slot is read for nothing": ({"backward_slot": {(0, 1): 0}}, "but nothing is to be read"),
    "the loss is not taken": ({"loss_microbatch": {3: NOTHING}}, "loss_microbatch is -1, but the stages run 0"),
    "the loss is of another microbatch": ({"loss_microbatch": {3: 1}}, "loss_microbatch is 1, but the stages run 0"),
    "a loss out of nothing": ({"loss_slot": {0: 0}}, "there is no loss"),
    "a loss that goes nowhere": ({"loss_slot": {3: NOTHING}}, "there is a loss"),
    "another microbatch is embedded": ({"embed_microbatch": {0: 1}}, "embed_microbatch is 1, but the stages run 0"),
    "an embedding gets no gradient": ({"embed_grad_microbatch": {6: NOTHING}}, "embed_grad_microbatch is -1"),
    "a chunk without a microbatch": ({"backward_chunk": {(0, 0): 0}}, "microbatch -1 but chunk 0"),
    "a slot that is not there": ({"activation_arrival": {(0, 0): 5}}, "activation_arrival holds 0 to 5, but 0 to 4"),
    "an arrival that goes nowhere": ({"gradient_arrival": {(0, 0): NOTHING}}, "gradient_arrival holds -1 to 0"),
    "a chunk that is not there": ({"forward_chunk": {(0, 0): 1}}, "forward_chunk holds -1 to 1"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused(mutant):
    cells, message = MUTANTS[mutant]
    with pytest.raises(ScheduleError, match=message):
        check(changed(SMALL, **cells))


def test_a_backward_pass_before_its_forward_pass_is_refused():
    # The whole backward lane of the last stage one tick early; its gradients are there by then only if slots lie.
    shifted = {
        name: np.roll(getattr(SMALL, name), -1, axis=0)
        for name in ("backward_microbatch", "backward_chunk", "backward_slot", "gradient_slot")
    }
    with pytest.raises(ScheduleError, match="runs backward before it ran forward"):
        check(dataclasses.replace(SMALL, **shifted))


def test_too_few_slots_are_refused():
    with pytest.raises(ScheduleError, match="activation_arrival holds 0 to 4, but 0 to 3 are allowed"):
        check(dataclasses.replace(SMALL, num_activation_slots=4))


def test_a_table_that_ends_early_is_refused():
    tables = {**SMALL.stage_tables(), **SMALL.tick_tables()}
    shorter = {name: table[:-1] for name, table in tables.items() if name in SMALL.__dict__}
    with pytest.raises(ScheduleError, match="1 units never run backward, the first is microbatch 7 of virtual stage 0"):
        check(dataclasses.replace(SMALL, **shorter))


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ScheduleError, match=r"loss_slot has shape \(13,\), not \(14,\)"):
        check(dataclasses.replace(SMALL, loss_slot=SMALL.loss_slot[:-1]))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_changed_cell_is_refused_or_does_no_harm(data):
    """Harmless are other free slots for arrivals of no value; the executor of plain integers tells."""
    schedule = data.draw(st.sampled_from([SMALL, CHUNKED, GPIPE]))
    tables = {name: table for name, table in vars(schedule).items() if isinstance(table, np.ndarray)}
    name = data.draw(st.sampled_from(sorted(tables)))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in tables[name].shape)
    value = data.draw(st.integers(-1, 9).filter(lambda value: value != tables[name][place]))
    mutant = changed(schedule, **{name: {place: value}})
    try:
        check(mutant)
    except ScheduleError:
        return
    assert name.endswith("_arrival")
    assert run(mutant) == expected(mutant)
