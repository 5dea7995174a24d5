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
    strategy = facts.config.mesh.fsdp_strategy
    others = {axis: facts.mesh.get(axis, 1) for axis in ("context", "expert") if facts.mesh.get(axis, 1) > 1}
    if facts.mesh.get("pipeline", 1) > 1 and others and strategy != "full":
        named = " and ".join(f"mesh.{axis} = {size}" for axis, size in others.items())
        yield Problem(
            key="mesh.fsdp_strategy",
            value=strategy,
            message=f"in a pipeline together with {named}: not yet",
            remedy='set mesh.fsdp_strategy="full"',
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
