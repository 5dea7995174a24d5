"""Which schedules there are, which sizes they can have, and what idle time costs them in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, get_args

from jaxpar.config.errors import Problem

Kind = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHUNKED_KINDS: tuple[Kind, ...] = ("interleaved", "breadth_first")
"""Schedules with several chunks per stage; the others have one."""

ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("kind", "num_stages", "num_microbatches", "num_chunks")}
)
"""What :func:`schedule_problems` calls its arguments, unless told the user's names for them."""


def closed_form_idle_share(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Fraction:
    """(p - 1) / (v M + p - 1): what filling and draining the pipeline costs (Megatron-LM 2021, section 2.2)."""
    return Fraction(num_stages - 1, num_chunks * num_microbatches + num_stages - 1)


def microbatches_below(idle_share: Fraction, num_stages: int, num_chunks: int = 1) -> int:
    """Fewest microbatches, at least one per stage, whose closed-form idle share is below ``idle_share``."""
    assert 0 < idle_share < 1, idle_share
    bound = (num_stages - 1) * (1 - idle_share) / (idle_share * num_chunks)
    return max(num_stages, math.floor(bound) + 1)


def schedule_problems(
    kind: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    names: Mapping[str, str] = ARGUMENTS,
) -> list[Problem]:
    """Why there is no such schedule; empty if there is one.

    Args:
        kind: One of ``KINDS``.
        num_stages: p, stages of the pipeline.
        num_microbatches: M, microbatches of an optimizer step.
        num_chunks: v, chunks of layers per stage.
        names: What the user calls each argument, e.g. ``{"num_chunks": "pipeline.chunks", ...}``.
    """
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    problems = [
        Problem(key=names[name], value=count, message="must be at least 1", remedy="give a whole number from 1 on")
        for name, count in counts.items()
        if count < 1
    ]
    if kind not in KINDS:
        known = ", ".join(KINDS)
        problems.append(Problem(key=names["kind"], value=kind, message="no such schedule", remedy=f"one of {known}"))
    if problems:
        return problems
    if (num_chunks > 1) != (kind in CHUNKED_KINDS):
        other = {"interleaved": "1f1b", "breadth_first": "gpipe", "1f1b": "interleaved", "gpipe": "breadth_first"}[kind]
        more = kind in CHUNKED_KINDS
        problems.append(
            Problem(
                key=names["num_chunks"],
                value=num_chunks,
                message=f"{kind} {'needs at least 2 chunks' if more else 'has 1 chunk'} of layers per stage",
                remedy=f"set {names['num_chunks']} to {2 if more else 1}, or {names['kind']} to {other}",
            )
        )
    if num_microbatches < num_stages and kind != "gpipe":
        share = float(closed_form_idle_share(num_stages, num_microbatches))
        problems.append(
            Problem(
                key=names["num_microbatches"],
                value=num_microbatches,
                message=f"{kind} needs a microbatch for each stage: {num_microbatches} < {num_stages} stages",
                remedy=f"set {names['num_microbatches']} to at least {num_stages}, or {names['kind']} to gpipe, which "
                f"runs with any number (idle {share:.1%} of the time with {num_microbatches})",
            )
        )
    return problems
