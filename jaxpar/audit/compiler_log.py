"""What the compiler says and how often it runs: SPMD warnings from its C++ log, and a record of JAX's compilations."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@dataclass(frozen=True)
class Rematerialization:
    """The SPMD partitioner replicated a whole tensor to change its sharding ("involuntary full rematerialization")."""

    op_name: str
    """Where the tensor comes from in JAX terms, e.g. ``jit(step)/sin``."""
    hlo_name: str
    """Name of the HLO instruction that makes the tensor."""
    local_shape: str
    """Type and dims as one device holds it before the change, e.g. ``f32[8,16,4]``."""
    global_shape: tuple[int, ...] | None
    """Dims of the whole tensor, or None when the sharding notation does not tell."""
    source_sharding: str
    target_sharding: str

    def __str__(self) -> str:
        shape = (
            self.local_shape if self.global_shape is None else f"{list(self.global_shape)} ({self.local_shape} each)"
        )
        return (
            f"the compiler replicates the whole tensor {shape} made by {self.op_name or self.hlo_name} to go from "
            f"{self.source_sharding} to {self.target_sharding}; reshard it in steps that it can do, or in a shard_map"
        )


@dataclass
class CompilerWarnings:
    """What ``capture_compiler_warnings`` saw; complete when its ``with`` block has ended."""

    text: str = ""
    """Everything written to stderr by the process in the block."""
    hidden_by: str | None = None
    """The setting that keeps compiler warnings from being written at all, e.g. ``TF_CPP_MIN_LOG_LEVEL=2``; no findings
    then mean nothing."""
    rematerializations: tuple[Rematerialization, ...] = ()


@dataclass
class Compilations:
    """Functions that JAX traced and compiled while ``record_compilations`` was active."""

    trace_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each trace by function name, nested ``jit`` functions included."""
    lower_s: dict[str, list[float]] = field(default_factory=dict)
    compile_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each compilation (or load from the compilation cache) by function name."""

    def count(self, name: str) -> int:
        """How many executables were made of the jitted function ``name``."""
        return len(self.compile_s.get(name, ()))

    def seconds(self, name: str) -> float:
        """Seconds of tracing, lowering and compiling ``name``, all executables together."""
        return sum(sum(table.get(name, ())) for table in (self.trace_s, self.lower_s, self.compile_s))


@contextlib.contextmanager
def capture_compiler_warnings() -> Iterator[CompilerWarnings]:
    """Collects the compiler's warnings about sharding from the process's stderr (file descriptor 2).

    XLA reports a full rematerialisation only there, from C++, and does not raise. Everything still reaches the real
    stderr at once, through a ``tee`` process of its own, so that the last words of a compiler that aborts are not lost.
    JAX's compilation cache is not used in the block: what it holds is not compiled and would give no warnings.

        with capture_compiler_warnings() as warnings:
            compiled = lowered.compile()
        for finding in warnings.rematerializations: ...
    """
    warnings = CompilerWarnings(hidden_by=_log_level_that_hides_warnings())
    with tempfile.TemporaryDirectory(prefix="jaxpar-stderr-") as directory:
        copy = Path(directory, "stderr")
        try:
            with _teed_stderr(copy), _without_compilation_cache():
                yield warnings
        finally:
            warnings.text = copy.read_text(errors="replace") if copy.exists() else ""
            warnings.rematerializations = find_rematerializations(warnings.text)


@contextlib.contextmanager
def record_compilations() -> Iterator[Compilations]:
    """Records every trace and compilation in the block, by the name of the jitted function.

    with record_compilations() as compilations:
        run_three_steps()
    assert compilations.count("train_step") == 1
    """
    record = Compilations()
    tables = {
        "/jax/core/compile/jaxpr_trace_duration": record.trace_s,
        "/jax/core/compile/jaxpr_to_mlir_module_duration": record.lower_s,
        "/jax/core/compile/backend_compile_duration": record.compile_s,
    }

    def listen(event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event in tables:
            # Traces are named "step", compilations "jit(step)".
            name = re.sub(r"^\w+\((.*)\)$", r"\1", fun_name)
            tables[event].setdefault(name, []).append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield record
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def find_rematerializations(log: str) -> tuple[Rematerialization, ...]:
    """The "Involuntary full rematerialization" warnings of a compiler log, old and new wording, in order."""
    return tuple(
        Rematerialization(
            op_name=_first(r'op_name="([^"]*)"', match["rest"]),
            hlo_name=match["name"],
            local_shape=match["shape"],
            global_shape=_global_shape(match["shape"], match["source"]),
            source_sharding=match["source"],
            target_sharding=match["target"],
        )
        for match in _REMATERIALIZATION.finditer(log)
    )


_REMATERIALIZATION = re.compile(
    r"\[spmd\] Involuntary full rematerialization\.[^\n]*? from sharding (?P<source>\{.*?\}) to (?P<target>\{.*?\}) "
    r"(?:efficiently|without)[^\n]*?operation:? %?(?P<name>[\w.\-]+) = (?P<shape>\w+\[[\d,]*\])(?P<rest>[^\n]*)",
    re.IGNORECASE,
)


def _global_shape(local: str, sharding: str) -> tuple[int, ...] | None:
    """Multiplies local dims by the number of shards of each dim.

    Two notations: ``{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}`` and ``{devices=[2,1,4]<=[4,2]T(1,0)}``; the latter can
    have one more dim at the end, over which the tensor is replicated.
    """
    dims = [int(dim) for dim in _first(r"\[([\d,]*)\]", local).split(",") if dim]
    mesh = re.search(r"mesh\[([^\]]*)\], \[(.*)\]", sharding)
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'?([^',= ]+)'?=(\d+)", mesh[1])}
        shards = []
        for axes in re.findall(r"\{([^}]*)\}", mesh[2])[: len(dims)]:
            count = 1
            for name, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes):
                count *= int(part) if part else sizes[name]
            shards.append(count)
    elif tiles:
        shards = [int(count) for count in tiles[1].split(",")][: len(dims)]
    else:
        return None
    if len(shards) != len(dims):
        return None
    return tuple(dim * count for dim, count in zip(dims, shards, strict=True))


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _log_level_that_hides_warnings() -> str | None:
    """XLA's log level: 0 all, 1 warnings and errors (JAX's default), 2 errors only."""
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    return f"TF_CPP_MIN_LOG_LEVEL={level}" if level.isdigit() and int(level) >= 2 else None


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Has JAX compile everything; it looks at the setting only once after a reset."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _teed_stderr(copy: Path) -> Iterator[None]:
    """Sends file descriptor 2 to itself and to the file ``copy``."""
    sys.stderr.flush()
    original = os.dup(2)
    # Its own session: Ctrl-C must not end it before the process that it serves.
    tee = subprocess.Popen(
        ["tee", str(copy)], stdin=subprocess.PIPE, stdout=original, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        os.dup2(tee.stdin.fileno(), 2)
        tee.stdin.close()
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        # A child process that inherited the pipe can keep it open; its output is forwarded on, but not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(timeout=1)
