"""Every way of exchanging tokens against no exchange at all: sums, gradients, room, and the ragged index arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar.model.dispatch
from jaxpar.collectives import island
from jaxpar.mesh import make_mesh
from jaxpar.model.dispatch import Exchange, fit, keep_first, regrouped, through_experts
from jaxpar.model.grouped import GROUPED_PRODUCTS
from jaxpar.plan.experts import describe_exchange, exchange_mode, receive_bound, rows_moved
from jaxpar.sharding import EXPERT_AXIS

EXPERTS, TOP_K, EMBED, TOKENS, DEVICES = 8, 3, 4, 32, 4


def sample(seed=0, spread=1.0):
    """Tokens, choices of which some are not used, weights, and a matrix per expert."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(TOKENS, EXPERTS)) + spread * np.linspace(2, -2, EXPERTS)
    experts = np.argsort(-scores, 1)[:, :TOP_K].astype(np.int32)
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    unused = rng.random((TOKENS, TOP_K)) < 0.2
    experts[unused], weights[unused] = EXPERTS, 0
    x = rng.normal(size=(TOKENS, EMBED)).astype(np.float32)
    matrices = rng.normal(size=(EXPERTS, EMBED, EMBED)).astype(np.float32)
    return x, experts, weights, matrices


def reference(x, experts, weights, matrices):
    padded = np.concatenate([matrices, np.zeros((1, EMBED, EMBED), np.float32)])
    return np.einsum("tk,td,tkdf->tf", weights, x, padded[experts])


def run(exchange, arrays, num_devices=DEVICES):
    """Sums [T, D], what was lost per device, and gradients, on ``num_devices`` of the expert axis."""
    mesh = make_mesh({EXPERT_AXIS: num_devices}, jax.devices()[:num_devices])

    def local(x, experts, weights, matrices):
        out, lost = through_experts(
            exchange,
            EXPERTS,
            num_devices,
            x,
            experts,
            weights,
            lambda rows, sizes: GROUPED_PRODUCTS["tiles_64"](rows, matrices, sizes),
        )
        return out, lost[None] + jnp.zeros_like(experts[:1, 0])

    def loss(x, weights, matrices, experts):
        out, lost = island(local, (P(EXPERT_AXIS),) * 4, (P(EXPERT_AXIS), P(EXPERT_AXIS)))(
            x, experts, weights, matrices
        )
        return jnp.sum(out**2), (out, lost)

    with jax.set_mesh(mesh):
        x, experts, weights, matrices = (
            jax.device_put(a, jax.sharding.NamedSharding(mesh, P(EXPERT_AXIS))) for a in arrays
        )
        grads, (out, lost) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, weights, matrices, experts)
    return jax.device_get((out, lost, grads))


def ragged_by_gathering(operand, output, begins, sizes, lands, received, *, axis_name):
    """``ragged_all_to_all`` as its documentation has it, on a backend without one: all see all, and pick."""
    del received
    mine = lax.axis_index(axis_name)
    for source in range(DEVICES):
        rows, begin, size, land = (lax.all_gather(a, axis_name)[source] for a in (operand, begins, sizes, lands))
        slot = jnp.arange(output.shape[0])
        offset = slot - land[mine]
        is_here = (offset >= 0) & (offset < size[mine])
        picked = rows.at[jnp.where(is_here, begin[mine] + offset, 0)].get(mode="fill", fill_value=0)
        output = jnp.where(is_here[:, None], picked, output)
    return output


EXCHANGES = {
    "all_to_all": Exchange(mode="all_to_all"),
    "gather": Exchange(mode="gather"),
    "ragged": Exchange(mode="all_to_all", platform="gpu"),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_gives_the_sums_and_gradients_of_one_device(name, monkeypatch):
    monkeypatch.setattr(jaxpar.model.dispatch.lax, "ragged_all_to_all", ragged_by_gathering)
    arrays = sample()
    expected, _, expected_grads = run(EXCHANGES["all_to_all"], arrays, num_devices=1)
    np.testing.assert_allclose(expected, reference(*arrays), atol=1e-5)
    out, lost, grads = run(EXCHANGES[name], arrays)
    assert not lost.any()
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("name", EXCHANGES)
def test_what_finds_no_room_is_counted_and_the_same_for_every_exchange(name, monkeypatch):
    """All to all, gathered and ragged leave the same choices out: late sources' rows of the fullest devices."""
    monkeypatch.setattr(jaxpar.model.dispatch.lax, "ragged_all_to_all", ragged_by_gathering)
    x, experts, weights, matrices = sample(seed=1, spread=3.0)
    room = receive_bound(TOKENS // DEVICES, TOP_K, EXPERTS, DEVICES, 1.5)
    kept, taken = experts.copy(), [0] * DEVICES
    by_source = np.split(np.arange(TOKENS), DEVICES)
    for device in range(DEVICES):
        for source in by_source:
            for expert in range(device * 2, device * 2 + 2):
                for token, choice in zip(*np.nonzero(experts[source] == expert), strict=True):
                    taken[device] += 1
                    if taken[device] > room:
                        kept[source[token], choice] = EXPERTS
    expected = reference(x, kept, np.where(kept < EXPERTS, weights, 0), matrices)

    bounded = dataclasses.replace(EXCHANGES[name], receive_factor=1.5)
    out, lost, _ = run(bounded, (x, experts, weights, matrices))
    assert lost.sum() == (kept != experts).sum() > 0
    np.testing.assert_allclose(out, expected, atol=1e-5)


_regrouped = jax.jit(regrouped, static_argnums=1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=3 * 3 * 2, max_size=3 * 3 * 2), st.integers(0, 40))
def test_fit_keeps_as_much_as_there_is_room_for(flat, room):
    counts = np.asarray(flat).reshape(3, 3, 2)
    kept = np.asarray(fit(jnp.asarray(counts), room))
    assert np.all((kept >= 0) & (kept <= counts))
    assert np.array_equal(kept.sum((0, 2)), np.minimum(room, counts.sum((0, 2))))
    first_cut = {d: next((s for s in range(3) if (kept[s, d] < counts[s, d]).any()), 3) for d in range(3)}
    assert all(not kept[s, d].any() for d, cut in first_cut.items() for s in range(cut + 1, 3))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=12, max_size=12), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_keep_first_keeps_the_first_of_each_expert(flat, limits):
    experts = np.asarray(flat).reshape(6, 2)
    kept = np.asarray(keep_first(jnp.asarray(experts), jnp.asarray(limits), 4))
    seen = [0] * 4
    for expert, got in zip(experts.reshape(-1), kept.reshape(-1), strict=True):
        if expert < 4:
            seen[expert] += 1
        assert got == (expert if expert < 4 and seen[expert] <= limits[expert] else 4)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_regrouping_is_a_stable_sort_by_expert(flat):
    """Whether each source has slots of its own with a gap behind its rows, or all lie together."""
    received = np.asarray(flat).reshape(3, 2)
    pair, room = 9, 27
    for starts in (np.arange(3) * pair, np.cumsum(received.sum(1)) - received.sum(1)):
        place, sizes = (np.asarray(a) for a in _regrouped(jnp.asarray(received), room, jnp.asarray(starts)))
        assert np.array_equal(sizes, received.sum(0))
        rows = [(e, s, i) for s in range(3) for e in range(2) for i in range(received[s, e])]
        slots = [starts[s] + sum(received[s, :e]) + i for e, s, i in rows]
        order = sorted(range(len(rows)), key=lambda r: rows[r])
        assert [place[slots[r]] for r in order] == list(range(len(rows)))
        assert set(place) - set(range(len(rows))) <= {room}


def test_the_exchange_is_chosen_by_what_moves_and_said():
    assert exchange_mode("auto", top_k=2, num_devices=8) == "all_to_all"
    assert exchange_mode("auto", top_k=8, num_devices=4) == "gather"
    assert exchange_mode("all_to_all", top_k=8, num_devices=4) == "all_to_all"
    assert (rows_moved("all_to_all", 2, 8), rows_moved("gather", 2, 8)) == (1.75, 7)
    text = describe_exchange("auto", 8, 128, 4)
    assert "gather: 3 rows per token" in text
    assert "all_to_all: 6" in text


def test_the_worst_case_is_all_tokens_choosing_the_same_device():
    assert receive_bound(10, 2, 8, 8, 0.0) == 8 * 10 * 1
    assert receive_bound(10, 2, 8, 4, 0.0) == 4 * 10 * 2
    assert receive_bound(10, 2, 8, 8, 1.5) == 30
    assert receive_bound(10, 2, 8, 2, 100.0) == 2 * 10 * 2
