"""The collectives of a compiled program, as one device sees them: what, how many bytes, over which mesh axes, where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.audit.groups import DeviceGroups, permute_groups, replica_groups
from jaxpar.audit.hlo import ArrayType, Computation, Instruction, Loop, Module, Site, array_types, tuple_elements

OPS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Collectives that the audit knows, by their HLO opcode without ``-start``."""

_COMPUTE = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "call", "reduce", "scatter", "sort")

_CALLED = ("calls", "body", "to_apply", "branch_computations")
"""Attributes that name the computations of ``_COMPUTE`` instructions."""


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program. Several arrays moved by one instruction are one collective."""

    op: str
    """HLO opcode without ``-start``, one of ``OPS``."""
    arrays: tuple[ArrayType, ...]
    """Results on one device."""
    axes: tuple[str, ...] | None
    """Mesh axes of size above 1 that it communicates over; None when they cannot be told (no mesh known)."""
    group_size: int
    """Devices in one group; smaller than the product of ``axes`` when only a part of an axis takes part."""
    loops: tuple[Loop, ...]
    """While loops around it, outermost first."""
    trips: int
    """How often it runs in one call of the program; loops of unknown length count once."""
    is_async: bool
    """Whether other work can run between its start and its end (GPU); False also for a start marked ``is_sync``."""
    compute_between: int
    """Compute instructions scheduled between its start and its end; 0 when it is not async."""
    products_between: int
    """Those of them that are, or hold, matrix products or custom kernels."""
    op_name: str
    """Where it comes from in JAX terms, e.g. ``jit(step)/jvp()/while/body/all_gather``."""
    source: str
    """``file:line`` of the JAX call it comes from, or ""."""
    name: str
    """Name of the instruction in the HLO text."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types on the wire, sorted."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    @property
    def bytes(self) -> int:
        """Result bytes on one device, per execution."""
        return sum(array.bytes for array in self.arrays)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per execution with ring algorithms (n devices, arrays of ``full`` bytes).

        all-gather and reduce-scatter (n-1)/n x full; all-reduce twice that; all-to-all (n-1)/n of what it holds (for a
        ragged one of its whole buffer, an upper bound); permute and broadcast what they hold.
        Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
        """
        n = self.group_size
        share = (n - 1) / n
        factors = {
            "all-gather": share,
            "reduce-scatter": share * n,
            "all-reduce": 2 * share,
            "all-to-all": share,
            "ragged-all-to-all": share,
            "collective-permute": 1.0,
            "collective-broadcast": 1.0,
        }
        return factors[self.op] * self.bytes

    @property
    def in_loop(self) -> bool:
        """Whether it is inside a while loop (a ``lax.scan`` body, for example)."""
        return bool(self.loops)

    @property
    def is_backward(self) -> bool:
        """Whether JAX made it while transposing, that is, in the backward pass (recomputed forward ops included)."""
        return "transpose(" in self.op_name

    def to_dict(self) -> dict:
        """All fields and derived numbers as JSON types."""
        return {
            "op": self.op,
            "arrays": [str(array) for array in self.arrays],
            "dtypes": list(self.dtypes),
            "bytes": self.bytes,
            "wire_bytes": self.wire_bytes,
            "axes": None if self.axes is None else list(self.axes),
            "group_size": self.group_size,
            "loops": [{"name": loop.name, "trips": loop.trips} for loop in self.loops],
            "trips": self.trips,
            "is_async": self.is_async,
            "compute_between": self.compute_between,
            "products_between": self.products_between,
            "op_name": self.op_name,
            "source": self.source,
            "name": self.name,
        }


def find_collectives(module: Module, mesh: Mapping[str, int] | None) -> tuple[Collective, ...]:
    """All collectives that one call of the program runs, in schedule order; those over one device are left out."""
    found = []
    for site in module.walk():
        instruction = site.instruction
        op = instruction.opcode.removesuffix("-start")
        if op not in OPS:
            continue
        groups = _groups(op, instruction, module.num_devices, mesh)
        if groups.size > 1:
            found.append(_collective(op, groups, site, module))
    return tuple(found)


def _collective(op: str, groups: DeviceGroups, site: Site, module: Module) -> Collective:
    instruction = site.instruction
    start = site.async_start
    if instruction.opcode.endswith("-start"):
        start = (site.computation, instruction)
    is_async = start is not None and not any(_is_sync(part) for part in (start[1], instruction))
    between = _compute_between(*start) if is_async else ()
    return Collective(
        op=op,
        arrays=_results(instruction),
        axes=groups.axes,
        group_size=groups.size,
        loops=site.loops,
        trips=site.trips,
        is_async=is_async,
        compute_between=len(between),
        products_between=sum(_holds_product(module, other) for other in between),
        op_name=instruction.op_name,
        source=module.source_of(instruction),
        name=instruction.name,
    )


def _groups(op: str, instruction: Instruction, num_devices: int, mesh: Mapping[str, int] | None) -> DeviceGroups:
    if op == "collective-permute":
        return permute_groups(instruction.attributes, mesh)
    return replica_groups(instruction.attributes, num_devices, mesh)


def _results(instruction: Instruction) -> tuple[ArrayType, ...]:
    """Result arrays; a start's type also lists its operands, ``((operands), results, ...)``, which are left out."""
    elements = tuple_elements(instruction.result)
    if not instruction.opcode.endswith("-start") or len(elements) == 1:
        return array_types(instruction.result)
    # Older XLA gives all-reduce-start the type of its results alone.
    if instruction.opcode == "all-reduce-start" and not elements[0].startswith("("):
        return array_types(instruction.result)
    return array_types(elements[1])


def _is_sync(instruction: Instruction) -> bool:
    return re.search(r'"is_sync":\s*true', instruction.attributes) is not None


def _compute_between(computation: Computation, start: Instruction) -> tuple[Instruction, ...]:
    """Compute instructions scheduled between an async start and the ``-done`` that takes it."""
    instructions = computation.instructions
    handles = {start.name}
    found = []
    for instruction in instructions[instructions.index(start) + 1 :]:
        if handles.intersection(instruction.operands):
            if instruction.opcode.endswith("-done"):
                break
            if instruction.opcode.endswith("-update"):
                handles.add(instruction.name)
        if instruction.opcode in _COMPUTE:
            found.append(instruction)
    return tuple(found)


def _holds_product(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or a custom kernel, or calls a computation that has one."""
    if instruction.opcode in ("dot", "convolution", "custom-call"):
        return True
    return any(
        _holds_product(module, inner)
        for name in instruction.called(*_CALLED)
        for inner in module.computations[name].instructions
    )
