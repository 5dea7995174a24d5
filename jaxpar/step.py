"""The training step: microbatches -> gradients -> one optimizer update, as one jitted function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.config.schema import Config
from jaxpar.model.dropout import KEYS, token_keys
from jaxpar.model.moe import load_metrics, rebalance
from jaxpar.optim import learning_rate, next_average
from jaxpar.state import ModelDefinition, TrainState
from jaxpar.strategy import FULL, FsdpStrategy

LossFn = Callable[[nnx.Module, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
"""(model, microbatch) -> (weighted sum of losses, sum of weights, other weighted sums to report)."""
Batch = Mapping[str, jax.Array]
"""Arrays [microbatches, rows, sequence]."""
Metrics = dict[str, jax.Array]
Accumulate = Callable[[dict, Batch], tuple[dict, Metrics]]
"""(params, batch) -> (gradients, means), see ``accumulate``."""
Evaluate = Callable[[dict, Batch], Metrics]
"""(params, batch) -> sums, see ``evaluate``."""


def accumulate(
    definition: ModelDefinition, loss_fn: LossFn, params: dict, batch: Batch, strategy: FsdpStrategy = FULL
) -> tuple[dict, Metrics]:
    """Gradients of the mean loss over all tokens of all microbatches, and the means themselves.

    Sums and weights of microbatches are added and divided once at the end, so that every token counts the same
    however tokens are spread over microbatches and devices; a microbatch without a weighted token adds nothing.
    Gradients are partial sums until the end: axes that do not shard a parameter reduce it once per step.

    Returns:
        Gradients with the shardings of ``params``, and scalars ``loss`` (cross entropy and z-loss), ``tokens`` (sum
        of weights) and whatever ``loss_fn`` reports; ``routing`` holds sums, not means.
    """
    weights = strategy.prepare(params, definition.logical_axes)

    def objective(differentiated: dict, microbatch: Batch) -> tuple[jax.Array, Metrics]:
        total, weight, sums = loss_fn(definition.bind(weights.for_model(differentiated)), microbatch)
        return total, {"loss": total, "tokens": weight, **sums}

    def backward(microbatch: Batch) -> tuple[dict, Metrics]:
        return jax.grad(objective, has_aux=True)(weights.differentiated, microbatch)

    def add(carry: tuple[dict, Metrics], microbatch: Batch) -> tuple[tuple[dict, Metrics], None]:
        return jax.tree.map(jnp.add, carry, backward(microbatch)), None

    first = jax.tree.map(lambda a: a[0], dict(batch))
    if next(iter(batch.values())).shape[0] == 1:
        grads, sums = backward(first)
    else:
        zero_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(backward, first)[1])
        (grads, sums), _ = jax.lax.scan(add, (weights.zero_gradients(), zero_sums), dict(batch))

    return mean_over_tokens(weights.finish(grads), sums)


def mean_over_tokens(grads: dict, sums: Metrics) -> tuple[dict, Metrics]:
    """Gradients and sums over all microbatches as means over their ``tokens``; these themselves stay a sum."""
    weight = jnp.maximum(sums["tokens"], 1e-9)
    grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
    counted = {name: sums[name] for name in ("tokens", "routing") if name in sums}
    return grads, {name: value / weight for name, value in sums.items() if name not in counted} | counted


def evaluate(definition: ModelDefinition, loss_fn: LossFn, params: dict, batch: Batch) -> Metrics:
    """Sums of cross entropy and tokens over the batch's microbatches, in float32."""

    def add(sums: Metrics, microbatch: Batch) -> tuple[Metrics, None]:
        _, weight, extra = loss_fn(definition.bind(params), microbatch)
        return {
            "cross_entropy": sums["cross_entropy"] + extra["cross_entropy"],
            "tokens": sums["tokens"] + weight,
        }, None

    zero = {"cross_entropy": jnp.zeros(()), "tokens": jnp.zeros(())}
    return jax.lax.scan(add, zero, dict(batch))[0]


def update(
    config: Config, optimizer: optax.GradientTransformation, state: TrainState, grads: dict, metrics: Metrics
) -> tuple[TrainState, Metrics]:
    """Clip, optimizer, learning rate. A step whose loss or gradient is not finite changes nothing but ``step``.

    Returns:
        The next state, and the metrics with ``grad_norm`` (before clipping), ``lr`` and ``skipped`` (0 or 1) added, and
        ``routing`` replaced by what it says (``jaxpar.model.moe.load_metrics``).
    """
    clip_norm = config.optim.clip_norm
    grad_norm = optax.tree.norm(grads)
    if clip_norm:
        shrink = jnp.where(grad_norm > clip_norm, clip_norm / grad_norm, 1.0)
        grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    lr = learning_rate(config.optim, config.train.steps)(state.step)
    params = jax.tree.map(lambda p, u: (p - lr * u).astype(p.dtype), state.params, updates)
    if "routing" in metrics:
        params = rebalance(params, metrics["routing"]["load"], config.model.balance_rate)
        metrics = {name: value for name, value in metrics.items() if name != "routing"} | load_metrics(
            metrics["routing"]
        )
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
    ema = None if state.ema is None else next_average(state.ema, params, config.optim.ema_decay)
    params, moments, ema = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, moments, ema),
        (state.params, state.optimizer, state.ema),
    )
    metrics = {**metrics, "grad_norm": grad_norm, "lr": lr, "skipped": 1.0 - finite}
    return TrainState(step=state.step + 1, params=params, optimizer=moments, ema=ema), metrics


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, accumulate: Accumulate
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics). Jit it with the state donated, under ``jax.set_mesh``."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if config.train.dropout:
            batch = {**batch, KEYS: token_keys(config.run.seed, state.step, batch["tokens"])}
        with matmul_precision(config):
            grads, metrics = accumulate(state.params, batch)
        return update(config, optimizer, state, grads, metrics)

    return train_step


def make_eval_step(config: Config, evaluate: Evaluate) -> Callable[[dict, Batch], Metrics]:
    """(params, batch) -> sums of cross entropy and tokens over the batch's microbatches, in float32."""

    def eval_step(params: dict, batch: Batch) -> Metrics:
        with matmul_precision(config):
            return evaluate(params, batch)

    return eval_step


def matmul_precision(config: Config):
    """float32 compute means full float32 products: GPUs would otherwise use TF32 with 10 bits of mantissa."""
    return jax.default_matmul_precision("highest" if config.precision.compute == "float32" else "default")
