"""Adafactor (arXiv 1804.04235), one layer or expert at a time, on sharded and padded arrays.

The second moment of a matrix is kept as its row and column means. Here they have the dims of the parameter, with size
1 where the mean was taken, so that they shard, pad and reshard like the parameter itself. Means are over the true
vocabulary: padding adds nothing, and its means stay zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.schema import OptimConfig
from jaxpar.optim.roles import is_axes
from jaxpar.plan.param_views import View, is_factored, view_of

MIN_PARAM_RMS = 1e-3
"""Parameters are taken to be at least this large when updates are relative to them; section 7.5 of the paper."""


class AdafactorState(NamedTuple):
    """Second moments; of each parameter either both means or the whole, and None for the other."""

    count: jax.Array
    """int32 scalar: updates done."""
    rows: dict
    """Mean of the squares of each row of a matrix: [stacked..., rows..., 1...]."""
    columns: dict
    """Mean of the squares of each column: [stacked..., 1..., columns...]."""
    whole: dict
    """Of parameters that are no matrices, or small ones."""
    momentum: dict | None
    """Moving average of the updates; None without momentum."""


def scale_by_adafactor(optim: OptimConfig, logical_axes: dict, vocab_size: int | None) -> optax.GradientTransformation:
    """Gradients -> updates before weight decay and learning rate.

    Args:
        optim: With defaults filled in.
        logical_axes: Of every parameter.
        vocab_size: True size of padded ``vocab`` dims; None if nothing is padded.
    """
    views = jax.tree.leaves(jax.tree.map(lambda a: view_of(a, vocab_size), logical_axes, is_leaf=is_axes))

    def init(params: dict) -> AdafactorState:
        leaves, structure = jax.tree.flatten(params)
        kept = [_initial(optim, param, view) for param, view in zip(leaves, views, strict=True)]
        rows, columns, whole = (structure.unflatten(column) for column in zip(*kept, strict=True))
        momentum = jax.tree.map(jnp.zeros_like, params) if optim.momentum else None
        return AdafactorState(jnp.zeros((), jnp.int32), rows, columns, whole, momentum)

    def update(grads: dict, state: AdafactorState, params: dict) -> tuple[dict, AdafactorState]:
        leaves, structure = jax.tree.flatten(grads)
        decay = 1 - (state.count + 1).astype(jnp.float32) ** -optim.decay_exponent
        moments = zip(*map(structure.flatten_up_to, (state.rows, state.columns, state.whole)), strict=True)
        results = [
            _updated(optim, view, decay, grad, param, *moment)
            for view, grad, param, moment in zip(views, leaves, jax.tree.leaves(params), moments, strict=True)
        ]
        updates, rows, columns, whole = (structure.unflatten(column) for column in zip(*results, strict=True))
        momentum = state.momentum
        if momentum is not None:
            keep = optim.momentum
            momentum = jax.tree.map(lambda m, u: (keep * m + (1 - keep) * u).astype(m.dtype), momentum, updates)
            updates = momentum
        return updates, AdafactorState(state.count + 1, rows, columns, whole, momentum)

    return optax.GradientTransformation(init, update)


def _initial(optim: OptimConfig, param: jax.Array, view: View) -> tuple[jax.Array | None, ...]:
    """Zeros for (rows, columns, whole), sharded like the dims of the parameter that they have."""
    if not is_factored(optim, view, param.shape):
        return None, None, jnp.zeros_like(param)

    def without(dims: tuple[int, ...]) -> jax.Array:
        return jnp.zeros_like(jax.eval_shape(lambda p: jnp.sum(p, dims, keepdims=True), param))

    return without(view.column_dims), without(view.row_dims), None


def _updated(
    optim: OptimConfig,
    view: View,
    decay: jax.Array,
    grad: jax.Array,
    param: jax.Array,
    rows: jax.Array | None,
    columns: jax.Array | None,
    whole: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """One parameter's update and new moments; algorithms 4 and 6 of the paper."""
    shape = grad.shape

    def mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        return jnp.sum(x, dims, keepdims=True) / view.count(shape, dims)

    def moved(moment: jax.Array, squares: jax.Array) -> jax.Array:
        return (decay * moment + (1 - decay) * squares).astype(moment.dtype)

    def rms(x: jax.Array) -> jax.Array:
        return jnp.sqrt(mean(jnp.square(x.astype(jnp.float32)), view.block_dims))

    update = grad.astype(jnp.float32)
    squares = _without_padding(jnp.square(update) + optim.eps, view)
    if whole is not None:
        whole = moved(whole, squares)
        update = update * _inverse_root(whole)
    else:
        rows = moved(rows, mean(squares, view.column_dims))
        columns = moved(columns, mean(squares, view.row_dims))
        update = update * _inverse_root(rows / mean(rows, view.row_dims)) * _inverse_root(columns)
    if optim.clip_update_rms:
        update = update / jnp.maximum(1.0, rms(update) / optim.clip_update_rms)
    if optim.scale_by_param_rms:
        update = update * jnp.maximum(rms(param), MIN_PARAM_RMS)
    return update.astype(grad.dtype), rows, columns, whole


def _without_padding(x: jax.Array, view: View) -> jax.Array:
    """Zeros where the vocabulary is padded."""
    dim = view.padded_dim
    if dim is None or view.true_size in (None, x.shape[dim]):
        return x
    is_true = jnp.arange(x.shape[dim]) < view.true_size
    return jnp.where(is_true.reshape([-1 if d == dim else 1 for d in range(x.ndim)]), x, 0)


def _inverse_root(x: jax.Array) -> jax.Array:
    """1 / sqrt(x); 0 for the zeros that padding has."""
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, jax.lax.rsqrt(jnp.where(x > 0, x, 1)), 0)
