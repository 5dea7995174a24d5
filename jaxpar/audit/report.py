"""What a compiled program does besides arithmetic: its collectives, its memory, and its matrix-product FLOPs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from rich.table import Table

from jaxpar.audit.collectives import Collective, find_collectives
from jaxpar.audit.groups import mesh_in_text
from jaxpar.audit.hlo import Loop, Site, array_types, parse_module

if TYPE_CHECKING:
    from jax.stages import Compiled


class NamedAxes(Protocol):
    """The part of ``jax.sharding.Mesh`` and ``AbstractMesh`` that the audit needs."""

    @property
    def shape(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, from ``Compiled.memory_analysis()``."""

    argument: int
    output: int
    temp: int
    alias: int
    """Bytes of donated arguments that outputs reuse."""
    peak: int | None
    """The compiler's own peak; None when the backend does not say (XLA:CPU)."""

    @property
    def total(self) -> int:
        """``peak``, or when it is unknown the sum of everything, reused bytes counted once (an upper bound)."""
        return self.peak or self.argument + self.output + self.temp - self.alias


@dataclass(frozen=True)
class LayerLoop:
    """One loop over the layers: what each of its iterations communicates."""

    loop: Loop
    is_backward: bool
    counts: Mapping[tuple[str, tuple[str, ...] | None], int]
    """Executions per iteration by (op, axes); loops inside the layer multiply."""
    wire_bytes: float
    """Bytes that one device sends per iteration."""
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class ProgramReport:
    """The audit of one compiled program, for one device and one call (one step)."""

    collectives: tuple[Collective, ...]
    memory: MemoryUse | None
    """None when only the text was given."""
    matmul_flops: float
    """Floating-point operations of matrix products (2 m n k each), loop trip counts included. Fused attention kernels
    are not seen, and every branch of a conditional counts."""
    unknown_loops: tuple[str, ...]
    """While loops whose trip count the compiler does not know; what they hold counts once in every total."""

    def select(
        self,
        op: str | None = None,
        *,
        axes: str | tuple[str, ...] | None = None,
        in_loop: bool | None = None,
        is_backward: bool | None = None,
        min_bytes: int = 0,
    ) -> tuple[Collective, ...]:
        """Collectives that match every given condition; ``axes`` must be the same set of axes, one name or a tuple."""
        wanted = {axes} if isinstance(axes, str) else None if axes is None else set(axes)
        return tuple(
            collective
            for collective in self.collectives
            if (op is None or collective.op == op)
            and (wanted is None or (collective.axes is not None and set(collective.axes) == wanted))
            and (in_loop is None or collective.in_loop == in_loop)
            and (is_backward is None or collective.is_backward == is_backward)
            and collective.bytes >= min_bytes
        )

    def count(self, op: str | None = None, **conditions) -> int:
        """Number of collective instructions that match (see ``select``); one inside a loop counts once."""
        return len(self.select(op, **conditions))

    def wire_bytes_per_step(self, op: str | None = None, **conditions) -> float:
        """Bytes that one device sends in one call, trip counts included, over all or the matching collectives."""
        return sum(found.wire_bytes * found.trips for found in self.select(op, **conditions))

    def per_layer(self, num_layers: int) -> tuple[LayerLoop, ...]:
        """The loops over ``num_layers`` layers that communicate, in schedule order (forward, then backward).

        A loop of ``num_layers - 1`` trips counts too: the GPU compiler's collective pipeliner peels one layer off.
        """
        groups: dict[str, tuple[int, Loop, list[Collective]]] = {}
        for found in self.collectives:
            for depth, loop in enumerate(found.loops):
                if loop.trips in (num_layers, num_layers - 1):
                    groups.setdefault(loop.name, (depth, loop, []))[2].append(found)
        return tuple(_layer_loop(*group) for group in groups.values())

    def to_dict(self) -> dict:
        """The whole report as JSON types."""
        return {
            "collectives": [found.to_dict() for found in self.collectives],
            "wire_bytes_per_step": self.wire_bytes_per_step(),
            "memory": None if self.memory is None else asdict(self.memory),
            "matmul_flops": self.matmul_flops,
            "unknown_loops": list(self.unknown_loops),
        }

    def table(self, title: str = "Collectives of one step, per device") -> Table:
        """One row per kind of collective: op, axes, types, place; how many, how large, and what it sends per step."""
        table = Table(title=title, caption=self._caption())
        for heading in ("collective", "axes", "type", "where", "async"):
            table.add_column(heading)
        for heading in ("count", "largest MB", "sent MB per step"):
            table.add_column(heading, justify="right")
        rows: dict[tuple[str, ...], list[Collective]] = {}
        for found in self.collectives:
            rows.setdefault(_row_key(found), []).append(found)
        for key, members in sorted(rows.items()):
            largest = max(member.bytes for member in members)
            sent = sum(member.wire_bytes * member.trips for member in members)
            table.add_row(*key, str(len(members)), f"{largest / 1e6:.3f}", f"{sent / 1e6:.3f}")
        return table

    def _caption(self) -> str:
        parts = [f"{self.wire_bytes_per_step() / 1e6:.3f} MB sent per device and step (ring algorithms)"]
        if self.memory is not None:
            parts.append(f"memory {self.memory.total / 2**20:.1f} MiB, of it temp {self.memory.temp / 2**20:.1f}")
        if self.unknown_loops:
            parts.append(f"{len(self.unknown_loops)} loops of unknown length are counted once")
        return "; ".join(parts)


def audit(compiled: Compiled | str, mesh: NamedAxes | None = None) -> ProgramReport:
    """Reads a compiled program, or its text (``compiled.as_text()``).

    Args:
        compiled: what ``jax.jit(f).lower(...).compile()`` returned, or its text.
        mesh: the mesh that the program was compiled for. Needed only when its text lists device numbers instead of
            mesh axes; the axes of such collectives are None without it.

    Raises:
        ValueError: the text is not a compiled program, or ``mesh`` has another number of devices than the program.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse_module(text)
    axes = mesh_in_text(text)
    if mesh is not None:
        axes = dict(mesh.shape)
        if math.prod(axes.values()) != module.num_devices:
            raise ValueError(
                f"mesh {axes} has {math.prod(axes.values())} devices but the program was compiled for "
                f"{module.num_devices}; pass the mesh that it was compiled for"
            )
    sites = tuple(module.walk())
    return ProgramReport(
        collectives=find_collectives(module, axes),
        memory=None if isinstance(compiled, str) else _memory(compiled),
        matmul_flops=sum(matmul_flops(site) * site.trips for site in sites),
        unknown_loops=tuple(dict.fromkeys(loop.name for site in sites for loop in site.loops if loop.trips is None)),
    )


def _layer_loop(depth: int, loop: Loop, members: list[Collective]) -> LayerLoop:
    counts: Counter = Counter()
    wire_bytes = 0.0
    for member in members:
        inner = math.prod(nested.trips or 1 for nested in member.loops[depth + 1 :])
        counts[member.op, member.axes] += inner
        wire_bytes += member.wire_bytes * inner
    is_backward = any(member.is_backward for member in members)
    return LayerLoop(loop, is_backward, dict(counts), wire_bytes, tuple(members))


def _memory(compiled: Compiled) -> MemoryUse | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    # XLA:CPU leaves all temporaries out of its peak (JAX 0.12), which is then no peak at all.
    without_temporaries = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return MemoryUse(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        peak=peak if peak >= without_temporaries + stats.temp_size_in_bytes // 2 else None,
    )


def matmul_flops(site: Site) -> float:
    """2 x result elements x contracted elements of a dot or of a cuBLAS call; 0 for everything else."""
    instruction = site.instruction
    if instruction.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = [int(dim) for dim in match[1].split(",") if dim] if match else []
    elif instruction.opcode == "custom-call" and 'custom_call_target="__cublas$' in instruction.attributes:
        match = re.search(r'"dot_dimension_numbers":(\{[^}]*\})', instruction.attributes)
        contracted = [int(dim) for dim in json.loads(match[1])["lhs_contracting_dimensions"]] if match else []
    else:
        return 0.0
    lhs = array_types(site.computation.results[instruction.operands[0]])[0]
    result = array_types(instruction.result)[0]
    return 2.0 * math.prod(result.dims) * math.prod(lhs.dims[dim] for dim in contracted)


def _row_key(found: Collective) -> tuple[str, ...]:
    trips = " ".join(f"x{loop.trips or '?'}" for loop in found.loops)
    return (
        found.op,
        "?" if found.axes is None else " ".join(found.axes),
        " ".join(found.dtypes),
        f"loop {trips}" if found.in_loop else "entry",
        "yes" if found.is_async else "no",
    )
