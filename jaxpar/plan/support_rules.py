"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts

_TRAINABLE_AXES = "data, fsdp, context and tensor axes work"


def pipeline_axis(facts: Facts) -> Iterator[Problem]:
    """Pipeline parallelism."""
    yield from _unsupported_axis(facts, "pipeline", "pipeline parallelism")


def context_combinations(facts: Facts) -> Iterator[Problem]:
    """Context parallelism together with what it has not been proven with."""
    if facts.mesh.get("context", 1) == 1:
        return
    for key, value, applies in (
        ("mesh.pipeline", facts.config.mesh.pipeline, facts.mesh.get("pipeline", 1) > 1),
        ("model.num_experts", facts.model.num_experts, facts.model.num_experts > 0),
    ):
        if applies:
            yield Problem(
                key=key,
                value=value,
                message=f"together with mesh.context = {facts.mesh['context']}: not yet",
                remedy="set mesh.context=1; context works with data, fsdp and tensor axes and dense models",
            )


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
