"""Runs a pipeline schedule: one loop over ticks, the same program on every stage, gradients by hand. Knows no model.

The caller gives three functions, each of which sees one microbatch:

- ``embed(ends, side) -> x`` makes the input of the first virtual stage;
- ``stage(weights, x, side) -> (y, aux, sums)`` runs one chunk of layers; ``aux`` is a scalar that is added to the loss,
  ``sums`` are other arrays to add up over microbatches, such as the load of its experts;
- ``loss(ends, y, side) -> (value, sums)`` is head and loss on the output of the last virtual stage; ``sums`` are other
  scalars to add up over microbatches, such as the number of tokens.

``side`` is what goes along with the microbatch: tokens, segment ids, dropout keys. All three run manually over
``pipeline`` and on every stage at the same time, with every other mesh axis as it is outside. So ``embed`` and ``loss``
may shard the vocabulary over ``pipeline`` (their part of ``ends`` is then the stage's own shard) and add up over it;
``stage`` must not communicate over ``pipeline``, because each stage is elsewhere in the model.

Every predicate is the same on all stages: a lane runs everywhere if one stage needs it, and the others throw its result
away. In lock step that costs no time, and a collective inside a lane is reached by all devices or by none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import current_mesh, spec_of, sum_over, unreduced, vary_over
from jaxpar.schedule import Schedule
from jaxpar.sharding import PIPELINE_AXIS
from jaxpar.trained import Trained, gradient_specs, manual_part, zero_gradient

Embed = Callable[[object, object], jax.Array]
Stage = Callable[[object, jax.Array, object], tuple[jax.Array, jax.Array, object]]
Loss = Callable[[object, jax.Array, object], tuple[jax.Array, object]]


class Result(NamedTuple):
    """Of one pass over all microbatches: sums, not means."""

    loss: jax.Array
    """Sum of ``loss`` over microbatches, float32 scalar."""
    aux: jax.Array
    """Sum of ``aux`` over microbatches and virtual stages, float32 scalar. Not part of ``loss``."""
    sums: object
    """Sums of the other scalars that ``loss`` returns."""
    stage_sums: object
    """Sums of the arrays that ``stage`` returns besides ``aux``: leaves [chunks, stages, ...]."""
    weight_grads: object
    """Gradient of loss + aux for ``weights``: same tree and shapes, None for leaves that have none."""
    end_grads: object
    """The same for ``ends``."""


def value_and_grad(
    schedule: Schedule,
    *,
    embed: Embed,
    stage: Stage,
    loss: Loss,
    replica_axes: tuple[str, ...] = (),
    sum_dtype: jnp.dtype | None = None,
) -> Callable[[object, object, object], Result]:
    """A function ``(weights, ends, sides) -> Result`` that runs all microbatches through the pipeline.

    Its arguments, inside ``jax.set_mesh`` of a mesh whose ``pipeline`` axis has ``schedule.num_stages`` devices:

    - ``weights``: leaves [chunks, stages, ...], sharded over ``pipeline`` on dim 1. ``stage`` gets [...]. Leaves that
      are not floating point (masks of padded layers, layer numbers) are handed to it and get no gradient;
    - ``ends``: everything else that is trained. Leaves sharded over ``pipeline`` arrive as the stage's own shard;
    - ``sides``: leaves [microbatches, ...], not sharded over ``pipeline``.

    A ``HeldWeight`` among weights or ends is trained through its shard.

    With ``replica_axes``, mesh axes that split the rows of ``sides`` (``data``; ``fsdp`` if weights are whole), the
    three functions see the rows of one replica, and do not communicate over these axes unless they reduce-scatter the
    gradient of a held weight. Every other weight is ``reduced`` over them (``collectives.defer_reduction``), and its
    gradient comes back ``unreduced``: a partial sum of each replica over all microbatches. (Inside, these axes are
    manual: JAX 0.12 has no dynamic slice of arrays that are ``reduced`` or ``unreduced`` over one axis at an index that
    varies over another.)

    Gradients are added up in ``sum_dtype``, by default the type of each leaf.

    The backward pass of a stage runs its forward pass again from the chunk's input. What ``stage`` itself
    rematerialises is computed a third time.

    Raises:
        ValueError: The mesh has another number of stages, a function returns something else than it should, or a
            weight is neither sharded nor ``reduced`` over a replica axis.
    """

    def body(*arguments: object) -> Result:
        return _Pipeline(schedule, embed, stage, loss, replica_axes, *arguments).run(sum_dtype)

    def out_specs(weights: object, ends: object) -> Result:
        by_stage = P(None, PIPELINE_AXIS)
        return Result(P(), P(), P(), by_stage, *(gradient_specs(tree, replica_axes) for tree in (weights, ends)))

    return _on_stages(schedule, body, replica_axes, out_specs)


def forward(
    schedule: Schedule, *, embed: Embed, stage: Stage, loss: Loss, replica_axes: tuple[str, ...] = ()
) -> Callable[[object, object, object], tuple[jax.Array, object]]:
    """A function ``(weights, ends, sides) -> (loss, sums)``: the forward half of ``value_and_grad``, for validation.

    It runs the forward lane of the same table, so it needs no more memory than training, and stops after its last tick.
    """

    def body(*arguments: object) -> tuple[jax.Array, object]:
        return _Pipeline(schedule, embed, stage, loss, replica_axes, *arguments).run_forward()

    return _on_stages(schedule, body, replica_axes, lambda *_: (P(), P()))


def _on_stages(
    schedule: Schedule, body: Callable, replica_axes: tuple[str, ...], out_specs: Callable[[object, object], object]
) -> Callable:
    """``body(weights, ends, sides)`` as each stage runs it; ``out_specs(weights, ends)`` are those of its result."""

    def run(weights: object, ends: object, sides: object) -> object:
        num_stages = current_mesh().shape[PIPELINE_AXIS]
        if num_stages != schedule.num_stages:
            raise ValueError(
                f"the schedule has {schedule.num_stages} stages, but mesh axis {PIPELINE_AXIS} has {num_stages}"
            )
        axes = (PIPELINE_AXIS, *replica_axes)
        return jax.shard_map(
            body,
            in_specs=jax.tree.map(lambda leaf: manual_part(leaf, axes), (weights, ends, sides)),
            out_specs=out_specs(weights, ends),
            axis_names=set(axes),
        )(weights, ends, sides)

    return run


class _Carry(NamedTuple):
    """What a tick leaves to the next."""

    from_before: jax.Array
    """Output of the previous stage, as the ring brought it."""
    from_behind: jax.Array
    """Gradient that the next stage sent."""
    activations: jax.Array
    """[slots, ...]"""
    gradients: jax.Array
    """[slots, ...]"""
    weight_grads: list[jax.Array]
    end_grads: list[jax.Array]
    loss: jax.Array
    aux: jax.Array
    sums: object
    stage_sums: object


class _Pipeline:
    """One stage's view, inside the region that is manual over ``pipeline``."""

    def __init__(
        self,
        schedule: Schedule,
        embed: Embed,
        stage: Stage,
        loss: Loss,
        replica_axes: tuple[str, ...],
        weights: object,
        ends: object,
        sides: object,
    ):
        self.schedule, self.sides, self.replica_axes = schedule, sides, replica_axes
        trees = (weights, ends)
        self._reduced = [[jax.typeof(leaf).mat.reduced for leaf in Trained.of(tree).leaves] for tree in trees]
        # Each replica's own copy: autodiff would otherwise add gradients up over replicas in every microbatch.
        self.ends = Trained.of(jax.tree.map(self._own, ends))
        self.index = lax.axis_index(PIPELINE_AXIS)
        self._stage = stage
        self._embed = lambda leaves, side: embed(self.ends.tree(leaves), side)
        self._loss = lambda leaves, y, side: loss(self.ends.tree(leaves), y, side)
        # [chunks, 1, ...]: the second dim is the stage, and this is one stage.
        self.weights = Trained.of(jax.tree.map(lambda leaf: self._own(leaf)[:, 0], weights))
        shape = jax.eval_shape(self._embed, self.ends.leaves, self._side(0))
        self.blank = _vary(jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding.spec))
        _, sums = jax.eval_shape(self._loss, self.ends.leaves, shape, self._side(0))
        self.no_sums = jax.tree.map(lambda total: self._own(jnp.zeros(total.shape, total.dtype)), sums)

    def run(self, sum_dtype: jnp.dtype | None) -> Result:
        """All ticks."""
        mine = {name: self._own_column(table) for name, table in self.schedule.stage_tables().items()}
        shared = {name: jnp.asarray(table) for name, table in self.schedule.tick_tables().items()}
        start = _Carry(
            from_before=self.blank,
            from_behind=self.blank,
            activations=self._buffer(self.schedule.num_activation_slots),
            gradients=self._buffer(self.schedule.num_gradient_slots),
            weight_grads=[zero_gradient(leaf, sum_dtype) for leaf in self.weights.leaves],
            end_grads=[zero_gradient(leaf, sum_dtype) for leaf in self.ends.leaves],
            loss=self._own(jnp.float32(0)),
            aux=_vary(jnp.float32(0)),
            sums=self.no_sums,
            stage_sums=self._no_stage_sums(),
        )
        end, _ = lax.scan(lambda carry, now: (self._tick(carry, *now), None), start, (mine, shared))
        stage_sums = jax.tree.map(lambda total: total[:, None], end.stage_sums)
        totals = (end.loss, lax.psum(end.aux, PIPELINE_AXIS), end.sums, stage_sums)
        gradients = ([grad[:, None] for grad in end.weight_grads], end.end_grads)
        return Result(
            *jax.tree.map(lambda total: sum_over(total, self.replica_axes), totals),
            *(
                tree.tree(list(map(unreduced, grads, reduced)), keep_others=False)
                for tree, grads, reduced in zip((self.weights, self.ends), gradients, self._reduced, strict=True)
            ),
        )

    def run_forward(self) -> tuple[jax.Array, object]:
        """The ticks up to the last one that has a forward lane, without their backward lanes."""
        ticks = int(np.flatnonzero(self.schedule.forward_runs)[-1]) + 1
        mine = {name: self._own_column(table[:ticks]) for name, table in self.schedule.stage_tables().items()}
        shared = {name: jnp.asarray(table[:ticks]) for name, table in self.schedule.tick_tables().items()}

        def tick(carry: tuple, now: tuple) -> tuple[tuple, None]:
            from_before, activations, total, sums = carry
            mine, shared = now
            activations, y = self._advance(activations, from_before, mine, shared)

            def loss() -> tuple[jax.Array, object]:
                value, parts = self._loss(self.ends.leaves, self._last_stage(y), self._side(shared["loss_microbatch"]))
                return total + self._own(value.astype(jnp.float32)), self._add(sums, parts)

            microbatch = _after(shared["loss_microbatch"], y)
            total, sums = lax.cond(microbatch >= 0, loss, lambda: (total, sums))
            return (self._send(_after(y, total), +1), activations, total, sums), None

        activations = self._buffer(self.schedule.num_activation_slots)
        start = (self.blank, activations, self._own(jnp.float32(0)), self.no_sums)
        (_, _, total, sums), _ = lax.scan(tick, start, (mine, shared))
        return lax.psum((total, sums), self.replica_axes) if self.replica_axes else (total, sums)

    def _tick(self, carry: _Carry, mine: dict[str, jax.Array], shared: dict[str, jax.Array]) -> _Carry:
        """The five phases of jaxpar.schedule.table, each after the one before it."""
        activations, y = self._advance(carry.activations, carry.from_before, mine, shared)
        gradients = _put(carry.gradients, carry.from_behind, mine["gradient_arrival"])

        carry, dy = self._loss_lane(_after(shared["loss_microbatch"], y), carry, y)
        gradients = self._put_loss_gradient(gradients, dy, shared["loss_slot"])

        embedded = self._embed_lane(_after(shared["embed_grad_microbatch"], dy))
        carry, dx = self._backward_lane(
            _after(shared["backward_runs"], embedded), carry, mine, shared, embedded, activations, gradients
        )
        carry = self._embed_grad_lane(_after(shared["embed_grad_microbatch"], dx), carry, dx)

        # Outside of the lanes: every stage sends in every tick. On the CPU one transfer after the other.
        from_before = self._send(_after(y, (dx, carry.end_grads)), +1)
        from_behind = self._send(_after(dx, from_before), -1)
        return carry._replace(
            from_before=from_before, from_behind=from_behind, activations=activations, gradients=gradients
        )

    def _advance(
        self, activations: jax.Array, arrival: jax.Array, mine: dict[str, jax.Array], shared: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The slots with what has arrived, and the output of this tick's forward lane."""
        activations = _put(activations, arrival, mine["activation_arrival"])
        embedded = self._embed_lane(shared["embed_microbatch"])
        y = self._forward_lane(_after(shared["forward_runs"], embedded), mine, shared, embedded, activations)
        return activations, y

    def _embed_lane(self, microbatch: jax.Array) -> jax.Array:
        """Input of virtual stage 0; blank if no microbatch enters."""
        return lax.cond(
            microbatch >= 0, lambda: _vary(self._embed(self.ends.leaves, self._side(microbatch))), lambda: self.blank
        )

    def _forward_lane(
        self,
        runs: jax.Array,
        mine: dict[str, jax.Array],
        shared: dict[str, jax.Array],
        embedded: jax.Array,
        activations: jax.Array,
    ) -> jax.Array:
        def forward() -> jax.Array:
            x = self._input(shared["embed_microbatch"], embedded, activations, mine["forward_slot"])
            side = self._own_side(mine["forward_microbatch"])
            (y, _), _ = self._chunk(self._leaves(mine["forward_chunk"]), mine["forward_chunk"], x, side)
            return y

        return lax.cond(runs, forward, lambda: self.blank)

    def _loss_lane(self, microbatch: jax.Array, carry: _Carry, y: jax.Array) -> tuple[_Carry, jax.Array]:
        """Head and loss of the last stage's output, by all stages; the gradient of that output."""

        def loss() -> tuple[_Carry, jax.Array]:
            last = self._last_stage(y)
            side = self._side(microbatch)
            objective = partial(self._loss, side=side)
            value, pull, sums = jax.vjp(objective, self.ends.leaves, last, has_aux=True)
            if value.shape or PIPELINE_AXIS in jax.typeof(value).mat.varying:
                raise ValueError(f"loss must return a scalar that is the same on all stages, not {jax.typeof(value)}")
            end_grads, dy = pull(jnp.ones_like(value))
            return carry._replace(
                loss=carry.loss + self._own(value.astype(jnp.float32)),
                end_grads=jax.tree.map(jnp.add, carry.end_grads, end_grads),
                sums=self._add(carry.sums, sums),
            ), _vary(dy)

        return lax.cond(microbatch >= 0, loss, lambda: (carry, self.blank))

    def _put_loss_gradient(self, gradients: jax.Array, dy: jax.Array, slot: jax.Array) -> jax.Array:
        """Into a slot of the last stage, if there is a loss in this tick."""
        lands = (slot >= 0) & (self.index == self.schedule.num_stages - 1)
        return _put(gradients, jnp.where(lands, dy, _take(gradients, slot)), slot)

    def _backward_lane(
        self,
        runs: jax.Array,
        carry: _Carry,
        mine: dict[str, jax.Array],
        shared: dict[str, jax.Array],
        embedded: jax.Array,
        activations: jax.Array,
        gradients: jax.Array,
    ) -> tuple[_Carry, jax.Array]:
        """Gradients of one chunk added up, and that of its input."""

        def backward() -> tuple[_Carry, jax.Array]:
            x = self._input(shared["embed_grad_microbatch"], embedded, activations, mine["backward_slot"])
            side, chunk = self._own_side(mine["backward_microbatch"]), mine["backward_chunk"]
            (_, aux), pull, sums = jax.vjp(
                lambda leaves, x: self._chunk(leaves, chunk, x, side), self._leaves(chunk), x, has_aux=True
            )
            # A stage with nothing to do runs on what lies in its slots, and throws the result away. Pulling back zero
            # is not enough: that times infinity is not a number.
            valid = mine["backward_microbatch"] >= 0
            grads, dx = pull((_take(gradients, mine["gradient_slot"]), jnp.ones_like(aux)))

            def add(total: jax.Array, part: jax.Array) -> jax.Array:
                return _put(total, _take(total, chunk) + jnp.where(valid, part, jnp.zeros_like(part)), chunk)

            return carry._replace(
                weight_grads=list(map(add, carry.weight_grads, grads)),
                aux=carry.aux + jnp.where(valid, aux, 0),
                stage_sums=jax.tree.map(add, carry.stage_sums, sums),
            ), dx

        return lax.cond(runs, backward, lambda: (carry, self.blank))

    def _embed_grad_lane(self, microbatch: jax.Array, carry: _Carry, dx: jax.Array) -> _Carry:
        """Gradient of the embedding, by all stages, from that of virtual stage 0's input."""

        def embed_grad() -> _Carry:
            first = self._of_stage(0, dx)
            side = self._side(microbatch)
            _, pull = jax.vjp(partial(self._embed, side=side), self.ends.leaves)
            return carry._replace(end_grads=jax.tree.map(jnp.add, carry.end_grads, *pull(first)))

        return lax.cond(microbatch >= 0, embed_grad, lambda: carry)

    def _chunk(
        self, leaves: list[jax.Array], chunk: jax.Array, x: jax.Array, side: object
    ) -> tuple[tuple[jax.Array, jax.Array], object]:
        """(y, aux), sums of one chunk of layers; ``leaves`` are its floating-point weights."""
        others = [_take(leaf, chunk) for leaf in self.weights.others]
        y, aux, sums = self._stage(dataclasses.replace(self.weights, others=others).tree(leaves), x, side)
        if jax.typeof(y) != jax.typeof(self.blank):
            raise ValueError(f"stage must return what embed does, {jax.typeof(self.blank)}, not {jax.typeof(y)}")
        return (y, _vary(jnp.asarray(aux, jnp.float32))), jax.tree.map(_vary, sums)

    def _no_stage_sums(self) -> object:
        """Zeros for the sums of every chunk."""
        chunk = (self._leaves(0), jnp.int32(0), self.blank, self._own_side(0))
        _, sums = jax.eval_shape(self._chunk, *chunk)

        def zeros(part: jax.ShapeDtypeStruct) -> jax.Array:
            spec = P(None, *part.sharding.spec.partitions)
            return _vary(jnp.zeros((self.schedule.num_chunks, *part.shape), part.dtype, out_sharding=spec))

        return jax.tree.map(zeros, sums)

    def _leaves(self, chunk: jax.Array | int) -> list[jax.Array]:
        return [_take(leaf, chunk) for leaf in self.weights.leaves]

    def _input(self, embed_microbatch: jax.Array, embedded: jax.Array, slots: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.where((self.index == 0) & (embed_microbatch >= 0), embedded, _take(slots, slot))

    def _side(self, microbatch: jax.Array | int) -> object:
        """Side inputs of a microbatch that is the same on all stages."""
        return jax.tree.map(lambda leaf: _take(leaf, microbatch), self.sides)

    def _last_stage(self, y: jax.Array) -> jax.Array:
        """What the last stage has of ``y``, on all stages."""
        return self._of_stage(self.schedule.num_stages - 1, y)

    def _of_stage(self, stage: int, value: jax.Array) -> jax.Array:
        """What one stage has, on all stages."""
        return sum_over(jnp.where(self.index == stage, value, 0), (PIPELINE_AXIS,))

    def _add(self, sums: object, parts: object) -> object:
        return jax.tree.map(lambda total, part: total + self._own(part), sums, parts)

    def _own_side(self, microbatch: jax.Array | int) -> object:
        return jax.tree.map(lambda leaf: _take(_vary(leaf), microbatch), self.sides)

    def _own(self, value: jax.Array) -> jax.Array:
        """Declare a value to be each replica's own."""
        return vary_over(value, self.replica_axes)

    def _own_column(self, table: object) -> jax.Array:
        return lax.dynamic_index_in_dim(jnp.asarray(table), self.index, 1, keepdims=False)

    def _buffer(self, num_slots: int) -> jax.Array:
        spec = spec_of(self.blank)
        shape = (num_slots, *self.blank.shape)
        return _vary(jnp.zeros(shape, self.blank.dtype, out_sharding=P(None, *spec.partitions)))

    def _send(self, x: jax.Array, step: int) -> jax.Array:
        count = self.schedule.num_stages
        return lax.ppermute(x, PIPELINE_AXIS, [(stage, (stage + step) % count) for stage in range(count)])


def _vary(x: jax.Array) -> jax.Array:
    """Declare a value to be each stage's (and replica's) own."""
    mesh = current_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return vary_over(x, tuple(axis for axis, kind in types if kind == AxisType.Manual))


def _take(array: jax.Array, index: jax.Array | int) -> jax.Array:
    """``array[index]``; of anything if the index is -1."""
    if array.shape[0] == 1:
        return array[0]
    return lax.dynamic_index_in_dim(array, jnp.maximum(index, 0), 0, keepdims=False)


def _put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """``array`` with ``value`` at ``index``, or at 0 if the index is -1."""
    if array.shape[0] == 1:
        return value[None]
    return lax.dynamic_update_index_in_dim(array, value, jnp.maximum(index, 0), 0)


def _after(value: jax.Array, earlier: object) -> jax.Array:
    """``value``, on the CPU not before ``earlier`` is there.

    XLA:CPU runs what is ready in any order, so that two devices could each wait in a collective that the other has yet
    to reach. GPUs run one program order, where this would only keep transfers from overlapping with work.
    """
    if current_mesh().abstract_device.platform != "cpu":
        return value
    return lax.optimization_barrier((value, earlier))[0]
