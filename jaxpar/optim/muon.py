"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal.

Only matrices of blocks are its own, see ``roles.muon_mask``. Newton-Schulz needs the whole matrix of one
layer, or one expert, so the momentum is exchanged between devices (``blocks.map_blocks``) and iterated on in the
compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.schema import OptimConfig
from jaxpar.optim.blocks import map_blocks
from jaxpar.optim.roles import is_axes
from jaxpar.plan.param_views import View, view_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5: the steepest at zero that keeps singular values near 1."""

RMS_SCALE = 0.2
"""Root mean square of AdamW's updates, empirically; arXiv 2502.16982, section 2.2."""


class MuonState(NamedTuple):
    """State of the parameters that are Muon's own."""

    count: jax.Array
    """int32 scalar: updates done."""
    momentum: dict
    """Moving average of the gradients."""


def scale_by_muon(optim: OptimConfig, logical_axes: dict, compute: jnp.dtype) -> optax.GradientTransformation:
    """Gradients of Muon's own parameters -> updates before weight decay and learning rate.

    Args:
        optim: With defaults filled in.
        logical_axes: Of every parameter, Muon's own or not.
        compute: Dtype of exchange and iteration.
    """
    views: Mapping[tuple, View] = {
        path: view_of(axes) for path, axes in jax.tree_util.tree_leaves_with_path(logical_axes, is_leaf=is_axes)
    }
    keep = optim.momentum

    def init(params: dict) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def orthogonal(path: tuple, momentum: jax.Array, grad: jax.Array, count: jax.Array) -> jax.Array:
        view = views[path]
        # The mean of a moving average that starts at zero; Nesterov's is the average one step ahead.
        direction = momentum / (1 - keep ** (count + 1 if optim.nesterov else count))
        if optim.nesterov:
            direction = keep * direction + (1 - keep) * grad / (1 - keep**count)
        block_shape = momentum.shape[view.num_stacked :]
        num_rows = math.prod(momentum.shape[dim] for dim in view.row_dims)

        def of_block(block: jax.Array) -> jax.Array:
            return newton_schulz(block.reshape(num_rows, -1), optim.ns_steps, optim.eps).reshape(block_shape)

        scale = update_scale(optim, num_rows, math.prod(block_shape) // num_rows)
        update = map_blocks(of_block, direction.astype(compute), view.num_stacked)
        return scale * update.astype(momentum.dtype)

    def update(grads: dict, state: MuonState, params: dict | None = None) -> tuple[dict, MuonState]:
        del params
        count = state.count + 1
        momentum = jax.tree.map(lambda m, g: keep * m + (1 - keep) * g, state.momentum, grads)
        # As in the step: float32 means full float32 products.
        with jax.default_matmul_precision("highest" if compute == jnp.float32 else "default"):
            updates = jax.tree_util.tree_map_with_path(
                lambda path, m, g: orthogonal(path, m, g, count.astype(jnp.float32)), momentum, grads
            )
        return updates, MuonState(count, momentum)

    return optax.GradientTransformation(init, update)


def update_scale(optim: OptimConfig, num_rows: int, num_columns: int) -> float:
    """Factor on the orthogonal update of one matrix, see ``optim.update_scale``."""
    if optim.update_scale == "rms":
        return RMS_SCALE * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(max(1.0, num_columns / num_rows))


def newton_schulz(matrix_mn: jax.Array, num_steps: int, eps: float) -> jax.Array:
    """An almost orthogonal matrix with the singular vectors of a given one, in its dtype.

    Singular values end between about 0.7 and 1.2, which trains as well as exactly 1.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_mn.shape[0] > matrix_mn.shape[1]
    x = matrix_mn.T if is_tall else matrix_mn  # the product below is then the smaller of the two
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))
    x = x / (norm + eps).astype(x.dtype)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x
