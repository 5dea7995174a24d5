"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.config.families import FAMILIES
from jaxpar.plan.facts import Facts

_TRAINABLE_AXES = "pipeline, data, fsdp and tensor axes work"


def pipeline_with_other_axes(facts: Facts) -> Iterator[Problem]:
    """What is not proven to give the same result inside a pipeline."""
    num_stages, config = facts.mesh.get("pipeline", 1), facts.config
    others = (
        ("mesh.context", facts.mesh.get("context", 1), 1),
        ("mesh.expert", facts.mesh.get("expert", 1), 1),
        ("model.num_experts", facts.model.num_experts, 0),
        ("mesh.fsdp_strategy", config.mesh.fsdp_strategy, "full"),
    )
    for key, value, working in others:
        if num_stages > 1 and value != working:
            yield Problem(
                key=key,
                value=value,
                message=f"together with pipeline stages (mesh.pipeline = {num_stages}): not yet",
                remedy=f"set mesh.pipeline=1, or {key}={working}; pipeline goes with data, fsdp and tensor",
            )


def context_axis(facts: Facts) -> Iterator[Problem]:
    """Context parallelism."""
    yield from _unsupported_axis(facts, "context", "context parallelism (ring attention)")


def fsdp_strategy(facts: Facts) -> Iterator[Problem]:
    """ZeRO-1 and ZeRO-2."""
    strategy = facts.config.mesh.fsdp_strategy
    if strategy != "full":
        unused = "; and axis fsdp has size 1, so it would shard nothing" if facts.mesh.get("fsdp") == 1 else ""
        yield Problem(
            key="mesh.fsdp_strategy",
            value=strategy,
            message=f"sharding only {'gradients and optimizer' if strategy == 'grads' else 'the optimizer'}: "
            f"not yet{unused}",
            remedy='"full" works; for replicated weights use mesh.data instead of mesh.fsdp',
        )


def optimizer(facts: Facts) -> Iterator[Problem]:
    """Optimizers other than AdamW."""
    name = facts.config.optim.name
    if name != "adamw":
        yield Problem(key="optim.name", value=name, message="not yet", remedy='"adamw" works')


def family_trainable(facts: Facts) -> Iterator[Problem]:
    """Families of which only the sizes are known."""
    family = facts.model.family
    if not FAMILIES[family].trainable:
        working = ", ".join(name for name, options in FAMILIES.items() if options.trainable)
        yield Problem(
            key="model.family",
            value=family,
            message="training this family: not yet (its parameter counts are known)",
            remedy=f"these families train: {working}",
        )


def dense_model(facts: Facts) -> Iterator[Problem]:
    """Mixtures of experts are planned, not trained."""
    if facts.model.num_experts:
        yield Problem(
            key="model.num_experts",
            value=facts.model.num_experts,
            message="training mixture-of-experts models: not yet (`jaxpar plan` plans them)",
            remedy="dense presets work; `jaxpar config --presets` says which models train",
        )


def _unsupported_axis(facts: Facts, axis: str, what: str) -> Iterator[Problem]:
    size = facts.mesh.get(axis, 1)
    if size > 1:
        given = getattr(facts.config.mesh, axis)
        resolved = f" (-1 is {size} here)" if given == -1 else ""
        yield Problem(
            key=f"mesh.{axis}",
            value=given,
            message=f"{what}: not yet{resolved}",
            remedy=f"set mesh.{axis}=1; {_TRAINABLE_AXES}",
        )
