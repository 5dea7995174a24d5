"""Known ways in which a compiled step is slower or larger than it should be, each found in a ``ProgramReport``.

Every lint returns findings, never raises: a test asserts that there are none, a command prints them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxpar.audit.collectives import Collective
from jaxpar.audit.report import ProgramReport


@dataclass(frozen=True)
class Finding:
    """One fault in a compiled program: what is wrong, why it costs, and what to do."""

    rule: str
    message: str
    collective: Collective | None = None
    """The instruction at fault; None when it is the program as a whole."""

    def __str__(self) -> str:
        if self.collective is None:
            return f"{self.rule}: {self.message}"
        place = self.collective.source or self.collective.op_name or self.collective.name
        return f"{self.rule}: {self.message} [{place}]"


def weight_sized_all_reduces(
    report: ProgramReport,
    *,
    weight_bytes: int,
    shard_axes: Collection[str] = ("fsdp", "expert", "context"),
    whole: Collection[tuple[int, ...]] = (),
) -> tuple[Finding, ...]:
    """All-reduces of at least ``weight_bytes`` over an axis that shards weights.

    There the gradient of a weight should be reduce-scattered: an all-reduce sends twice the bytes and leaves every
    device with the whole gradient. All-reduces over other axes (``data``, ``tensor``) are legitimate and pass; those
    over unknown axes are reported, since they cannot be cleared.

    Args:
        report: audit of a train step.
        weight_bytes: bytes of the smallest sharded weight of one layer, whole, as one device would gather it.
        shard_axes: mesh axes that shard weights.
        whole: dims of parameters that no axis shards (routers): their gradients can only be all-reduced.
    """
    return tuple(
        Finding(
            "weight-sized all-reduce",
            f"{_describe(found)}, where gradients of sharded weights should be reduce-scattered; "
            "gather the weight in a shard_map island whose transpose is a reduce-scatter",
            found,
        )
        for found in report.select("all-reduce", min_bytes=weight_bytes)
        if (found.axes is None or set(found.axes) & set(shard_axes))
        and any(array.dims not in whole for array in found.arrays)
    )


def gathers_of_stacked_weights(report: ProgramReport, *, num_layers: int, min_bytes: int = 0) -> tuple[Finding, ...]:
    """All-gathers of a whole ``[L, ...]`` stack, which undo the memory saving of sharded weights.

    The stack is recognised by a dim of ``num_layers`` in an array of rank 3 or more (the compiler may move the dim) and
    of at least ``min_bytes``: the smallest stack, since heads or rows can be as many as layers. A gather may combine
    several arrays; one of them must be both.
    """
    return tuple(
        Finding(
            "gather of stacked weights",
            f"{_describe(found)}, which holds all {num_layers} layers at once; "
            "gather inside the layer loop, and inside its jax.checkpoint",
            found,
        )
        for found in report.select("all-gather", min_bytes=min_bytes)
        if any(len(array.dims) >= 3 and num_layers in array.dims and array.bytes >= min_bytes for array in found.arrays)
    )


def gathers_outside_loops(report: ProgramReport, *, max_bytes: int) -> tuple[Finding, ...]:
    """All-gathers outside every loop whose result is larger than ``max_bytes`` on one device."""
    return tuple(
        Finding(
            "large gather outside the layer loop",
            f"{_describe(found)}, more than the {max_bytes:,} bytes that may be gathered outside a loop",
            found,
        )
        for found in report.select("all-gather", in_loop=False, min_bytes=max_bytes + 1)
    )


def synchronous_collectives(report: ProgramReport, *, min_bytes: int = 2**20) -> tuple[Finding, ...]:
    """Collectives of at least ``min_bytes`` that nothing can overlap: not async, or no compute before their end.

    For GPU programs; the CPU compiler makes none async.
    """
    return tuple(
        Finding(
            "collective not overlapped",
            f"{_describe(found)}, "
            + ("with no compute between its start and its end" if found.is_async else "which is not async"),
            found,
        )
        for found in report.select(min_bytes=min_bytes)
        if not found.compute_between
    )


def unwanted_wire_dtypes(
    report: ProgramReport, *, allowed: Collection[str], op: str | None = None, min_bytes: int = 0
) -> tuple[Finding, ...]:
    """Collectives that move element types other than ``allowed`` (XLA names: ``bf16``, ``f32``).

    For example a gather in f32 where the weights are used in bf16, which doubles its bytes.
    """
    return tuple(
        Finding(
            "unwanted type on the wire",
            f"{_describe(found)}, where only {', '.join(sorted(allowed))} should be sent; "
            "cast before the collective, inside its island",
            found,
        )
        for found in report.select(op, min_bytes=min_bytes)
        if not set(found.dtypes) <= set(allowed)
    )


def _describe(found: Collective) -> str:
    """E.g. ``all-gather of f32[8,64,64] (131,072 bytes) over fsdp (8 devices)``."""
    arrays = ", ".join(map(str, found.arrays))
    axes = "unknown axes (pass mesh=)" if found.axes is None else ", ".join(found.axes)
    return f"{found.op} of {arrays} ({found.bytes:,} bytes) over {axes} ({found.group_size} devices)"
