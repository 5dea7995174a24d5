"""Routing: what is chosen, by which weights, who is left out, and what the balance term says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import island
from jaxpar.config.schema import ModelConfig
from jaxpar.mesh import make_mesh
from jaxpar.model.moe import BIAS, load_metrics, rebalance
from jaxpar.model.routing import capacity, choose, count_by_row
from jaxpar.model.zigzag import from_zigzag, to_zigzag
from jaxpar.sharding import CONTEXT_AXIS

EXPERTS = 8


def model(**options):
    return ModelConfig(embed_dim=EXPERTS, num_experts=EXPERTS, **{"top_k": 2, **options})


def route(options, logits, bias=None, valid=None):
    """Choices for given logits [B, S, E]: the router is the identity."""
    logits = jnp.asarray(logits, jnp.float32)
    valid = jnp.ones(logits.shape[:2], bool) if valid is None else jnp.asarray(valid)
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    return choose(model(**options), logits, jnp.eye(EXPERTS), bias, valid)


def random_logits(shape=(2, 6, EXPERTS), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_softmax_over_all_experts():
    logits = random_logits()
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-probabilities, -1)[..., :2]
    chosen = np.take_along_axis(probabilities, best, -1)
    plain = route({"norm_topk": False}, logits)
    assert np.array_equal(plain.experts, best)
    np.testing.assert_allclose(plain.weights, chosen, rtol=1e-5)
    np.testing.assert_allclose(route({}, logits).weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


def test_a_balance_bias_changes_the_choice_and_not_the_weights():
    logits = np.tile(np.linspace(1, -1, EXPERTS), (1, 1, 1))
    plain = route({"router": "sigmoid", "norm_topk": False}, logits, np.zeros(EXPERTS))
    assert plain.experts.tolist() == [[[0, 1]]]
    bias = np.zeros(EXPERTS)
    bias[7] = 5
    pushed = route({"router": "sigmoid", "norm_topk": False}, logits, bias)
    assert pushed.experts.tolist() == [[[7, 0]]]
    np.testing.assert_allclose(pushed.weights[0, 0], 1 / (1 + np.exp(-logits[0, 0, [7, 0]])), rtol=1e-5)
    np.testing.assert_allclose(pushed.shares, plain.shares)


def test_no_gradient_reaches_the_bias():
    options, logits = {"router": "sigmoid"}, random_logits()
    gradient = jax.grad(lambda bias: (route(options, logits, bias).weights ** 2).sum())(jnp.ones(EXPERTS))
    assert not np.asarray(gradient).any()


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), groups=st.sampled_from([2, 4, 8]), data=st.data())
def test_only_experts_of_the_best_groups_are_chosen(seed, groups, data):
    size = EXPERTS // groups
    chosen_groups = data.draw(st.integers(-(-2 // size), groups))
    logits = random_logits((1, 3, EXPERTS), seed)
    options = {"num_expert_groups": groups, "top_k_groups": chosen_groups, "router": "sigmoid"}
    experts = np.asarray(route(options, logits, np.zeros(EXPERTS)).experts)
    scores = 1 / (1 + np.exp(-logits[0].reshape(3, groups, size)))
    value = np.sort(scores, -1)[..., -2:].sum(-1)
    for token in range(3):
        allowed = set(np.argsort(-value[token])[:chosen_groups])
        inside = [e for e in range(EXPERTS) if e // size in allowed]
        best = sorted(inside, key=lambda e: -logits[0, token, e])[:2]
        assert experts[0, token].tolist() == best


def test_padding_goes_nowhere():
    valid = np.ones((2, 6), bool)
    valid[1, 3:] = False
    choices = route({}, random_logits(), valid=valid)
    assert np.all(np.asarray(choices.experts)[1, 3:] == EXPERTS)
    assert not np.asarray(choices.weights)[1, 3:].any()
    assert int(count_by_row(choices.experts, EXPERTS)[1].sum()) == 6


def test_capacity_is_per_row_and_takes_first_choices_and_early_tokens():
    logits = np.zeros((2, 4, EXPERTS), np.float32)
    logits[:, :, 0], logits[:, :, 1] = 2, 1  # every token wants 0, then 1
    logits[1, :2, 2] = 3  # in the second row two tokens want 2 first
    options = {"capacity_factor": 2.0}
    assert capacity(model(**options), 4) == 2
    choices = route(options, logits)
    none = EXPERTS
    assert choices.experts[0].tolist() == [[0, 1], [0, 1], [none, none], [none, none]]
    # 0 is taken by the first choices of the last two tokens.
    assert choices.experts[1].tolist() == [[2, none], [2, none], [0, 1], [0, 1]]
    assert np.array_equal(np.asarray(choices.weights) == 0, np.asarray(choices.experts) == none)
    assert np.array_equal(choices.wanted, route({}, logits).experts)


@pytest.mark.parametrize("members", [2, 4])
def test_capacity_counts_over_the_whole_row_on_a_context_axis(members):
    """Which choices are left out is the same, token by token, though each member sees only its two chunks."""
    options, logits = {"capacity_factor": 0.75, "top_k": 3}, random_logits((2, 16, EXPERTS), seed=3)
    valid = np.arange(16)[None] < np.asarray([[16], [11]])
    whole = route(options, logits, valid=valid)
    mesh = make_mesh({CONTEXT_AXIS: members}, jax.devices()[:members])
    rows = P(None, CONTEXT_AXIS)
    with jax.set_mesh(mesh):
        local = island(lambda logits, valid: route(options, logits, valid=valid).experts, (rows, rows), rows)
        split = jax.jit(local)(*(jax.device_put(np.asarray(to_zigzag(a, members)), rows) for a in (logits, valid)))
    np.testing.assert_array_equal(from_zigzag(np.asarray(split), members), whole.experts)
    assert 0 < (np.asarray(whole.wanted) != np.asarray(whole.experts)).sum() < whole.wanted.size / 2


def test_bias_moves_against_the_load():
    params = {"layers": {"moe": {BIAS: jnp.zeros((2, 4)), "gate": jnp.ones(1)}}, "head": jnp.ones(1)}
    moved = rebalance(params, jnp.asarray([[4, 0, 2, 2], [2, 2, 2, 2]]), 0.25)
    assert moved["layers"]["moe"][BIAS].tolist() == [[-0.25, 0.25, 0, 0], [0, 0, 0, 0]]
    without = {"layers": {"moe": {"gate": jnp.ones(1)}}}
    assert rebalance(without, jnp.ones((1, 4)), 0.25) is without


@pytest.mark.parametrize(("load", "entropy", "fullest"), [((5, 5, 5, 5), 1.0, 1.0), ((20, 0, 0, 0), 0.0, 4.0)])
def test_load_metrics(load, entropy, fullest):
    routing = {
        "load": jnp.asarray([load, load]),
        "dropped": jnp.asarray([4, 0]),
        "overflow": jnp.asarray([0, 2]),
        "tokens": jnp.asarray([10, 10]),
        "logit_square": jnp.asarray([90.0, 630.0]),
    }
    metrics = load_metrics(routing)
    assert float(metrics["load_entropy"]) == pytest.approx(entropy, abs=1e-6)
    assert float(metrics["load_max"]) == pytest.approx(fullest)
    assert float(metrics["dropped"]) == pytest.approx(4 / 40)
    assert float(metrics["overflow"]) == pytest.approx(2 / 40)
    assert float(metrics["router_logits"]) == pytest.approx(3.0)  # root of 720 / (20 tokens x 4 experts)
