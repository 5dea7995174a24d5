"""Steps of the production program on a mesh and on one device, and what may not differ between the two.

The criterion is relative to rounding in float32: a gradient leaf may be off by 1e-5 of its own norm, or, where it is
tiny, of a thousandth of the norm of all gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import reshard

from jaxpar.config import Config
from jaxpar.program import BATCH_DTYPES, Program

TOLERANCE = 1e-5
"""Largest difference that rounding in float32 explains."""


def packed_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random packed rows with uneven numbers of weighted tokens: arrays [microbatches, rows, sequence].

    With several microbatches, the last one has no weighted token at all. Without ``data.pack`` each row is one
    document, padded at its end.
    """
    rng = np.random.default_rng(seed)
    rows, length = config.train.global_batch_size, config.data.seq_len
    vocab = config.model.vocab_size
    starts = rng.random((rows, length)) < 0.2
    starts[:, 0] = True
    segments = np.cumsum(starts, 1)
    index = np.arange(length)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), 1)
    weights = (rng.random((rows, length)) < rng.random((rows, 1))).astype(np.float32)
    if not config.data.pack:
        segments = (index < rng.integers(length // 2, length + 1, (rows, 1))).astype(int)
        positions, weights = index * segments, weights * segments
    if config.train.microbatches > 1:
        weights[-(rows // config.train.microbatches) :] = 0
    batch = {
        "tokens": rng.integers(0, vocab, (rows, length)),
        "labels": rng.integers(0, vocab, (rows, length)),
        "positions": positions,
        "segment_ids": segments,
        "weights": weights,
    }
    shape = (config.train.microbatches, rows // config.train.microbatches, length)
    return {name: array.astype(BATCH_DTYPES[name]).reshape(shape) for name, array in batch.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a few steps computed, on the host."""

    losses: list[float]
    grad_norms: list[float]
    init: dict
    """Parameters before the first step."""
    grads: dict
    """Of the first step, before clipping: the parameters' tree."""
    params: dict
    """After the last step."""


def run_steps(program: Program, *, num_steps: int) -> Trace:
    """Some steps of ``program.lower_train_step``, from its own initialisation, on ``packed_batch`` of each step."""
    program = dataclasses.replace(program, optimizer=recording(program.optimizer))
    state = program.init(program.config.run.seed)
    whole = program.definition.without_padding
    init = whole(jax.device_get(state.params))
    compiled = program.lower_train_step().compile()
    losses, norms, grads = [], [], None
    for seed in range(num_steps):
        batch = packed_batch(program.config, seed)
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in program.abstract_batch.items()}
        state, metrics = compiled(state, placed)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if grads is None:
            grads = whole(jax.device_get(state.optimizer.grads))
            grads = _unclipped(grads, norms[0], program.config.optim.clip_norm)
    return Trace(losses=losses, grad_norms=norms, init=init, grads=grads, params=whole(jax.device_get(state.params)))


def _unclipped(grads: dict, norm: float, clip_norm: float) -> dict:
    """What the step has scaled down to ``clip_norm``, in its own size."""
    scale = norm / clip_norm if clip_norm and norm > clip_norm else 1.0
    return jax.tree.map(lambda g: g * np.float32(scale), grads)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """Optimizer state that also holds the gradients it was last given."""

    inner: optax.OptState
    grads: dict


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, which keeps the gradients of the last step: the step itself does not give them away."""

    def init(params: dict) -> Recorded:
        return Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: dict, state: Recorded, params: dict) -> tuple[dict, Recorded]:
        updates, inner = optimizer.update(grads, state.inner, params)
        # A strategy may reduce gradients to another sharding than the parameters'.
        kept = jax.tree.map(lambda g, old: reshard(g, jax.typeof(old).sharding), grads, state.grads)
        return updates, Recorded(inner, kept)

    return optax.GradientTransformation(init, update)


def relative_differences(actual: Mapping, expected: Mapping) -> dict[str, float]:
    """|a - b| / max(norm of the leaf, 1e-3 x global norm), per leaf: for gradients. NaN counts as infinitely far."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    global_norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for _, leaf in leaves))
    found = {}
    for (path, want), got in zip(leaves, jax.tree.leaves(actual), strict=True):
        assert want.shape == got.shape, (path, want.shape, got.shape)
        scale = max(float(np.linalg.norm(want)), 1e-3 * global_norm, np.finfo(np.float32).tiny)
        found[_name(path)] = _number(float(np.max(np.abs(got - want))) / scale)
    return found


def scaled_differences(actual: Mapping, expected: Mapping) -> dict[str, float]:
    """|a - b| / max(largest value of the leaf, 1e-3), per leaf: for parameters."""
    found = {}
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        assert want.shape == got.shape, (path, want.shape, got.shape)
        scale = max(float(np.max(np.abs(want))), 1e-3)
        found[_name(path)] = _number(float(np.max(np.abs(got - want))) / scale)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far two runs of the same steps are apart, each as a share of its own size."""

    init: Mapping[str, float]
    """Per parameter, before the first step; 0 or the layout changes what is initialised."""
    loss: float
    """Of the step where it is largest."""
    grad_norm: float
    grads: Mapping[str, float]
    params: Mapping[str, float]
    """But for those of ``unmoved``."""
    unmoved: tuple[str, ...] = ()
    """Parameters whose true gradient is 0 (a key bias), so that the sign of theirs is a matter of rounding: optimizers
    that divide by its size take full steps in either direction, on any two machines."""

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, e.g. ("gradient of layers.q", 3e-7).

        A cause comes before what follows from it: initial values, then gradients, then everything.
        """
        if moved := [name for name, difference in self.init.items() if difference]:
            return f"initial {moved[0]}", self.init[moved[0]]
        leaf = max(self.grads, key=self.grads.get)
        if self.grads[leaf] > TOLERANCE:
            return f"gradient of {leaf}", self.grads[leaf]
        differences = {f"gradient of {leaf}": self.grads[leaf], "loss": self.loss, "gradient norm": self.grad_norm}
        differences |= {f"updated {name}": value for name, value in self.params.items()}
        return max(differences.items(), key=lambda item: item[1])

    @property
    def equal(self) -> bool:
        """Whether all of it is within rounding."""
        return not any(self.init.values()) and self.worst[1] <= TOLERANCE


def compare(actual: Trace, expected: Trace) -> Comparison:
    """The differences between two runs, the second of which is taken to be right."""
    unmoved = _without_gradient(expected.grads)
    params = scaled_differences(actual.params, expected.params)
    return Comparison(
        init=scaled_differences(actual.init, expected.init),
        loss=_largest(actual.losses, expected.losses),
        grad_norm=_largest(actual.grad_norms, expected.grad_norms),
        grads=relative_differences(actual.grads, expected.grads),
        params={name: difference for name, difference in params.items() if name not in unmoved},
        unmoved=unmoved,
    )


def _without_gradient(grads: Mapping) -> tuple[str, ...]:
    """Leaves with at most a millionth of the norm of all gradients, but not exactly 0: rounding."""
    norms = {
        _name(path): float(np.linalg.norm(np.asarray(leaf, np.float64)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
    }
    limit = 1e-6 * math.sqrt(sum(norm**2 for norm in norms.values()))
    return tuple(name for name, norm in norms.items() if 0 < norm <= limit)


def _largest(actual: list[float], expected: list[float]) -> float:
    return max(_number(abs(a - e) / max(abs(e), 1e-12)) for a, e in zip(actual, expected, strict=True))


def _number(difference: float) -> float:
    """NaN as infinity: it is no agreement."""
    return math.inf if math.isnan(difference) else difference


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
