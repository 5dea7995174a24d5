"""Reads compiled programs: which collectives run, over which mesh axes, how many bytes, how much memory; and lints.

report = audit(jax.jit(step).lower(state, batch).compile())
report.count("all-gather", axes="fsdp", in_loop=True)
"""

from jaxpar.audit.collectives import OPS, Collective
from jaxpar.audit.compiler_log import (
    Compilations,
    CompilerWarnings,
    Rematerialization,
    capture_compiler_warnings,
    record_compilations,
)
from jaxpar.audit.hlo import ArrayType, Loop
from jaxpar.audit.lints import (
    Finding,
    gathers_of_stacked_weights,
    gathers_outside_loops,
    synchronous_collectives,
    unwanted_wire_dtypes,
    weight_sized_all_reduces,
)
from jaxpar.audit.report import LayerLoop, MemoryUse, ProgramReport, audit

__all__ = [
    "OPS",
    "ArrayType",
    "Collective",
    "Compilations",
    "CompilerWarnings",
    "Finding",
    "LayerLoop",
    "Loop",
    "MemoryUse",
    "ProgramReport",
    "Rematerialization",
    "audit",
    "capture_compiler_warnings",
    "gathers_of_stacked_weights",
    "gathers_outside_loops",
    "record_compilations",
    "synchronous_collectives",
    "unwanted_wire_dtypes",
    "weight_sized_all_reduces",
]
