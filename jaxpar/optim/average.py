"""Exponential moving average of the parameters : what is evaluated or exported, not trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def first_average(params: dict) -> dict:
    """The average before any step: the parameters in float32, in which small steps are not lost."""
    return jax.tree.map(lambda param: jnp.array(param, jnp.float32, copy=True), params)


def next_average(average: dict, params: dict, decay: float) -> dict:
    """``decay`` times the average, and the rest of the parameters after the step."""
    return jax.tree.map(lambda a, param: a + (1 - decay) * (param.astype(a.dtype) - a), average, params)
