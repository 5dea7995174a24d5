"""What compiling a train step tells, as plain values that go through JSON. No JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind in one place of the program."""

    op: str
    """HLO opcode, e.g. ``all-gather``."""
    axis: str | None
    """Mesh axes, joined by "+"; None when they cannot be told."""
    loop: str | None
    """``forward`` or ``backward`` inside a loop (over layers, microbatches, ticks); None outside all loops."""
    trips: int
    """How often each runs in a step."""
    count: int
    """Instructions."""
    bytes: int
    """Result bytes on one device of all ``count``, run once each."""
    dtype: str
    """Element types on the wire, joined by "+"."""
    is_async: bool
    """Whether other work can run between start and end."""
    overlapped: int
    """Compute instructions between start and end, of the one that has the fewest."""
    products: int
    """Likewise, of those that are or hold matrix products or kernels."""

    def to_dict(self) -> dict:
        """The keys of ``compiled.collectives``."""
        values = dataclasses.asdict(self)
        values["async"] = values.pop("is_async")
        return values

    @classmethod
    def from_dict(cls, values: dict) -> CollectiveRow:
        """The inverse of ``to_dict``."""
        values = dict(values)
        return cls(is_async=values.pop("async"), **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lint:
    """One way in which the program is slower or larger than it should be."""

    rule: str
    message: str
    """What is wrong, where, what it costs, and what would mend it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOutcome:
    """The report on a compiled train step. Bytes are of one device."""

    target: str
    """What was compiled for, and how far to trust it."""
    peak_bytes: int
    """The compiler's peak; for CPU devices an upper bound, everything counted once."""
    argument_bytes: int
    """State and batch."""
    temp_bytes: int
    collectives: tuple[CollectiveRow, ...]
    wire_bytes: float
    """Bytes that a device sends in a step, with ring algorithms."""
    hidden_share: float | None
    """Share of ``wire_bytes`` in collectives that have compute between start and end; None for CPU devices, whose
    compiler makes none async."""
    conditionals: int
    """Conditional instructions; those whose branches communicate need all devices to take the same branch."""
    custom_calls: dict[str, int]
    """Kernels that are not the compiler's own, by target (and for Pallas their name): how many instructions call
    each."""
    attention: str
    """Kernel that was chosen, and why."""
    grouped: str | None
    """What multiplies the rows of the experts, and why; None without experts."""
    options: dict[str, bool | int | str]
    """Compiler options that were given."""
    lints: tuple[Lint, ...]
    lower_s: float
    """Seconds of tracing and lowering."""
    compile_s: float
    cpu_s: float
    """Processor time of the whole process and of the assemblers that it started."""
    max_rss_bytes: int
    """Memory that compiling took on this machine."""

    def to_dict(self) -> dict:
        """JSON types; the keys of ``compiled`` in ``jaxpar plan --json``."""
        values = dataclasses.asdict(self)
        values["collectives"] = [row.to_dict() for row in self.collectives]
        values["lints"] = [dataclasses.asdict(lint) for lint in self.lints]
        return values

    @classmethod
    def from_dict(cls, values: dict) -> CompileOutcome:
        """The inverse of ``to_dict``."""
        rows = tuple(CollectiveRow.from_dict(row) for row in values["collectives"])
        lints = tuple(Lint(**lint) for lint in values["lints"])
        return cls(**{**values, "collectives": rows, "lints": lints})
