"""Faults of a train step that no single collective shows: storms of gathers, what nothing hides, memory, layouts."""

from __future__ import annotations

from collections.abc import Collection

import jax
from jax.sharding import Mesh

from jaxpar.audit.compiler_log import CompilerWarnings
from jaxpar.audit.lints import Finding, synchronous_collectives
from jaxpar.audit.report import ProgramReport
from jaxpar.sharding import GATHER_AXES, axes_of

GIB = 2**30


def gather_storms(
    report: ProgramReport, *, num_layers: int, matrices_per_layer: int, axes: Collection[str] = GATHER_AXES
) -> tuple[Finding, ...]:
    """Layer loops that gather more often per layer than the layer has weight matrices.

    Each gather costs a launch and a round of latency on every device; the compiler merges those of one block, so more
    of them than matrices means that parts of a matrix (heads, experts, chunks) are gathered one by one.

    Args:
        report: audit of a train step.
        num_layers: trips of the layer loops; a loop of one trip less counts too (the compiler peels one off).
        matrices_per_layer: weight matrices of one block that are gathered.
        axes: mesh axes over which weights are gathered.
    """
    per_loop: dict[str, int] = {}
    for found in report.select("all-gather"):
        names = [loop.name for loop in found.loops if loop.trips in (num_layers, num_layers - 1)]
        if names and found.axes is not None and found.axes and set(found.axes) <= set(axes):
            # The innermost one: a loop over microbatches can have as many trips as the model has layers.
            depth = [loop.name for loop in found.loops].index(names[-1])
            inner = 1
            for loop in found.loops[depth + 1 :]:
                inner *= loop.trips or 1
            per_loop[names[-1]] = per_loop.get(names[-1], 0) + inner
    return tuple(
        Finding(
            "storm of gathers",
            f"loop {name} gathers weights {count} times per layer, which has {matrices_per_layer} matrices; "
            "gather each matrix whole, once, in one island",
        )
        for name, count in per_loop.items()
        if count > matrices_per_layer
    )


def exposed_collectives(report: ProgramReport, *, min_share: float = 0.02) -> tuple[Finding, ...]:
    """Collectives that nothing hides and that move at least ``min_share`` of the bytes of a step.

    For GPU programs; the CPU compiler makes none async.
    """
    total = report.wire_bytes_per_step() or 1.0
    return tuple(
        finding
        for finding in synchronous_collectives(report, min_bytes=0)
        if finding.collective.wire_bytes * finding.collective.trips >= min_share * total
    )


def hidden_share(report: ProgramReport) -> float:
    """Share of the bytes of a step that are sent by collectives with compute between their start and end; 1 if none."""
    total = report.wire_bytes_per_step()
    hidden = sum(found.wire_bytes * found.trips for found in report.collectives if found.compute_between)
    return hidden / total if total else 1.0


def masked_products(report: ProgramReport, *, expected_flops: float, factor: float = 2.0) -> tuple[Finding, ...]:
    """Whether matrix products cost more than ``factor`` times what the model's grouped products do.

    Where no grouped kernel exists, a product of tokens with their experts' weights becomes one with every expert's
    weights, masked: as many times the work as a device has experts.
    """
    if report.matmul_flops <= factor * expected_flops:
        return ()
    ratio = report.matmul_flops / expected_flops
    message = (
        f"the program's matrix products are {report.matmul_flops:.3g} FLOPs, {ratio:.1f} times the model's "
        f"{expected_flops:.3g}: a grouped product has become a masked dense one; use a grouped matmul kernel"
    )
    return (Finding("masked dense product", message),)


def memory_above_budget(report: ProgramReport, *, budget_bytes: float) -> tuple[Finding, ...]:
    """Whether the program needs more memory than the device gives; the compiler itself does not fail then."""
    assert report.memory is not None, "memory is known only of a compiled program, not of its text"
    if report.memory.total <= budget_bytes:
        return ()
    message = (
        f"peak {report.memory.total / GIB:.1f} GiB, {(report.memory.total - budget_bytes) / GIB:.1f} GiB more than the "
        f"{budget_bytes / GIB:.1f} GiB that a device gives; see the remedies of jaxpar plan"
    )
    return (Finding("memory above budget", message),)


def rematerializations(warnings: CompilerWarnings) -> tuple[Finding, ...]:
    """Tensors that the compiler replicates whole to change their sharding."""
    found = tuple(
        Finding("involuntary rematerialization", str(rematerialization))
        for rematerialization in warnings.rematerializations
    )
    if warnings.hidden_by:
        message = f"compiler warnings are hidden by {warnings.hidden_by}; unset it to see rematerializations"
        found += (Finding("warnings not seen", message),)
    return found


def replicated_arrays(abstract: object, mesh: Mesh, *, min_share: float = 0.01) -> tuple[Finding, ...]:
    """Arrays of the state that no weight-sharding axis splits although the mesh has one, if they are large.

    Args:
        abstract: pytree of arrays or ShapeDtypeStructs with NamedShardings, e.g. ``Program.abstract_state``.
        mesh: the mesh.
        min_share: of the bytes of the whole state on a device. Norm scales stay below it.
    """
    available = {axis for axis in GATHER_AXES if mesh.shape.get(axis, 1) > 1}
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    sizes = [_local_bytes(leaf) for _, leaf in leaves]
    findings = []
    for (path, leaf), size in zip(leaves, sizes, strict=True):
        split = {axis for entry in leaf.sharding.spec.partitions for axis in axes_of(entry)}
        if available and not split & available and size >= min_share * sum(sizes):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            message = (
                f"{name} {leaf.dtype}{list(leaf.shape)}, {size / GIB:.2f} GiB on every device, is not split over "
                f"{', '.join(sorted(available))}; give one of its dims a logical axis that is"
            )
            findings.append(Finding("replicated state", message))
    return tuple(findings)


def recompiles(state: object, result: object) -> tuple[Finding, ...]:
    """Arrays of the state that a step returns in another shape, type or layout than it takes: the next step would
    compile again, or be refused.

    Args:
        state: pytree of what the step takes.
        result: pytree of what it returns in its place, with shape, dtype and sharding (``Lowered.out_info``).
    """
    before, after = (jax.tree_util.tree_leaves_with_path(tree) for tree in (state, result))
    if [path for path, _ in before] != [path for path, _ in after]:
        return (Finding("more than one compile", "the step returns a state of another structure than it takes"),)
    return tuple(
        Finding(
            "more than one compile",
            f"{jax.tree_util.keystr(path, simple=True, separator='.')} goes in as {_described(old)} and comes out as "
            f"{_described(new)}: the next step compiles again",
        )
        for (path, old), (_, new) in zip(before, after, strict=True)
        if _described(old) != _described(new) and not _same_layout(old, new)
    )


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    elements = 1
    for size in leaf.sharding.shard_shape(leaf.shape):
        elements *= size
    return elements * leaf.dtype.itemsize


def _described(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf.sharding, 'spec', leaf.sharding)}"


def _same_layout(old: jax.ShapeDtypeStruct, new: jax.ShapeDtypeStruct) -> bool:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    return new.sharding is None or old.sharding.is_equivalent_to(new.sharding, len(old.shape))
