"""The optimizer of a config, as an optax gradient transformation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxpar.config.optimizers import with_optimizer_defaults
from jaxpar.config.schema import OptimConfig
from jaxpar.optim.adafactor import scale_by_adafactor
from jaxpar.optim.muon import scale_by_muon
from jaxpar.optim.roles import decay_mask, muon_mask


def make_optimizer(
    optim: OptimConfig, logical_axes: dict, *, vocab_size: int | None = None, compute: str = "float32"
) -> optax.GradientTransformation:
    """Clipped gradients -> updates before the learning rate.

    The step applies ``params - lr * update``; weight decay is decoupled (arXiv 1711.05101), so every update ends with
    ``weight_decay * params``. Clipping and the learning rate are the step's, which also reports them. Optimizers that
    look across a parameter (adafactor, muon) see one layer or expert at a time, and no padding; init and update are
    traced under ``jax.set_mesh`` where parameters are sharded.

    Args:
        optim: Name and settings; absent ones are the optimizer's defaults.
        logical_axes: Nested dict of a tuple per parameter, as ``ModelDefinition.logical_axes``.
        vocab_size: True size of ``vocab`` dims, which may be padded; None if nothing is padded.
        compute: Dtype that muon iterates in, ``precision.compute``.
    """
    optim = with_optimizer_defaults(optim)
    decay = optax.add_decayed_weights(optim.weight_decay, mask=decay_mask(optim, logical_axes))
    if optim.name == "adafactor":
        return optax.chain(scale_by_adafactor(optim, logical_axes, vocab_size), decay)
    if optim.name == "lion":
        return optax.chain(optax.scale_by_lion(b1=optim.b1, b2=optim.b2), decay)
    if optim.name == "sgd":
        momentum = optax.trace(decay=optim.momentum, nesterov=optim.nesterov) if optim.momentum else optax.identity()
        return optax.chain(momentum, decay)
    adam = optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps)
    if optim.name == "adamw":
        return optax.chain(adam, decay)
    is_own = muon_mask(logical_axes)
    parts = {"muon": scale_by_muon(optim, logical_axes, jnp.dtype(compute)), "adamw": adam}
    by_part = optax.partition(parts, jax.tree.map(lambda own: "muon" if own else "adamw", is_own))
    if optim.adamw_lr is None:
        return optax.chain(by_part, decay)
    ratio = optax.scale(optim.adamw_lr / optim.lr)
    return optax.chain(by_part, decay, optax.masked(ratio, jax.tree.map(lambda own: not own, is_own)))
