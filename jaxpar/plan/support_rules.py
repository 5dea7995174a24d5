"""What the config can say and the trainer cannot do yet: refused by name, with what works today."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts


def dense_blocks_in_a_pipeline(facts: Facts) -> Iterator[Problem]:
    """Stages run one stack of blocks that are all alike."""
    num_stages, num_dense = facts.mesh.get("pipeline", 1), facts.model.first_dense_layers
    if num_stages > 1 and num_dense:
        yield Problem(
            key="model.first_dense_layers",
            value=num_dense,
            message=f"together with pipeline stages (mesh.pipeline = {num_stages}): not yet",
            remedy="set mesh.pipeline=1, or model.first_dense_layers=0; other mixtures of experts train in a pipeline",
        )


def strategy_over_other_axes(facts: Facts) -> Iterator[Problem]:
    """Stages with whole weights compute on rows alone: what splits weights must split nothing but rows."""
    config = facts.config
    asked = (
        ("mesh.fsdp_strategy", config.mesh.fsdp_strategy, config.mesh.fsdp_strategy != "full", "full"),
        ("pipeline.gather", config.pipeline.gather, config.pipeline.gather == "per_step", "per_microbatch"),
    )
    others = {axis: facts.mesh.get(axis, 1) for axis in ("context", "expert") if facts.mesh.get(axis, 1) > 1}
    if facts.mesh.get("pipeline", 1) == 1 or not others:
        return
    named = " and ".join(f"mesh.{axis} = {size}" for axis, size in others.items())
    for key, value, is_refused, working in asked:
        if is_refused:
            message = f"whole weights in a pipeline together with {named}: not yet"
            yield Problem(key=key, value=value, message=message, remedy=f'set {key}="{working}"')
