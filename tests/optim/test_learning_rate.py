"""Schedules against optax and against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpar.config.schema import OptimConfig
from jaxpar.optim import learning_rate

SCHEDULES = ("cosine", "linear", "wsd", "constant")
LONGEST = 400
lengths = st.integers(1, LONGEST)
ratios = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def rates(num_steps: int, **optim) -> np.ndarray:
    """Learning rate of every step of a run, and of the one after its end."""
    # One shape for all runs, so that nothing is compiled again.
    return np.asarray(learning_rate(OptimConfig(**optim), num_steps)(jnp.arange(LONGEST + 1)))[: num_steps + 1]


def warmed_up(after, peak: float, warmup: int, num_steps: int) -> np.ndarray:
    """An optax schedule that starts after a linear warm-up, whose first step is peak / warmup."""
    steps = jnp.arange(LONGEST + 1)
    rise = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    return np.where(steps < warmup, rise(steps), after(steps - warmup))[: num_steps + 1]


@settings(deadline=None, max_examples=25)
@given(lengths, st.integers(0, 100), ratios)
def test_cosine_is_that_of_optax(num_steps, warmup, ratio):
    assume(warmup < num_steps)
    after = optax.cosine_decay_schedule(1e-3, num_steps - warmup, alpha=ratio)
    actual = rates(num_steps, lr=1e-3, schedule="cosine", warmup_steps=warmup, min_lr_ratio=ratio)
    np.testing.assert_allclose(actual, warmed_up(after, 1e-3, warmup, num_steps), rtol=1e-4, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(lengths, st.integers(0, 100), ratios)
def test_linear_is_that_of_optax(num_steps, warmup, ratio):
    assume(warmup < num_steps)
    after = optax.linear_schedule(1e-3, 1e-3 * ratio, num_steps - warmup)
    actual = rates(num_steps, lr=1e-3, schedule="linear", warmup_steps=warmup, min_lr_ratio=ratio)
    np.testing.assert_allclose(actual, warmed_up(after, 1e-3, warmup, num_steps), rtol=1e-4, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.integers(10, LONGEST), st.integers(0, 9), st.integers(0, 100), ratios)
def test_wsd_holds_the_peak_and_decays_at_the_end(num_steps, warmup, decay, ratio):
    length = decay or math.ceil(num_steps / 10)
    assume(warmup + length <= num_steps)
    actual = rates(num_steps, lr=1e-3, schedule="wsd", warmup_steps=warmup, decay_steps=decay, min_lr_ratio=ratio)
    start = num_steps - length
    np.testing.assert_allclose(actual[:warmup], 1e-3 * (np.arange(warmup) + 1) / max(1, warmup), rtol=1e-5)
    np.testing.assert_allclose(actual[warmup : start + 1], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(actual[start:], np.linspace(1e-3, 1e-3 * ratio, length + 1), rtol=1e-4, atol=1e-9)


def test_constant_stays():
    np.testing.assert_allclose(rates(50, lr=2e-4, schedule="constant", warmup_steps=5)[4:], 2e-4)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(SCHEDULES), lengths, st.integers(0, 500), st.integers(0, 500), ratios)
def test_whatever_the_settings(schedule, num_steps, warmup, decay, ratio):
    """No first step is lost, nothing passes the peak, and after the warm-up the rate only falls, down to its floor."""
    optim = {"warmup_steps": warmup, "decay_steps": decay, "min_lr_ratio": ratio}
    actual = rates(num_steps, lr=3e-4, schedule=schedule, **optim)
    assert actual[0] > 0
    assert np.isfinite(actual).all()
    assert actual.max() <= 3e-4 * (1 + 1e-6)
    late = actual[warmup:]
    assert (np.diff(late) <= 1e-10).all()
    assert (late >= 3e-4 * (1 if schedule == "constant" else ratio) * (1 - 1e-5)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_one_step_trains_at_the_peak(schedule):
    assert rates(1, lr=1e-3, schedule=schedule)[0] == pytest.approx(1e-3)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_floor_is_reached_at_the_end_and_kept(schedule):
    rate = learning_rate(OptimConfig(lr=1e-3, schedule=schedule, min_lr_ratio=0.1), 40)
    np.testing.assert_allclose([rate(40), rate(41), rate(4000)], 1e-4, rtol=1e-5)
