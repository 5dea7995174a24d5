"""The islands: fully manual ``shard_map`` regions where we choose the collective instead of the compiler.

Types carry the bookkeeping. In Explicit mode an array may be ``reduced`` over an axis: every device holds the same
value, and its cotangent is ``unreduced``, a partial sum per device that nobody has added up yet. So the place where a
gradient is reduced is the place where a type changes, and it is one of these functions:

- ``defer_reduction`` marks parameters before the backward pass, so that gradients come back as partial sums over the
  axes that do not shard them (``data``; every axis for norm scales) and can be accumulated over microbatches;
- ``gather_weight`` gathers one block's weight; its transpose reduce-scatters the gradient to 1/N. ``gather_shards`` and
  ``scatter_gradient`` are its two halves, for strategies that gather once per step (``jaxpar.strategy``);
- ``finish_reduction`` adds up what is left, once per step and only on the 1/N shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, reshard
from jax.sharding import PartitionSpec as P

from jaxpar.sharding import (
    GATHER_AXES,
    PIPELINE_AXIS,
    SEQUENCE_AXIS,
    TOKEN_AXES,
    axes_of,
    batch_entry,
    context_entry,
    sequence_entry,
)

REDUCTION_AXES = (*TOKEN_AXES, SEQUENCE_AXIS)
"""Axes over which devices see different tokens, so that gradients must be summed over them."""


def current_mesh() -> AbstractMesh:
    """The mesh of the ``jax.set_mesh`` context; sizes are static while tracing."""
    return jax.sharding.get_abstract_mesh()


def spec_of(x: jax.Array) -> P:
    """PartitionSpec in the type of ``x``, with its reduced and unreduced axes."""
    return jax.typeof(x).sharding.spec


def stage_axes(x: jax.Array) -> tuple[str, ...]:
    """The pipeline axis, inside one, for what each stage has its own shard of, such as the vocabulary; else ()."""
    return tuple(axis for axis in (PIPELINE_AXIS,) if axis in jax.typeof(x).mat.varying)


def island(body: Callable, in_specs: object, out_specs: object, *, check_vma: bool = True) -> Callable:
    """``body`` on local shards, manual over every mesh axis.

    Inside a region that is manual already (a pipeline) the backward pass is an island of its own, which runs the body
    again from its inputs: JAX 0.12 gives what a nested island saves a wrong shape, because the spec of such a value
    names the axes that are manual around it too ("Cannot lower jaxpr with verifier errors"). So no remat policy sees
    names inside such an island: what is to be kept is named outside of it.

    Args:
        body: function of local arrays.
        in_specs: pytree of PartitionSpecs.
        out_specs: likewise.
        check_vma: False for a body that does not say over which axes its values vary (Pallas kernels); then every used
            axis must shard every differentiated input, since its gradient is not summed over the others.
    """
    if AxisType.Manual not in current_mesh().axis_types:
        return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return _replayed(body, in_specs, out_specs, check_vma)


def _replayed(body: Callable, in_specs: object, out_specs: object, check_vma: bool) -> Callable:
    """An island that keeps nothing but its arguments for the backward pass."""

    def opaque(local: Callable, in_specs: object, out_specs: object) -> Callable:
        # What is in a checkpoint is not taken apart into what depends on an argument and what does not.
        if check_vma:
            return jax.shard_map(jax.checkpoint(local), in_specs=in_specs, out_specs=out_specs)

        def forgetful(*args: object) -> object:
            return local(*jax.tree.map(_forget_varying, args))

        inner = jax.shard_map(jax.checkpoint(forgetful), in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def run(*args: object) -> object:
            # The results differ between the stages as the arguments do, and must say so.
            around = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(args)))
            return jax.tree.map(lambda x: vary_over(x, around), inner(*args))

        return run

    def backward(args: tuple, cotangents: object) -> tuple:
        leaves, structure = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        is_trained = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def local(leaves: list[jax.Array], cotangents: object) -> list[jax.Array]:
            def of_trained(trained: list[jax.Array]) -> object:
                values = iter(trained)
                mixed = [next(values) if is_t else leaf for leaf, is_t in zip(leaves, is_trained, strict=True)]
                return body(*structure.unflatten(mixed))

            _, pull = jax.vjp(of_trained, [leaf for leaf, is_t in zip(leaves, is_trained, strict=True) if is_t])
            return pull(cotangents)[0]

        found = opaque(
            local,
            (specs, jax.tree.map(P.to_ct_spec, out_specs)),
            [spec.to_ct_spec() for spec, is_t in zip(specs, is_trained, strict=True) if is_t],
        )(leaves, cotangents)
        gradients = iter(found)
        return structure.unflatten([next(gradients) if is_t else None for is_t in is_trained])

    replayed = jax.custom_vjp(opaque(body, in_specs, out_specs))
    # Its own forward pass: a remat policy takes an island apart, saving what is inside, but no custom_vjp.
    replayed.defvjp(lambda *args: (replayed(*args), args), backward)
    return replayed


def _forget_varying(x: jax.Array) -> jax.Array:
    """Inside an island without ``check_vma``: the value as one that varies over no axis.

    An argument still says that it varies over the axes that are manual around the island, but the result of an
    operation says nothing, and a kernel's gradient rule is refused when the two differ (JAX 0.12, tokamax 0.0.17).
    """
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``lax.psum`` over axes that are manual here, of an array whose other dims may be sharded over others.

    In an island of its own: XLA:CPU aborts on a sum of bfloat16 in a region that is manual over some axes only
    ("Invalid binary instruction opcode copy", jaxlib 0.12.0.1).
    """
    return island(lambda x: lax.psum(x, axes), spec_of(x), spec_of(x))(x) if axes else x


def varying(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """Inside an island: use a value that is the same, or ``reduced``, over ``axes`` together with some that differ."""
    # In one order: every process must trace the same program, and sets of names have another order in each.
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def vary_over(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """``varying`` over those of ``axes`` over which ``x`` does not vary yet, ``reduced`` or not."""
    now = jax.typeof(x).mat
    missing = frozenset(axes) - now.varying
    return varying(varying(x, missing & now.reduced), missing - now.reduced)


def zeros_varying(shape: tuple[int, ...], dtype: jnp.dtype, axes: Collection[str]) -> jax.Array:
    """Zeros that vary over ``axes``: what a value varies over is part of its type, and a loop starts from that type."""
    return varying(jnp.zeros(shape, dtype), axes)


def unreduced(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Inside an island: declare local values to be partial sums over ``axes``."""
    return lax.pcast(x, tuple(sorted(axes)), to="unreduced") if axes else x


def defer_reduction(params: object, axes: tuple[str, ...] = REDUCTION_AXES) -> object:
    """Mark parameters so that their gradients stay partial sums over those of ``axes`` that do not shard them."""
    mesh = current_mesh()

    def mark(param: jax.Array) -> jax.Array:
        spec = spec_of(param)
        own = {axis for entry in spec.partitions for axis in axes_of(entry)}
        deferred = {axis for axis in axes if mesh.shape[axis] > 1 and axis not in own}
        return reshard(param, P(*spec.partitions, reduced=deferred)) if deferred else param

    return jax.tree.map(mark, params)


def finish_reduction(grads: object, dtype: jnp.dtype | None = None) -> object:
    """Add up partial sums: one all-reduce per leaf over the axes that do not shard it. Afterwards types are plain.

    Args:
        grads: Gradients, ``unreduced`` over those axes.
        dtype: What travels; results have the dtypes of ``grads`` again. None: these.
    """

    def reduce(grad: jax.Array) -> jax.Array:
        spec = spec_of(grad)
        if not spec.unreduced:
            return grad
        return reshard(grad.astype(dtype or grad.dtype), P(*spec.partitions)).astype(grad.dtype)

    return jax.tree.map(reduce, grads)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeldWeight:
    """A weight that was gathered ahead of its use, and the shard that its gradient is reduce-scattered to."""

    shard: jax.Array
    """As at rest; differentiated, never read."""
    whole: jax.Array
    """Result of ``gather_shards``; read, never differentiated."""
    dim: int = dataclasses.field(metadata={"static": True})
    """The dim that was gathered, counted from the end (-1 is the last): loops take dims away in front."""
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Mesh axes that split it at rest."""

    def __getitem__(self, index: object) -> HeldWeight:
        """NNX reads a variable as ``value[...]``."""
        assert index is Ellipsis, "a held weight is opened before it is indexed"
        return self


def sharded_dim(spec: P) -> int | None:
    """The dim of a dense weight that the gather axes shard, if there is one."""
    found = [dim for dim, entry in enumerate(spec.partitions) if set(axes_of(entry)) & set(GATHER_AXES)]
    assert len(found) <= 1, f"the gather axes shard dims {found} of {spec}"
    return found[0] if found else None


def gather_shards(weight: jax.Array, dim: int, compute: jnp.dtype) -> jax.Array:
    """The weight whole in one dim and ``reduced`` over the axes that shard it, cast before it travels.

    Args:
        weight: may be ``reduced`` over other axes.
        dim: the dim to make whole.
        compute: dtype of the result.
    """
    spec = spec_of(weight)
    axes = axes_of(spec.partitions[dim])
    gather = island(
        lambda w: lax.all_gather(w.astype(compute), axes, axis=dim, tiled=True, to="reduced"),
        in_specs=spec,
        out_specs=P(*_without(spec, dim), reduced={*spec.reduced, *axes}),
    )
    return gather(weight)


def scatter_gradient(grad: jax.Array, spec: P, dim: int, axes: tuple[str, ...], reduce: jnp.dtype) -> jax.Array:
    """Partial sums of a whole weight's gradient -> the shard of their sum, reduce-scattered over the axes of a dim.

    Args:
        grad: whole in ``dim``, ``unreduced`` over ``axes`` and ``spec.reduced``; or in a region that is manual over
            ``axes`` (of which ``spec`` then says nothing), each device's own.
        spec: of the shard.
        dim: the dim that is whole.
        axes: mesh axes that split it at rest.
        reduce: dtype that travels, and of the result.
    """
    scatter = island(
        lambda g: lax.psum_scatter(g.astype(reduce), axes, scatter_dimension=dim, tiled=True),
        in_specs=P(*_without(spec, dim), unreduced={*spec.reduced, *axes_of(spec.partitions[dim])}),
        out_specs=P(*spec.partitions, unreduced=spec.reduced),
    )
    return scatter(grad)


def _without(spec: P, dim: int) -> list:
    """Entries of a spec with one dim whole."""
    return [None if d == dim else entry for d, entry in enumerate(spec.partitions)]


def opened(weight: jax.Array | HeldWeight, reduce: jnp.dtype) -> jax.Array:
    """A weight as it is to be used: one that is held is whole, and its gradient is reduce-scattered to its shard."""
    if not isinstance(weight, HeldWeight):
        return weight
    spec, dtype, dim = spec_of(weight.shard), weight.shard.dtype, weight.shard.ndim + weight.dim

    def scatter(_: None, grad: jax.Array) -> tuple[jax.Array, None]:
        return scatter_gradient(grad, spec, dim, weight.axes, reduce).astype(dtype), None

    @jax.custom_vjp
    def use(_shard: jax.Array, whole: jax.Array) -> jax.Array:
        return whole

    use.defvjp(lambda _, whole: (whole, None), scatter)
    return use(weight.shard, weight.whole)


def gather_weight(weight: jax.Array | HeldWeight, compute: jnp.dtype, reduce: jnp.dtype) -> jax.Array:
    """One block's weight, whole over the gather axes, in the compute dtype.

    The cast happens before the gather, so ``compute`` is what travels; the gradient is reduce-scattered in ``reduce``
    and handed back in the weight's own dtype. Sharding over ``tensor`` stays as it is.

    Args:
        weight: sharded over ``GATHER_AXES`` on at most one dim; may be ``reduced`` over other axes; or held.
        compute: dtype of the result.
        reduce: dtype of the gradient's reduce-scatter.
    """
    weight = opened(weight, reduce)
    spec, dtype = spec_of(weight), weight.dtype
    dim = sharded_dim(spec)
    if dim is None:
        return weight.astype(compute)

    # Plain autodiff would reduce-scatter in the compute dtype, because the cast is inside the island.
    @jax.custom_vjp
    def gathered(w: jax.Array) -> jax.Array:
        return gather_shards(w, dim, compute)

    def scatter(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (scatter_gradient(grad, spec, dim, axes_of(spec.partitions[dim]), reduce).astype(dtype),)

    gathered.defvjp(lambda w: (gathered(w), None), scatter)
    return gathered(weight)


def enter_block(x: jax.Array) -> jax.Array:
    """Sequence shards -> the context member's part on each tensor device, before column-parallel products.

    Args:
        x: [B, S, D], S sharded over ``context`` and ``tensor``.
    """
    mesh = current_mesh()
    if mesh.shape[SEQUENCE_AXIS] == 1:
        return x
    whole = P(batch_entry(mesh), context_entry(mesh), None, reduced={SEQUENCE_AXIS})
    gather = island(lambda x: lax.all_gather(x, SEQUENCE_AXIS, axis=1, tiled=True, to="reduced"), spec_of(x), whole)
    return gather(x)


def row_parallel(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Product that contracts a dim sharded over ``tensor``, reduce-scattered to sequence shards.

    Args:
        equation: einsum with result [B, S, D].
        x: activations, sequence as inside blocks, contracted dims sharded over ``tensor``.
        weight: gathered weight.
    """
    mesh = current_mesh()
    batch, context = batch_entry(mesh), context_entry(mesh)
    if mesh.shape[SEQUENCE_AXIS] == 1:
        return jnp.einsum(equation, x, weight, out_sharding=P(batch, context, None))
    partial = P(batch, context, None, unreduced={SEQUENCE_AXIS})
    scatter = island(
        lambda y: lax.psum_scatter(y, SEQUENCE_AXIS, scatter_dimension=1, tiled=True),
        partial,
        P(batch, sequence_entry(mesh), None),
    )
    return scatter(jnp.einsum(equation, x, weight, out_sharding=partial))
