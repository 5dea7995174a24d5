"""A user's own NNX module, loss and data, as what the training loop runs: a definition, a loss and rows by index.

The module knows nothing of meshes. Without a tensor axis its loss runs on each device's own rows with whole weights:
they are gathered just before, and the gradients of the local rows are reduce-scattered to the shards. With a tensor
axis the compiler (Auto mode) decides how products over sharded weights are split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import spec_of
from jaxpar.compiler_options import choose_options
from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import PrecisionConfig
from jaxpar.data.dataset import Datasets
from jaxpar.data.order import GlobalOrder
from jaxpar.mesh import make_mesh, used_axes
from jaxpar.optim import make_optimizer
from jaxpar.plan.resolve import ResolvedPlan
from jaxpar.program import Program
from jaxpar.sharding import BATCH_AXES, axes_of, rows_sharding
from jaxpar.state import ModelDefinition
from jaxpar.step import Accumulate, LossFn, accumulate
from jaxpar.strategy import FULL, FsdpStrategy, StepWeights

OwnLoss = Callable[[nnx.Module, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(model, arrays [rows, ...]) -> (sum of the rows' losses, sum of their weights)."""


class Source(Protocol):
    """Rows by index, of any arrays of the same names, shapes and dtypes. Read by several threads at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Mapping[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """A source as the loader reads it."""

    source: Source
    mixture: None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Row ``i``.

        Raises:
            ValueError: its arrays are not those of row 0.
        """
        row = {name: np.asarray(value) for name, value in self.source[i].items()}
        found = {name: (value.shape, value.dtype) for name, value in row.items()}
        if found != self.row_types:
            raise ValueError(f"row {i} has arrays {_described(found)}, but row 0 has {_described(self.row_types)}")
        return row

    @cached_property
    def row_types(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array of a row, by name; those of row 0."""
        first = {name: np.asarray(value) for name, value in self.source[0].items()}
        # JAX holds 32 bits: wider arrays would be cut without a word.
        wide = {name: value.dtype for name, value in first.items() if value.dtype.itemsize > 4}
        if wide:
            raise ValueError(f"arrays {_described(wide)} are wider than 32 bits; give float32 or int32")
        return {name: (value.shape, value.dtype) for name, value in first.items()}

    @property
    def identity(self) -> dict[str, str | int]:
        """What a resumed run compares."""
        return {"source": "own", "rows": len(self), "arrays": _described(self.row_types)}

    def order(self, *, seed: int, shuffle: bool) -> GlobalOrder:
        """The global order of the rows."""
        return GlobalOrder(len(self), seed=seed, shuffle=shuffle)


def _described(arrays: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(arrays.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModel:
    """What a user brings instead of a decoder and its tokens."""

    make: Callable[[nnx.Rngs], nnx.Module]
    """Makes the module; every ``nnx.Param`` of it carries ``logical_axes``."""
    loss_fn: OwnLoss
    train_data: Source
    eval_data: Source | None = None

    def datasets(self) -> Datasets:
        """The data as the loop reads it."""
        train = OwnRows(self.train_data)
        validation = None if self.eval_data is None else OwnRows(self.eval_data)
        if validation is not None and validation.row_types != train.row_types:
            raise ValueError(
                f"eval_data has arrays {_described(validation.row_types)}, train_data {_described(train.row_types)}"
            )
        rows = len(train) + (len(validation) if validation is not None else 0)
        note = f"{len(train):,} rows of {_described(train.row_types)}"
        return Datasets(
            train=train,
            validation=validation,
            vocab_size_of_tokenizer=0,
            num_documents=rows,
            num_tokens=rows,
            notes=[note],
        )


@dataclasses.dataclass(frozen=True)
class OwnProgram(Program):
    """The program of a user's module."""

    row_types: Mapping[str, tuple[tuple[int, ...], np.dtype]] = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, own: OwnModel, plan: ResolvedPlan, devices: Sequence[jax.Device] | None = None) -> OwnProgram:
        """The program on ``devices`` (default: all).

        Raises:
            ConfigError: a parameter has no logical axes, or wrong ones, or does not divide by the mesh; or an axis
                shards nothing.
        """
        config, mesh = plan.config, make_mesh(plan.mesh, devices)
        definition = _checked_definition(own, mesh)
        return cls(
            plan=dataclasses.replace(plan, num_params=definition.num_params),
            mesh=mesh,
            attention=None,
            grouped=None,
            gather=None,
            options=choose_options(config, mesh),
            definition=definition,
            optimizer=make_optimizer(config.optim, definition.logical_axes, compute=config.precision.compute),
            loss_fn=own_loss(own.loss_fn, mesh, config.precision),
            row_types=OwnRows(own.train_data).row_types,
        )

    @property
    def true_vocab_size(self) -> None:
        """Nothing of a user's module is padded."""
        return

    @property
    def flops_per_token(self) -> int:
        """Nothing is known of a user's module."""
        return 0

    @property
    def eval_last_batch(self) -> str:
        """Rows of a user's own have no weight of 0 to be padded with."""
        return "drop"

    @property
    def batch_words(self) -> str:
        """For people: what a step is trained on."""
        return f"{self.config.train.global_batch_size} rows a step"

    @property
    def notes(self) -> list[str]:
        """For the log: what was chosen for this mesh."""
        notes = list(self.options.notes)
        if self.mesh.shape["tensor"] > 1 and self.config.precision.reduce != self.config.precision.compute:
            notes.append(
                f"precision.reduce = {self.config.precision.reduce} is not promised: with a tensor axis the compiler "
                "reduces the gradients of a module of your own, in the type that it computes them in"
            )
        return notes

    @cached_property
    def accumulate(self) -> Accumulate:
        """Gradients and means of a batch."""
        strategy = _OwnStrategy(name="full", compute=FULL.compute, reduce=FULL.reduce)
        return partial(accumulate, self.definition, self.loss_fn, strategy=strategy)

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays [microbatches, rows, ...]."""
        lead = (self.config.train.microbatches, self.plan.rows_per_microbatch)
        sharding = rows_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=sharding)
            for name, (shape, dtype) in self.row_types.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OwnStrategy(FsdpStrategy):
    """Gradients come out of the loss complete, so no reduction is deferred."""

    def prepare(self, params: dict, logical_axes: dict) -> StepWeights:
        """The parameters as they are."""
        del logical_axes
        return StepWeights(strategy=self, marked=params, whole=params, dims=None)


def _checked_definition(own: OwnModel, mesh: Mesh) -> ModelDefinition:
    try:
        definition = ModelDefinition(own.make)
        specs = definition.specs(mesh)
    except ValueError as error:
        raise ConfigError([Problem(key="model", message=str(error), remedy="see docs/own-model.md")]) from error
    used = {
        axis for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) for e in spec for axis in axes_of(e)
    }
    if mesh.shape["tensor"] > 1 and "tensor" not in used:
        raise ConfigError(
            [
                Problem(
                    key="mesh.tensor",
                    value=mesh.shape["tensor"],
                    message="axis tensor shards nothing: no parameter has a logical axis for it",
                    remedy='use mesh.data or mesh.fsdp instead, or name a dim "mlp", "heads" or "vocab"',
                )
            ]
        )
    return definition


def own_loss(loss_fn: OwnLoss, mesh: Mesh, precision: PrecisionConfig) -> LossFn:
    """A user's loss as the step's: the module sees its parameters in ``precision.compute``.

    Gradients come back complete and sharded like the parameters, so the step has no reduction to defer.
    """
    compute, reduce = jnp.dtype(precision.compute), jnp.dtype(precision.reduce)

    def cast(state: nnx.State) -> nnx.State:
        return jax.tree.map(lambda p: p.astype(compute) if jnp.issubdtype(p.dtype, jnp.floating) else p, state)

    def called(graph: nnx.GraphDef, state: nnx.State, batch: Mapping) -> tuple[jax.Array, jax.Array]:
        total, weight = loss_fn(nnx.merge(graph, state), batch)
        return jnp.asarray(total, jnp.float32).reshape(()), jnp.asarray(weight, jnp.float32).reshape(())

    def loss(model: nnx.Module, batch: Mapping) -> tuple[jax.Array, jax.Array, dict]:
        graph, state = nnx.split(model)
        if mesh.shape["tensor"] > 1:
            whole = jax.sharding.auto_axes(
                lambda state, batch: called(graph, cast(state), batch), axes=mesh.axis_names, out_sharding=P()
            )
            total, weight = whole(state, dict(batch))
        else:
            total, weight = _on_own_rows(lambda state, batch: called(graph, state, batch), cast, reduce, state, batch)
        return total, weight, {"cross_entropy": total}

    return loss


def _on_own_rows(
    function: Callable, cast: Callable, reduce: jnp.dtype, state: nnx.State, batch: Mapping
) -> tuple[jax.Array, jax.Array]:
    """Loss and weight, summed over devices that each have whole weights and their own rows.

    The gradient is formed where the loss is, on plain local arrays: code that knows nothing of how values vary over
    devices (a scan that starts from zeros) would not pass JAX's checks if autodiff went through the collectives.
    """
    specs = jax.tree.map(spec_of, state)
    rows = jax.tree.map(spec_of, dict(batch))
    axes = used_axes(jax.sharding.get_abstract_mesh(), BATCH_AXES)

    def gather(shard: jax.Array, spec: P) -> jax.Array:
        for dim, entry in enumerate(spec):
            if axes_of(entry):
                shard = lax.all_gather(shard, axes_of(entry), axis=dim, tiled=True)
        return shard

    def scatter(grad: jax.Array, shard: jax.Array, spec: P) -> jax.Array:
        dtype, grad, left = shard.dtype, grad.astype(reduce), set(axes)
        for dim, entry in enumerate(spec):
            if axes_of(entry):
                grad = lax.psum_scatter(grad, axes_of(entry), scatter_dimension=dim, tiled=True)
                left -= set(axes_of(entry))
        return (lax.psum(grad, tuple(left)) if left else grad).astype(dtype)

    def island(body: Callable, out_specs: object) -> Callable:
        return jax.shard_map(body, in_specs=(specs, rows), out_specs=out_specs, check_vma=False)

    def summed(state: nnx.State, batch: Mapping) -> tuple[jax.Array, jax.Array]:
        return lax.psum(function(jax.tree.map(gather, cast(state), specs), batch), axes)

    def with_gradient(state: nnx.State, batch: Mapping) -> tuple[tuple, nnx.State]:
        whole = jax.tree.map(gather, cast(state), specs)
        (total, weight), grads = jax.value_and_grad(function, has_aux=True)(whole, batch)
        return lax.psum((total, weight), axes), jax.tree.map(scatter, grads, state, specs)

    @jax.custom_vjp
    def value(state: nnx.State, batch: Mapping) -> tuple[jax.Array, jax.Array]:
        return island(summed, (P(), P()))(state, batch)

    def forward(state: nnx.State, batch: Mapping) -> tuple[tuple, nnx.State]:
        return island(with_gradient, ((P(), P()), specs))(state, batch)

    def backward(grads: nnx.State, cotangents: tuple) -> tuple[nnx.State, None]:
        return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), grads), None

    value.defvjp(forward, backward)
    return value(state, dict(batch))
