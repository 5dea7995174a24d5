"""Deliberate faults in routing, exchange and grouped products: each must make a check of ``tests/model`` fail."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax import lax

import jaxpar.model.dispatch
import jaxpar.model.grouped
import jaxpar.model.moe
import jaxpar.model.routing
from tests.model import test_moe_balance, test_moe_dispatch, test_moe_grouped, test_moe_routing

pytestmark = pytest.mark.proof


def grouped_check(monkeypatch):
    """The test's own function, compiled with the fault."""
    compiled = test_moe_grouped.with_gradients(jaxpar.model.grouped.GROUPED_PRODUCTS["tiles_64"])
    test_moe_grouped.check(compiled, (5, 130, 64, 101))


def exchange_check(monkeypatch):
    test_moe_dispatch.test_every_exchange_gives_the_sums_and_gradients_of_one_device("all_to_all", monkeypatch)


def ragged_check(monkeypatch):
    test_moe_dispatch.test_every_exchange_gives_the_sums_and_gradients_of_one_device("ragged", monkeypatch)


def room_check(monkeypatch):
    test_moe_dispatch.test_what_finds_no_room_is_counted_and_the_same_for_every_exchange("all_to_all", monkeypatch)


def row_check(monkeypatch):
    test_moe_balance.test_the_term_is_that_of_each_row({"data": 2})


def gradient_check(monkeypatch):
    test_moe_balance.test_values_and_gradients_are_those_of_the_formula()


def whole_tiles(tile, tile_rows, sizes, honest=jaxpar.model.grouped._place):
    group, row, _ = honest(tile, tile_rows, sizes)
    return group, row, tile_rows


def first_source_only(received, room, starts, honest=jaxpar.model.dispatch.regrouped):
    place, sizes = honest(received, room, starts)
    return jnp.where(jnp.arange(room) < starts[1], place, room), sizes


def swapped_offsets(sent, mine, honest=jaxpar.model.dispatch.ragged_offsets):
    begins, sizes, _, received = honest(sent, mine)
    return begins, sizes, begins, received


def capacity_check(monkeypatch):
    test_moe_routing.test_capacity_counts_over_the_whole_row_on_a_context_axis(2)


def over_all_rows(experts, num_experts, honest=jaxpar.model.moe.count_by_row):
    counts = lax.psum(honest(experts, num_experts), "data") // 2
    return lax.pcast(counts, ("data",), to="varying")


def shares_without_gradient(*arguments, honest=jaxpar.model.moe.choose):
    choices = honest(*arguments)
    return dataclasses.replace(choices, shares=lax.stop_gradient(choices.shares))


FAULTS = {
    "tiles count rows of the next group": (jaxpar.model.grouped, "_place", whole_tiles, grouped_check),
    "rows of other sources lost": (jaxpar.model.dispatch, "regrouped", first_source_only, exchange_check),
    "ragged rows land where they began": (jaxpar.model.dispatch, "ragged_offsets", swapped_offsets, ragged_check),
    "room for everything": (jaxpar.model.dispatch, "fit", lambda counts, room: counts, room_check),
    "capacity of each member alone": (jaxpar.model.routing, "_counted_before", jnp.zeros_like, capacity_check),
    "balance over the batch": (jaxpar.model.moe, "count_by_row", over_all_rows, row_check),
    "no gradient to the router": (jaxpar.model.moe, "choose", shares_without_gradient, gradient_check),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_breaks_a_check(name, monkeypatch):
    module, attribute, fault, check = FAULTS[name]
    monkeypatch.setattr(module, attribute, fault)
    with pytest.raises(AssertionError):
        check(monkeypatch)
