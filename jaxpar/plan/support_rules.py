"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts


def pipeline_with_other_axes(facts: Facts) -> Iterator[Problem]:
    """What is not proven to give the same result inside a pipeline."""
    num_stages, config = facts.mesh.get("pipeline", 1), facts.config
    others = (
        ("model.first_dense_layers", facts.model.first_dense_layers, 0),
        ("mesh.fsdp_strategy", config.mesh.fsdp_strategy, "full"),
    )
    for key, value, working in others:
        if num_stages > 1 and value != working:
            yield Problem(
                key=key,
                value=value,
                message=f"together with pipeline stages (mesh.pipeline = {num_stages}): not yet",
                remedy=f"set mesh.pipeline=1, or {key}={working}; pipeline goes with data, fsdp, context and tensor",
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
