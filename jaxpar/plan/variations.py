"""Neighbours of a layout: one change each, legal, with the same global batch and devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxpar.plan.evaluation import Evaluation, Task, evaluate
from jaxpar.plan.layout import Layout, balanced_places, strategy_overrides
from jaxpar.plan.legality import batch_objection, mesh_objection, schedule_objection

RECEIVE_FACTOR = 1.5
"""Room for exchanged rows that a mixture of experts with balanced load does with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variation:
    """A neighbour, and how to get there."""

    name: str
    """For people, e.g. "remat full"."""
    overrides: str
    """Config overrides that make it, e.g. "train.remat=full"."""
    evaluation: Evaluation


def is_legal(task: Task, layout: Layout) -> bool:
    """Whether every rule of a layout holds."""
    mesh = layout.mesh
    return not (
        mesh_objection(task.shape, mesh, task.seq_len)
        or batch_objection(mesh, task.global_batch_size, layout.microbatches)
        or schedule_objection(task.shape, mesh, layout.schedule, layout.chunks, layout.microbatches, layout.places)
    )


def with_changes(task: Task, layout: Layout, mesh: Mapping[str, int] | None = None, **changes: object) -> Layout | None:
    """The layout with another mesh or settings and the same global batch; None where that is not legal."""
    mesh = {**layout.mesh, **(mesh or {})}
    settings = {
        "microbatches": layout.microbatches,
        "remat": layout.remat,
        "remat_save": layout.remat_save,
        "strategy": "full" if layout.strategy == "none" else layout.strategy,
        "schedule": layout.schedule,
        "chunks": layout.chunks if mesh["pipeline"] > 1 else 1,
        "receive_factor": layout.receive_factor,
        "context_mode": layout.context_mode if mesh["context"] == layout.context else "auto",
        **changes,
    }
    if mesh["pipeline"] > 1:
        settings["remat"] = "full"  # the only one that a stage has
    stages = (mesh["pipeline"], settings["chunks"])
    if stages == (layout.pipeline, layout.chunks):
        settings["places"] = layout.places
    elif layout.places:
        settings["places"] = balanced_places(task.shape.num_layers, *stages)
    if batch_objection(mesh, task.global_batch_size, settings["microbatches"]):
        return None
    changed = task.layout(mesh, **settings)
    return changed if is_legal(task, changed) else None


def variations(task: Task, layout: Layout) -> Iterator[Variation]:
    """Every neighbour that is legal."""
    for name, overrides, changed in _changes(task, layout):
        if changed is not None and changed != layout:
            yield Variation(name=name, overrides=overrides, evaluation=evaluate(task, changed))


def _changes(task: Task, layout: Layout) -> Iterator[tuple[str, str, Layout | None]]:
    mesh, m = layout.mesh, layout.microbatches
    for remat in ("none", "selective", "full"):
        yield f"remat {remat}", f"train.remat={remat}", with_changes(task, layout, remat=remat)
    for more in (2 * m, 4 * m, 8 * m, 16 * m):
        yield f"{more} microbatches", f"train.microbatches={more}", with_changes(task, layout, microbatches=more)
    if m % 2 == 0:
        fewer = m // 2
        yield f"{fewer} microbatches", f"train.microbatches={fewer}", with_changes(task, layout, microbatches=fewer)
    if layout.expert > 1 and not layout.receive_factor:
        name = f"room for {RECEIVE_FACTOR} times the rows of an even load"
        overrides = f"mesh.expert_receive_factor={RECEIVE_FACTOR}"
        yield name, overrides, with_changes(task, layout, receive_factor=RECEIVE_FACTOR)
    if layout.strategy in ("optimizer", "grads"):
        overrides = "mesh.fsdp_strategy=full" + (" pipeline.gather=per_microbatch" if layout.pipeline > 1 else "")
        yield "shard parameters too (fsdp full)", overrides, with_changes(task, layout, strategy="full")
    elif layout.strategy == "full" and layout.pipeline > 1:
        name = "gather weights once per step"
        yield name, "pipeline.gather=per_step", with_changes(task, layout, strategy="optimizer")
    yield from _mesh_changes(task, layout, mesh)


def _mesh_changes(task: Task, layout: Layout, mesh: dict[str, int]) -> Iterator[tuple[str, str, Layout | None]]:
    both, nodes = mesh["data"] * mesh["fsdp"], task.cluster.num_nodes
    if mesh["data"] > 1:
        yield _mesh_change("shard over all of data", task, layout, {"data": 1, "fsdp": both})
    if mesh["fsdp"] > 1:
        yield _mesh_change("replicate instead of shard (DDP)", task, layout, {"data": both, "fsdp": 1})
    if nodes > 1 and both % nodes == 0 and mesh["pipeline"] == 1:
        change = {"data": nodes, "fsdp": both // nodes}
        yield _mesh_change("hybrid: shard inside a node, replicate across", task, layout, change)
    for axis, fewer in (("fsdp", "fsdp"), ("data", "data")):
        if mesh[fewer] % 2 == 0 and 2 * mesh["tensor"] <= task.cluster.domain_size:
            change = {"tensor": 2 * mesh["tensor"], fewer: mesh[fewer] // 2}
            yield _mesh_change(f"tensor {2 * mesh['tensor']}", task, layout, change)
        if mesh[axis] % 2 == 0:
            change = {"pipeline": 2 * mesh["pipeline"], axis: mesh[axis] // 2}
            yield _mesh_change(f"pipeline {2 * mesh['pipeline']}", task, layout, change)
        if mesh[axis] % 2 == 0:
            change = {"context": 2 * mesh["context"], axis: mesh[axis] // 2}
            yield _mesh_change(f"context {2 * mesh['context']}", task, layout, change)
    if mesh["tensor"] > 1:
        change = {"tensor": 1, "fsdp": mesh["fsdp"] * mesh["tensor"]}
        yield _mesh_change("no tensor axis", task, layout, change)
    if mesh["pipeline"] > 1:
        change = {"pipeline": 1, "fsdp": mesh["fsdp"] * mesh["pipeline"]}
        yield _mesh_change("no pipeline", task, layout, change)


def _mesh_change(name: str, task: Task, layout: Layout, change: dict[str, int]) -> tuple[str, str, Layout | None]:
    """Another mesh; with fewer microbatches where the batch does not divide by as many any more."""
    overrides = " ".join(f"mesh.{axis}={size}" for axis, size in change.items())
    microbatches = layout.microbatches
    while microbatches:
        changed = with_changes(task, layout, change, microbatches=microbatches)
        if changed is not None:
            more = [f"train.microbatches={microbatches}"] if microbatches != layout.microbatches else []
            if layout.pipeline > 1 or changed.pipeline > 1:
                more += strategy_overrides(changed)
            return name, " ".join([overrides, *more]), changed
        microbatches //= 2
    return name, overrides, None
