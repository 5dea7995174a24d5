"""One table from logical axes to mesh axes, the specs it gives, and a report of what stays replicated.

A parameter carries logical axes, one per dim, e.g. ``("layers", "embed", "heads", "head_dim")``. ``RULES`` says which
mesh axes shard each of them. Mesh axes of size 1 never appear in a spec.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import used_axes

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the rows of a batch."""
GATHER_AXES = ("fsdp", "expert", "context")
"""Mesh axes that shard dense weights at rest; a block gathers its weights over them just before use."""
PIPELINE_AXIS = "pipeline"
"""Mesh axis whose members are the stages of a pipeline; manual while they run (``jaxpar.pipeline``)."""
EXPERT_AXIS = "expert"
"""Mesh axis that holds the experts apart, and over which tokens are exchanged (``jaxpar.model.dispatch``)."""
CONTEXT_AXIS = "context"
"""Mesh axis that splits the sequence everywhere, in zig-zag order (see ``jaxpar.model.zigzag``)."""
GATHERED_DIMS = ("embed", "expert_embed")
"""Logical axes of the dims that are whole when a weight is used, unlike ``experts``, whatever mesh axes shard them."""
SEQUENCE_AXIS = "tensor"
"""Mesh axis that between blocks splits what is left of the sequence (sequence parallel)."""
TOKEN_AXES = (*BATCH_AXES, CONTEXT_AXIS)
"""Mesh axes that split the tokens of a batch inside blocks: rows and sequence."""

RULES: Mapping[str, tuple[str, ...]] = {
    "layers": ("pipeline",),
    "vocab": ("pipeline", "tensor"),
    "embed": GATHER_AXES,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_embed": ("fsdp", "context"),
    "expert_mlp": ("tensor",),
    "shared_mlp": ("tensor",),
    "router": (),  # every device routes its own tokens to all experts
    "positions": (),
    "unsharded": (),
    "norm": (),  # vectors of width embed: too small to be worth a gather per block
}


def spec_for(path: str, logical_axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> P:
    """PartitionSpec of one array.

    Args:
        path: name of the array, for messages.
        logical_axes: one name of ``RULES`` per dim.
        shape: global shape.
        mesh: the mesh.

    Raises:
        ValueError: an unknown logical axis, one mesh axis on two dims, or a dim that its axes do not divide; names
            path, dim, size, axis, axis size and what would work.
    """
    assert len(logical_axes) == len(shape), f"{path}: {logical_axes} does not name every dim of {tuple(shape)}"
    entries: list[tuple[str, ...]] = []
    taken: dict[str, int] = {}
    for dim, (logical, size) in enumerate(zip(logical_axes, shape, strict=True)):
        if logical not in RULES:
            raise ValueError(f"{path} dim {dim}: unknown logical axis {logical!r}; known: {', '.join(RULES)}")
        axes = used_axes(mesh, RULES[logical])
        for axis in axes:
            if axis in taken:
                raise ValueError(
                    f"{path}: mesh axis {axis} ({mesh.shape[axis]}) would shard dim {taken[axis]} and dim {dim} of "
                    f"{tuple(logical_axes)}; change the logical axes so that each mesh axis is used once"
                )
            taken[axis] = dim
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            named = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{path} dim {dim} ({logical}) has size {size}, which {named} = {ways} does not divide; "
                f"use a size that is a multiple of {ways}, or a mesh whose {' x '.join(axes)} divides {size}"
            )
        entries.append(axes)
    return P(*(_entry(axes) for axes in entries))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def batch_entry(mesh: Mesh) -> str | tuple[str, ...] | None:
    """Spec entry of a dim that holds the rows of a batch; without axes that are manual here: those have split it."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return _entry(tuple(axis for axis in used_axes(mesh, BATCH_AXES) if types[axis] != AxisType.Manual))


def context_entry(mesh: Mesh) -> str | None:
    """Spec entry of the sequence dim inside blocks, and of token arrays that ``split_sequence`` has split."""
    return _entry(used_axes(mesh, (CONTEXT_AXIS,)))


def sequence_entry(mesh: Mesh) -> str | tuple[str, ...] | None:
    """Spec entry of the sequence dim between blocks."""
    return _entry(used_axes(mesh, (CONTEXT_AXIS, SEQUENCE_AXIS)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of batch arrays [microbatches, rows, sequence]: every member of a context group gets the whole row."""
    return NamedSharding(mesh, P(None, batch_entry(mesh), None))


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays [microbatches, rows, ...] with any dims per row."""
    return NamedSharding(mesh, P(None, batch_entry(mesh)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafReport:
    """How one array lies on the mesh."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    num_copies: int
    """Devices that hold the same bytes."""
    bytes_per_device: int
    total_bytes: int
    """Bytes of the array itself, counted once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingReport:
    """Every leaf's layout, and the bytes that are replicated although an axis could shard them."""

    leaves: tuple[LeafReport, ...]
    bytes_per_device: int
    unsharded_bytes: int
    """Bytes per device in leaves that no weight-sharding axis splits, although the mesh has one."""

    @property
    def unsharded_share(self) -> float:
        """``unsharded_bytes`` as a share of all bytes on a device."""
        return self.unsharded_bytes / max(1, self.bytes_per_device)


def sharding_report(abstract: object, mesh: Mesh) -> ShardingReport:
    """Report on a pytree of arrays or ShapeDtypeStructs with shardings. Nothing is computed on a device."""
    leaves, unsharded = [], 0
    shards_weights = bool(used_axes(mesh, (*GATHER_AXES, "tensor")))
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        sharding: NamedSharding = leaf.sharding
        itemsize = leaf.dtype.itemsize
        local = math.prod(sharding.shard_shape(leaf.shape)) * itemsize
        total = math.prod(leaf.shape) * itemsize
        split = [axis for entry in sharding.spec.partitions for axis in axes_of(entry)]
        leaves.append(
            LeafReport(
                path=jax.tree_util.keystr(path, simple=True, separator="."),
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                spec=f"({', '.join(str(_entry(axes_of(entry))) for entry in sharding.spec.partitions)})",
                num_copies=mesh.size // math.prod(mesh.shape[axis] for axis in split),
                bytes_per_device=local,
                total_bytes=total,
            )
        )
        if shards_weights and not split:
            unsharded += local
    return ShardingReport(
        leaves=tuple(leaves), bytes_per_device=sum(x.bytes_per_device for x in leaves), unsharded_bytes=unsharded
    )
