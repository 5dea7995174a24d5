"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts


def pipeline_with_other_axes(facts: Facts) -> Iterator[Problem]:
    """What is not proven to give the same result inside a pipeline."""
    num_stages, config = facts.mesh.get("pipeline", 1), facts.config
    others = (
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


def optimizer(facts: Facts) -> Iterator[Problem]:
    """Optimizers other than AdamW."""
    name = facts.config.optim.name
    if name != "adamw":
        yield Problem(key="optim.name", value=name, message="not yet", remedy='"adamw" works')


def dense_model(facts: Facts) -> Iterator[Problem]:
    """Mixtures of experts are planned, not trained."""
    if facts.model.num_experts:
        yield Problem(
            key="model.num_experts",
            value=facts.model.num_experts,
            message="training mixture-of-experts models: not yet (`jaxpar plan` plans them)",
            remedy="dense presets work; `jaxpar config --presets` says which models train",
        )
