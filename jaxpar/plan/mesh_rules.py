"""Rules of the mesh itself: sizes, the rest axis, the device count, axes that shard nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.config.schema import AXES
from jaxpar.plan.facts import Facts

WEIGHT_AXES = ("fsdp", "expert", "context")
"""Axes that shard weights, gradients and optimizer state, as mesh.fsdp_strategy says."""


def axis_sizes(facts: Facts) -> Iterator[Problem]:
    """Every axis has at least one device, or is -1."""
    for axis in AXES:
        size = getattr(facts.config.mesh, axis)
        if size < 1 and size != -1:
            yield Problem(
                key=f"mesh.{axis}",
                value=size,
                message="an axis has at least 1 device",
                remedy="1 leaves the axis out; -1 on one axis takes the devices that the others leave",
            )


def one_rest_axis(facts: Facts) -> Iterator[Problem]:
    """At most one axis is -1."""
    rest = _rest_axes(facts)
    if len(rest) > 1:
        yield Problem(
            key=", ".join(f"mesh.{axis}" for axis in rest),
            value=-1,
            message=f"{len(rest)} axes are -1, so the devices could be split in more than one way",
            remedy=f"keep -1 on one of them, e.g. mesh.{rest[0]}=-1 mesh.{rest[1]}=1",
        )


def rest_axis_divides(facts: Facts) -> Iterator[Problem]:
    """The other axes divide the device count."""
    rest = _rest_axes(facts)
    if len(rest) != 1 or facts.num_devices is None or rest[0] in facts.mesh:
        return
    others = tuple(axis for axis in AXES if axis != rest[0])
    product = facts.axes_product(others)
    if product is None:
        return
    yield Problem(
        key=f"mesh.{rest[0]}",
        value=-1,
        message=f"{facts.num_devices} devices{_origin(facts)} do not divide by {product}, "
        f"the product of the other axes ({facts.describe_axes(others)})",
        remedy="change another axis, " + _fake_devices(facts, product),
    )


def mesh_product(facts: Facts) -> Iterator[Problem]:
    """A mesh that is given in full uses every device, and no more than there are."""
    product = facts.axes_product(AXES)
    if product is None or facts.num_devices is None or product == facts.num_devices:
        return
    missing = product - facts.num_devices
    verdict = f"{missing} too few" if missing > 0 else f"{-missing} would stay idle"
    yield Problem(
        key="mesh",
        message=f"{facts.describe_axes(AXES)} = {product} devices, but there are {facts.num_devices}"
        f"{_origin(facts)}: {verdict} (every axis takes devices of its own)",
        remedy=_axis_change(facts) + _fake_devices(facts, product),
    )


def device_count_agrees(facts: Facts) -> Iterator[Problem]:
    """The devices that are there are those that runtime.cpu_devices asks for."""
    if not facts.is_device_count_set or facts.num_devices == facts.configured_num_devices:
        return
    runtime = facts.config.runtime
    yield Problem(
        key="runtime.cpu_devices",
        value=runtime.cpu_devices,
        message=f"asks for {runtime.cpu_devices} x {runtime.num_processes} processes = {facts.configured_num_devices} "
        f"fake devices, but there are {facts.num_devices}",
        remedy="fake devices must be set before JAX starts; or remove runtime.cpu_devices",
    )


def axis_shards_something(facts: Facts) -> Iterator[Problem]:
    """An axis above 1 that no parameter and no batch dim uses would only replicate work.

    data and fsdp always split the batch, tensor the heads, context the sequence and pipeline the layers; expert needs
    experts.
    """
    size = facts.mesh.get("expert", 1)
    if size > 1 and not facts.model.num_experts:
        yield Problem(
            key="mesh.expert",
            value=facts.config.mesh.expert,
            message=f"axis expert ({size}) shards nothing: the model has no experts (model.num_experts is 0)",
            remedy="mesh.expert=1; to shard a dense model over these devices use mesh.fsdp",
        )


def strategy_shards_something(facts: Facts) -> Iterator[Problem]:
    """A strategy other than the default needs an axis that it says something about."""
    strategy = facts.config.mesh.fsdp_strategy
    if strategy == "full" or facts.axes_product(WEIGHT_AXES) != 1:
        return
    yield Problem(
        key="mesh.fsdp_strategy",
        value=strategy,
        message=f"says what the axes {', '.join(WEIGHT_AXES)} shard, but all have size 1, so it would shard nothing",
        remedy="leave it out, or set mesh.fsdp above 1",
    )


def stages_gather_something(facts: Facts) -> Iterator[Problem]:
    """How often stages gather weights is asked where there are both, and answered once."""
    gather, strategy = facts.config.pipeline.gather, facts.config.mesh.fsdp_strategy
    if gather == "auto" or facts.axes_product(("pipeline", *WEIGHT_AXES)) is None:
        return
    if facts.mesh["pipeline"] == 1:
        message = "says how often stages gather their weights, and there is one stage (mesh.pipeline = 1)"
        remedy = 'leave it out; without stages mesh.fsdp_strategy="optimizer" gathers once per step'
    elif facts.axes_product(WEIGHT_AXES) == 1:
        message = f"nothing is gathered: the axes {', '.join(WEIGHT_AXES)} all have size 1"
        remedy = "leave it out, or set mesh.fsdp above 1"
    elif gather == "per_microbatch" and strategy != "full":
        message = f"mesh.fsdp_strategy = {strategy!r} gathers weights once per step"
        remedy = 'leave it out, or set mesh.fsdp_strategy="full"'
    else:
        return
    yield Problem(key="pipeline.gather", value=gather, message=message, remedy=remedy)


def _rest_axes(facts: Facts) -> list[str]:
    return [axis for axis in AXES if getattr(facts.config.mesh, axis) == -1]


def _origin(facts: Facts) -> str:
    if not facts.is_device_count_set or facts.num_devices != facts.configured_num_devices:
        return ""
    runtime = facts.config.runtime
    return f" (runtime.cpu_devices {runtime.cpu_devices} x runtime.num_processes {runtime.num_processes})"


def _axis_change(facts: Facts) -> str:
    """One axis whose change alone would make the mesh fit, for the start of a remedy."""
    for axis in ("fsdp", "data"):
        others = math.prod(size for name, size in facts.mesh.items() if name != axis)
        if facts.num_devices >= others and facts.num_devices % others == 0:
            return f"mesh.{axis}={facts.num_devices // others} (or -1, the rest) fits, "
    return "change the mesh, "


def _fake_devices(facts: Facts, multiple: int) -> str:
    if facts.is_planned:
        return f"or plan for --devices {multiple}"
    num_processes = facts.config.runtime.num_processes
    if multiple % num_processes:
        return "or fake more devices on the CPU with runtime.cpu_devices=N (N per process)"
    return f"or runtime.cpu_devices={multiple // num_processes} to train on that many fake CPU devices"
