"""What a pipeline is allowed to do and pays for: each warning names the key, the exact cost, and what avoids it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from jaxpar.plan.facts import Facts
from jaxpar.schedule.counts import layer_counts
from jaxpar.schedule.kinds import closed_form_idle_share, microbatches_below

_GOOD_IDLE_SHARE = Fraction(1, 10)
_MICROBATCHES_PER_STAGE = 4


def pipeline_warnings(facts: Facts) -> Iterator[str]:
    """Idle stages, groups that do not fit, and layers that leave places empty."""
    num_stages, pipeline = facts.mesh.get("pipeline", 1), facts.config.pipeline
    if num_stages == 1:
        return
    num_microbatches, chunks = facts.config.train.microbatches, pipeline.chunks
    idle = closed_form_idle_share(num_stages, num_microbatches, chunks)
    if num_microbatches < _MICROBATCHES_PER_STAGE * num_stages and idle >= _GOOD_IDLE_SHARE:
        enough = microbatches_below(_GOOD_IDLE_SHARE, num_stages, chunks)
        yield (
            f"train.microbatches = {num_microbatches} leaves each of {num_stages} stages idle {float(idle):.1%} of "
            f"a step ({pipeline.schedule}); from {enough} on it is below {float(_GOOD_IDLE_SHARE):.0%}"
        )
    if pipeline.schedule == "interleaved" and num_microbatches % num_stages:
        yield (
            f"train.microbatches = {num_microbatches} is no multiple of {num_stages} stages: stages are idle "
            f"{float(idle):.1%} all the same, but groups larger than {num_stages} keep more activations; "
            f"`jaxpar schedule` counts them"
        )
    if pipeline.layers_per_stage != "even":
        yield from _empty_places(facts, num_stages)


def _empty_places(facts: Facts, num_stages: int) -> Iterator[str]:
    pipeline = facts.config.pipeline
    try:
        counts = layer_counts(
            facts.model.num_layers,
            num_stages=num_stages,
            num_chunks=pipeline.chunks,
            layers_per_stage=pipeline.layers_per_stage,
        )
    except ValueError:  # a rule says why
        return
    if min(counts) < max(counts):
        padding = 1 - sum(counts) / (len(counts) * max(counts))
        yield (
            f"pipeline.layers_per_stage: the largest stage has {max(counts) * pipeline.chunks} of "
            f"{facts.model.num_layers} layers; the others wait for it, {padding:.1%} of all time"
        )
