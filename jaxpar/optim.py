"""Optimizer and learning-rate schedule from the config, on optax."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.schema import OptimConfig
from jaxpar.model.moe import BIAS
from jaxpar.plan.run_rules import wsd_decay_steps


def learning_rate(optim: OptimConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Schedule: optimizer step (from 0) -> learning rate of that step.

    Linear warm-up reaches the peak at step ``warmup_steps - 1`` and never returns 0. Cosine and linear reach
    ``min_lr_ratio`` of the peak at ``num_steps``; wsd (warmup-stable-decay, arXiv 2404.06395) holds the peak and
    decays linearly over the last ``decay_steps``.
    """
    warmup = optim.warmup_steps
    decay_start = num_steps - wsd_decay_steps(optim, num_steps) if optim.schedule == "wsd" else warmup

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - decay_start) / max(1, num_steps - decay_start), 0.0, 1.0)
        shape = {
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "linear": 1 - progress,
            "wsd": 1 - progress,
            "constant": jnp.ones_like(progress),
        }[optim.schedule]
        decayed = optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape
        return optim.lr * jnp.minimum(1.0, (step + 1) / warmup if warmup else 1.0) * decayed

    return rate


def decay_mask(optim: OptimConfig, logical_axes: dict) -> dict:
    """Which parameters weight decay applies to, by role: a nested dict of booleans.

    A parameter's role follows from its name and logical axes: norms (name ends in ``norm``), biases (name ends in
    ``bias``), embeddings (name is ``embedding`` or ``positions``), and weights, which always decay. The balance bias of
    a router never decays: it is not trained by gradients.
    """

    def decays(path: tuple, _axes: tuple[str, ...]) -> bool:
        name = path[-1].key
        if name == BIAS:
            return False
        if name.endswith("norm"):
            return optim.decay_norms
        if name.endswith("bias"):
            return optim.decay_biases
        if name in ("embedding", "positions"):
            return optim.decay_embeddings
        return True

    return jax.tree_util.tree_map_with_path(decays, logical_axes, is_leaf=lambda x: isinstance(x, tuple))


def make_optimizer(optim: OptimConfig, logical_axes: dict) -> optax.GradientTransformation:
    """Clipped gradients -> updates before the learning rate.

    AdamW with decoupled weight decay (arXiv 1711.05101): the step applies ``params - lr * update``. Clipping and the
    learning rate are the step's, which also reports them.
    """
    if optim.name != "adamw":
        raise ValueError(f"optim.name = {optim.name!r} is not available yet; use adamw")
    return optax.chain(
        optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps),
        optax.add_decayed_weights(optim.weight_decay, mask=decay_mask(optim, logical_axes)),
    )
