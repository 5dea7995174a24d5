"""Learning rate as a function of the step."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.config.schema import OptimConfig
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
