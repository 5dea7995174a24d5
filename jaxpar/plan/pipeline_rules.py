"""Rules of the pipeline: its schedule against stages, microbatches and chunks."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts
from jaxpar.schedule import schedule_problems

_KEYS = {
    "kind": "pipeline.schedule",
    "num_stages": "mesh.pipeline",
    "num_microbatches": "train.microbatches",
    "num_chunks": "pipeline.chunks",
}


def schedule_exists(facts: Facts) -> Iterator[Problem]:
    """The schedule can be built: enough microbatches for the stages, and the chunks that it has."""
    config, num_stages = facts.config, facts.mesh.get("pipeline", 1)
    if num_stages > 1:
        yield from schedule_problems(
            config.pipeline.schedule,
            num_stages=num_stages,
            num_microbatches=config.train.microbatches,
            num_chunks=config.pipeline.chunks,
            names=_KEYS,
        )
