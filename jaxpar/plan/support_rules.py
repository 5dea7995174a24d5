"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts

_TRAINABLE_AXES = "data, fsdp, expert, context and tensor axes work"


def pipeline_axis(facts: Facts) -> Iterator[Problem]:
    """Pipeline parallelism."""
    yield from _unsupported_axis(facts, "pipeline", "pipeline parallelism")


def context_combinations(facts: Facts) -> Iterator[Problem]:
    """Context parallelism together with what it has not been proven with."""
    if facts.mesh.get("context", 1) > 1 and facts.mesh.get("pipeline", 1) > 1:
        yield Problem(
            key="mesh.pipeline",
            value=facts.config.mesh.pipeline,
            message=f"together with mesh.context = {facts.mesh['context']}: not yet",
            remedy="set mesh.context=1; context works with data, fsdp, expert and tensor axes",
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


def experts_in_pipeline(facts: Facts) -> Iterator[Problem]:
    """Pipelines of blocks with experts."""
    if facts.model.num_experts and facts.mesh.get("pipeline", 1) > 1:
        yield Problem(
            key="model.num_experts",
            value=facts.model.num_experts,
            message=f"experts in a pipeline (mesh.pipeline is {facts.mesh['pipeline']}): not yet",
            remedy="mesh.pipeline=1; data, fsdp, expert, context and tensor axes work",
        )


def capacity_over_context(facts: Facts) -> Iterator[Problem]:
    """A capacity per row, where a row lies on several devices."""
    if facts.model.capacity_factor and facts.mesh.get("context", 1) > 1:
        yield Problem(
            key="model.capacity_factor",
            value=facts.model.capacity_factor,
            message="counts the tokens of a row, which the context axis splits: not yet",
            remedy="model.capacity_factor=0 (nothing is dropped), or mesh.context=1",
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
