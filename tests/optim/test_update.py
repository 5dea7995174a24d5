"""One optimizer update against optax.adamw: clipping, decay by role, and steps that are not finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.config import Config
from jaxpar.config.schema import OptimConfig
from jaxpar.optim import decay_mask, learning_rate, make_optimizer
from jaxpar.state import TrainState, fresh_state
from jaxpar.step import update
from tests.parity.harness import build, parity_config

LOGICAL_AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {"q": ("layers", "embed"), "q_bias": ("layers", "heads"), "q_norm": ("layers", "norm")},
    "output": {"kernel": ("embed", "mlp"), "bias": ("mlp",), "norm": ("norm",)},
    "positions": ("norm", "embed"),
    "final_norm": ("norm",),
}


def tree(seed: int, scale: float = 1.0) -> dict:
    """Random leaves in the structure of ``LOGICAL_AXES``."""
    rng = np.random.default_rng(seed)
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(
        lambda axes: jnp.asarray(scale * rng.normal(size=(3,) * len(axes)), jnp.float32), LOGICAL_AXES, is_leaf=is_axes
    )


def config_of(**optim) -> Config:
    return Config(optim={"lr": 1e-2, "warmup_steps": 3, "clip_norm": 0.0, **optim}, train={"steps": 20})


@functools.cache
def compiled(config: Config) -> tuple:
    """Fresh state and update of production code."""
    fresh = functools.partial(fresh_state, averages=config.optim.ema_decay > 0)
    optimizer = make_optimizer(config.optim, LOGICAL_AXES)
    step = jax.jit(lambda state, grads, loss: update(config, optimizer, state, grads, {"loss": loss}))
    return jax.jit(functools.partial(fresh, optimizer=optimizer)), step


def run(config: Config, grads: list[dict], params: dict | None = None) -> tuple[TrainState, list[dict]]:
    """Updates from a fresh state."""
    fresh, step = compiled(config)
    state, all_metrics = fresh(tree(0) if params is None else params), []
    for grad in grads:
        state, metrics = step(state, grad, jnp.ones(()))
        all_metrics.append(jax.device_get(metrics))
    return state, all_metrics


def assert_equal(actual: dict, expected: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8), actual, expected)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_adamw_is_that_of_optax(clip_norm):
    config = config_of(clip_norm=clip_norm, weight_decay=0.1, b1=0.8, b2=0.9, eps=1e-6)
    grads = [tree(seed, scale=0.1 * seed) for seed in range(1, 7)]
    optim = config.optim
    mask = {
        "embedding": True,
        "layers": {"q": True, "q_bias": False, "q_norm": False},
        "output": {"kernel": True, "bias": False, "norm": False},
        "positions": True,
        "final_norm": False,
    }
    reference = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.adamw(learning_rate(optim, 20), b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, mask=mask),
    )
    params = tree(0)
    state = reference.init(params)
    reference_update = jax.jit(reference.update)
    for grad in grads:
        updates, state = reference_update(grad, state, params)
        params = optax.apply_updates(params, updates)
    actual, metrics = run(config, grads)
    assert_equal(actual.params, params)
    assert actual.step == len(grads)
    np.testing.assert_allclose([m["lr"] for m in metrics], learning_rate(optim, 20)(jnp.arange(6)), rtol=1e-6)
    assert not any(m["skipped"] for m in metrics)
    norms = [np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grad))) for grad in grads]
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-6)
    assert min(norms) < 1 < max(norms), "clipping is seen from one side only"


def first_moment(state: TrainState) -> dict:
    """The gradients that Adam was given in the first step, after clipping."""
    return jax.tree.map(lambda m: m / (1 - 0.9), state.optimizer[0].mu)


@pytest.mark.parametrize("norm", [1e-6, 0.4, 0.5])
def test_gradients_below_the_limit_pass_unchanged(norm):
    grads = tree(1)
    grads = jax.tree.map(lambda g: g * (norm * 0.9999 / optax.tree.norm(grads)), grads)
    state, _ = run(config_of(clip_norm=0.5), [grads])
    assert_equal(first_moment(state), grads)


@pytest.mark.parametrize("norm", [0.51, 1.0, 1e3, 1e15])
def test_gradients_above_the_limit_are_scaled_down_to_it(norm):
    grads = tree(1)
    direction = jax.tree.map(lambda g: g / optax.tree.norm(grads), grads)
    state, (metrics,) = run(config_of(clip_norm=0.5), [jax.tree.map(lambda g: g * norm, direction)])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), "reported before clipping"
    assert_equal(first_moment(state), jax.tree.map(lambda g: 0.5 * g, direction))


def test_zero_gradients_are_no_special_case():
    state, (metrics,) = run(config_of(clip_norm=0.5, weight_decay=0.0), [tree(0, scale=0.0)])
    assert (metrics["grad_norm"], metrics["skipped"]) == (0, 0)
    assert_equal(state.params, tree(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30], ids=["nan", "inf", "-inf", "norm overflows"])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_step(bad):
    good = tree(1)
    broken = {**good, "layers": {**good["layers"], "q": good["layers"]["q"].at[1, 2].set(bad)}}
    once, _ = run(config_of(clip_norm=0.5), [good])
    then, metrics = run(config_of(clip_norm=0.5), [good, broken])
    assert [m["skipped"] for m in metrics] == [0, 1]
    assert not np.isfinite(metrics[1]["grad_norm"])
    assert then.step == 2
    jax.tree.map(np.testing.assert_array_equal, (then.params, then.optimizer), (once.params, once.optimizer))


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_skipped_too(loss):
    config = config_of()
    optimizer = make_optimizer(config.optim, LOGICAL_AXES)
    state = fresh_state(tree(0), optimizer)
    then, metrics = update(config, optimizer, state, tree(1), {"loss": jnp.float32(loss)})
    assert metrics["skipped"] == 1
    assert_equal(then.params, state.params)


def test_norm_scales_move_in_float32_and_would_not_in_bfloat16():
    """A scale of 1.0 and steps of 6e-4: half of bfloat16's spacing below 1.0 is 2e-3, so that it never moves."""
    config = config_of(lr=6e-4, weight_decay=0.0, schedule="constant", warmup_steps=0)
    ones, grads = jax.tree.map(jnp.ones_like, tree(0)), jax.tree.map(jnp.ones_like, tree(0))
    moved, _ = run(config, [grads] * 20, ones)
    np.testing.assert_allclose(moved.params["final_norm"], 1 - 20 * 6e-4, rtol=1e-4)
    stuck, _ = run(config, [grads] * 20, jax.tree.map(lambda p: p.astype(jnp.bfloat16), ones))
    assert stuck.params["final_norm"].dtype == jnp.bfloat16
    assert (stuck.params["final_norm"] == 1).all()


ALL_ROLES = {"decay_norms": True, "decay_biases": True, "decay_embeddings": True}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("only", ["none", *ALL_ROLES])
def test_decay_goes_by_role_in_every_family(family, only):
    definition = build(parity_config({}, model={"family": family})).definition
    optim = OptimConfig(**{role: role == only for role in ALL_ROLES})
    mask = decay_mask(optim, definition.logical_axes)
    decayed = {path[-1].key for path, on in jax.tree_util.tree_leaves_with_path(mask) if on}
    spared = {path[-1].key for path, on in jax.tree_util.tree_leaves_with_path(mask) if not on}
    roles = {
        "decay_norms": {"attention_norm", "mlp_norm", "final_norm"}
        | ({"q_norm", "k_norm"} if family == "qwen3" else set()),
        "decay_biases": {"q_bias", "k_bias", "v_bias"} if family == "qwen2" else set(),
        "decay_embeddings": {"embedding"},
    }
    assert decayed == {"q", "k", "v", "o", "gate", "up", "down", "head"} | roles.get(only, set())
    assert spared == set().union(*(names for role, names in roles.items() if role != only))


def test_decay_alone_shrinks_exactly_the_decayed():
    """With zero gradients one step multiplies the decayed leaves by 1 - lr x decay and leaves the others."""
    config = config_of(lr=1e-2, weight_decay=0.5, warmup_steps=0, schedule="constant")
    state, _ = run(config, [tree(0, scale=0.0)])
    before = tree(0)
    assert_equal(state.params["layers"]["q"], before["layers"]["q"] * (1 - 1e-2 * 0.5))
    assert_equal(state.params["embedding"], before["embedding"] * (1 - 1e-2 * 0.5))
    for name in ("q_bias", "q_norm"):
        np.testing.assert_array_equal(state.params["layers"][name], before["layers"][name])
    np.testing.assert_array_equal(state.params["final_norm"], before["final_norm"])


def test_the_average_follows_the_parameters_and_not_the_skipped_steps():
    config = config_of(ema_decay=0.75)
    steps = [run(config, [tree(seed) for seed in range(1, count + 1)])[0] for count in (0, 1, 2)]
    assert_equal(steps[0].ema, tree(0))
    for before, after in itertools.pairwise(steps):
        assert_equal(after.ema, jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, before.ema, after.params))
    bad = jax.tree.map(lambda g: jnp.full_like(g, np.nan), tree(0))
    skipped, _ = run(config, [tree(1), tree(2), bad])
    jax.tree.map(np.testing.assert_array_equal, skipped.ema, steps[-1].ema)


def test_the_average_of_bfloat16_parameters_is_float32():
    state = fresh_state(
        jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree(0)),
        make_optimizer(OptimConfig(), LOGICAL_AXES),
        averages=True,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {jnp.dtype(jnp.float32)}
