"""What the fsdp axis shards (``mesh.fsdp_strategy``), and so when weights are gathered and gradients scattered.

The float32 master parameters and the optimizer state are sharded with every strategy. In one step of M microbatches:

| strategy | weights are gathered | whole on a device | gradients are reduce-scattered |
|---|---|---|---|
| full (ZeRO-3) | per block, before forward and again before backward: 2 M times | two blocks | per block, M times |
| grads (ZeRO-2) | once, before the first microbatch | all weights, in the compute dtype | per block, M times |
| optimizer (ZeRO-1) | once, before the first microbatch | all weights, and their partial gradients | once, at the end |

Source: ZeRO (arXiv 1910.02054, section 5); there the two lower stages keep replicated parameters and gather the updated
ones at the end of the step, which sends the same bytes and would keep a second copy alive through the update.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    REDUCTION_AXES,
    HeldWeight,
    defer_reduction,
    finish_reduction,
    gather_shards,
    scatter_gradient,
    spec_of,
)
from jaxpar.config.schema import PrecisionConfig
from jaxpar.sharding import GATHERED_DIMS, axes_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpStrategy:
    """When weights are gathered and gradients scattered, fixed while tracing."""

    name: str
    """``full``, ``grads`` or ``optimizer``, see ``mesh.fsdp_strategy`` and ``pipeline.gather``."""
    compute: jnp.dtype
    """What weights are gathered in."""
    reduce: jnp.dtype
    """What gradients are reduce-scattered and all-reduced in."""

    @classmethod
    def of(cls, name: str, precision: PrecisionConfig) -> FsdpStrategy:
        """A strategy in the number formats that a config asks for."""
        return cls(
            name=name,
            compute=jnp.dtype(precision.compute),
            reduce=jnp.dtype(precision.reduce),
        )

    def prepare(
        self, params: dict, logical_axes: dict, reduction_axes: tuple[str, ...] = REDUCTION_AXES
    ) -> StepWeights:
        """Once per step, before its microbatches: mark the parameters, and gather them unless ``full``.

        Args:
            params: Nested dict of parameters.
            logical_axes: A tuple for each, one name per dim.
            reduction_axes: Axes over which gradients stay partial sums until ``StepWeights.finish``.
        """
        marked = defer_reduction(params, reduction_axes)
        if self.name == "full":
            return StepWeights(strategy=self, marked=marked, whole=marked, dims=None)
        # -1 instead of None, which would be no leaf.
        dims = jax.tree.map(_gathered_dim, marked, logical_axes)
        whole = jax.tree.map(lambda w, dim: w if dim < 0 else gather_shards(w, dim, self.compute), marked, dims)
        return StepWeights(strategy=self, marked=marked, whole=whole, dims=dims)


FULL = FsdpStrategy(name="full", compute=jnp.dtype("float32"), reduce=jnp.dtype("float32"))
"""ZeRO-3 in float32. What blocks gather and reduce-scatter in is their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWeights:
    """The weights of one step."""

    strategy: FsdpStrategy
    marked: dict
    """Parameters as at rest, marked by ``defer_reduction``."""
    whole: dict
    """Gathered, or ``marked`` again."""
    dims: dict | None
    """The dim of each parameter that was gathered, -1: none; None: nothing was."""

    @property
    def differentiated(self) -> dict:
        """What a microbatch's gradients are taken with respect to: the shards, or whole weights (``optimizer``)."""
        return self.whole if self.strategy.name == "optimizer" else self.marked

    def for_model(self, differentiated: dict) -> dict:
        """What the model is given."""
        if self.strategy.name != "grads":
            return differentiated
        return jax.tree.map(_held, differentiated, self.whole, self.dims)

    def zero_gradients(self) -> dict:
        """Zeros as an accumulation starts: types of a microbatch's gradients, dtypes of the parameters."""

        def zeros(weight: jax.Array, param: jax.Array) -> jax.Array:
            spec = spec_of(weight)
            return jnp.zeros(weight.shape, param.dtype, out_sharding=P(*spec.partitions, unreduced=spec.reduced))

        return jax.tree.map(zeros, self.differentiated, self.marked)

    def finish(self, grads: dict) -> dict:
        """Accumulated gradients -> gradients with the types of the parameters, every partial sum added up.

        ``grads`` are those of ``differentiated``, or of what the model was given.
        """
        is_held = lambda node: isinstance(node, HeldWeight)  # noqa: E731
        grads = jax.tree.map(lambda node: node.shard if is_held(node) else node, grads, is_leaf=is_held)
        if self.strategy.name == "optimizer":
            grads = jax.tree.map(self._scatter, grads, self.marked, self.dims)
        return finish_reduction(grads, self.strategy.reduce)

    def _scatter(self, grad: jax.Array, param: jax.Array, dim: int) -> jax.Array:
        if dim >= 0:
            spec = spec_of(param)
            grad = scatter_gradient(grad, spec, dim, axes_of(spec.partitions[dim]), self.strategy.reduce)
        return grad.astype(param.dtype)


def _held(shard: jax.Array, whole: jax.Array, dim: int) -> jax.Array | HeldWeight:
    if dim < 0:
        return shard
    return HeldWeight(shard=shard, whole=whole, dim=dim - shard.ndim, axes=axes_of(spec_of(shard).partitions[dim]))


def _gathered_dim(param: jax.Array, logical_axes: tuple[str, ...]) -> int:
    """The dim that must be made whole before use, -1 if none is sharded."""
    entries = zip(logical_axes, spec_of(param).partitions, strict=True)
    return next((dim for dim, (logical, entry) in enumerate(entries) if logical in GATHERED_DIMS and entry), -1)
