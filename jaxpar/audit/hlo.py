"""Reads the text of a compiled XLA program: computations, instructions, array types, and the order in which they run.

The text is what ``jax.stages.Compiled.as_text()`` returns: optimised and scheduled HLO for one device of an SPMD
program. Only what the audit needs is read; unknown attributes are kept as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ArrayType:
    """Element type and dims of one array as one device holds it, e.g. ``f32[5,8,16]``."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the array without padding; sub-byte types are packed."""
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: ``name = result opcode(operands), attributes``."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """Where the instruction comes from in JAX terms, e.g. ``jit(step)/jvp()/while/body/dot_general``."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    def called(self, *keys: str) -> tuple[str, ...]:
        """Names of the computations given as ``key=%name`` or ``key={%a, %b}``, in the order of ``keys``."""
        names: list[str] = []
        for key in keys:
            match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            if match:
                names += re.findall(r"[\w.\-]+", match[1])
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, in the order in which they are scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def results(self) -> Mapping[str, str]:
        """Result type (as text) of each instruction by its name."""
        return {instruction.name: instruction.result for instruction in self.instructions}


@dataclass(frozen=True)
class Loop:
    """A while loop on the way to an instruction; ``trips`` is None when the compiler does not know the count."""

    name: str
    trips: int | None


@dataclass(frozen=True)
class Site:
    """An instruction where it runs: the loops around it (outermost first) and the async op that wraps it, if any."""

    instruction: Instruction
    computation: Computation
    loops: tuple[Loop, ...]
    async_start: tuple[Computation, Instruction] | None = None

    @property
    def trips(self) -> int:
        """How often it runs in one call of the program; loops of unknown length count once."""
        return math.prod(loop.trips or 1 for loop in self.loops)


@dataclass(frozen=True)
class Module:
    """A compiled program for one device out of ``num_devices``."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_devices: int
    source_lines: Mapping[int, str]

    def source_of(self, instruction: Instruction) -> str:
        """``file:line`` of the innermost user frame that made the instruction, or "" when the text does not say."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if match:
            return self.source_lines.get(int(match[1]), "")
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return f"{match[1]}:{match[2]}" if match else ""

    def walk(self) -> Iterator[Site]:
        """Yields every instruction that one call of the program runs, in schedule order, from ENTRY down.

        A computation that is called twice is visited twice. Every branch of a conditional is visited, so sums over
        the walk are upper bounds when branches differ. Scalar reducers (``to_apply`` of a reduction) are left out.
        """
        yield from self._walk(self.entry, (), None)

    def _walk(self, computation: Computation, loops, async_start) -> Iterator[Site]:
        for instruction in computation.instructions:
            yield Site(instruction, computation, loops, async_start)
            if instruction.opcode == "while":
                yield from self._walk_while(instruction, loops)
                continue
            wrapper = async_start
            if instruction.opcode.endswith("-start"):
                wrapper = (computation, instruction)
            for name in instruction.called(*_CALLEES.get(instruction.opcode.removesuffix("-start"), ())):
                yield from self._walk(self.computations[name], loops, wrapper)

    def _walk_while(self, instruction: Instruction, loops: tuple[Loop, ...]) -> Iterator[Site]:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes)
        trips = int(known[1]) if known else None
        # The condition runs once more than the body.
        checks = None if trips is None else trips + 1
        for key, count in (("condition", checks), ("body", trips)):
            for name in instruction.called(key):
                yield from self._walk(self.computations[name], (*loops, Loop(instruction.name, count)), None)


# Attributes that name computations which run where the instruction stands. "async" is async-start.
_CALLEES = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async": ("calls",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")


def parse_module(text: str) -> Module:
    """Parses optimised HLO text.

    Raises:
        ValueError: the text has no ENTRY computation, so it is not a compiled program.
    """
    bodies: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if current is None:
            match = _COMPUTATION.match(line)
            if match:
                current = bodies.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            match = _INSTRUCTION.match(line)
            if match:
                current.append(_instruction(match[1], line[match.end() :]))
    if not entry:
        raise ValueError(
            "not the text of a compiled program (no ENTRY computation); pass compiled or compiled.as_text()"
        )
    computations = {name: Computation(name, tuple(body)) for name, body in bodies.items()}
    header = text[: text.find("\n")]
    counts = [re.search(rf"{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    num_devices = math.prod(int(match[1]) for match in counts if match)
    return Module(computations, computations[entry], num_devices, _source_lines(text))


def array_types(result: str) -> tuple[ArrayType, ...]:
    """All arrays of a result type, tuples flattened: ``(f32[8]{0}, bf16[2,4])`` gives two."""
    found = []
    for dtype, dims in _ARRAY.findall(result):
        sizes = tuple(int(dim.strip().removeprefix("<=")) for dim in dims.split(",") if dim.strip())
        found.append(ArrayType(dtype, sizes))
    return tuple(found)


def tuple_elements(result: str) -> tuple[str, ...]:
    """Top-level elements of a tuple type, or the type itself: ``((f32[2]), f32[4])`` gives ``(f32[2])``, ``f32[4]``."""
    if not result.startswith("("):
        return (result,)
    elements, depth, start = [], 0, 1
    for position, char in enumerate(result):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and depth == 1) or depth == 0:
            elements.append(result[start:position].strip())
            start = position + 1
    return tuple(element for element in elements if element)


def _instruction(name: str, rest: str) -> Instruction:
    """Splits ``TYPE opcode(operands), attributes``; TYPE may be a nested tuple."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    assert opcode, f"HLO instruction without an opcode: {name} = {rest[:200]}"
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[opcode.end() : close]))
    return Instruction(name, opcode[1], rest[:end], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:200]}")


def _bits(dtype: str) -> int:
    """Bits of one element: pred is a byte, tokens are nothing, else the first number of the name (f8e4m3fn: 8)."""
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    match = re.match(r"[a-z]+(\d+)", dtype)
    assert match, f"unknown XLA element type {dtype!r}"
    return int(match[1])


def _source_lines(text: str) -> dict[int, str]:
    """``file:line`` by stack frame id, from the tables at the head of the text."""
    tables = {}
    for title in ("FileNames", "FileLocations", "StackFrames"):
        match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        tables[title] = dict(line.split(" ", 1) for line in match[1].splitlines()) if match else {}
    lines = {}
    for frame, fields in tables["StackFrames"].items():
        location = tables["FileLocations"].get(_number(fields, "file_location_id"), "")
        file = tables["FileNames"].get(_number(location, "file_name_id"), "").strip('"')
        if file:
            lines[int(frame)] = f"{file}:{_number(location, 'line')}"
    return lines


def _number(fields: str, key: str) -> str:
    match = re.search(rf"\b{key}=(\d+)", fields)
    return match[1] if match else ""
