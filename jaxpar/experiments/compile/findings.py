"""Which lints apply to the train step of a config, and with what thresholds."""

from __future__ import annotations

import math

import jax

from jaxpar.audit import (
    Collective,
    CompilerWarnings,
    Finding,
    ProgramReport,
    gathers_of_stacked_weights,
    gathers_outside_loops,
    unwanted_wire_dtypes,
    weight_sized_all_reduces,
)
from jaxpar.audit.program_lints import (
    exposed_collectives,
    gather_storms,
    masked_products,
    memory_above_budget,
    recompiles,
    rematerializations,
    replicated_arrays,
)
from jaxpar.experiments.compile.outcome import Lint
from jaxpar.experiments.compile.targets import Target
from jaxpar.mesh import used_axes
from jaxpar.plan.context import resolved_context_mode
from jaxpar.plan.flops import training_flops_per_token
from jaxpar.program import Program
from jaxpar.sharding import CONTEXT_AXIS, GATHER_AXES, PIPELINE_AXIS, axes_of

_HLO_TYPES = {"float32": "f32", "bfloat16": "bf16"}
_INDICES = {"s32", "u32", "pred", "s8", "u8"}
_SMALL_BYTES = 2**20
"""Norms, losses and other small arrays travel in float32 whatever the config says."""


def find_lints(
    program: Program,
    report: ProgramReport,
    lowered: jax.stages.Lowered,
    warnings: CompilerWarnings,
    target: Target,
) -> tuple[Lint, ...]:
    """Everything that is wrong with the compiled step of ``program``."""
    findings = [
        *_weight_lints(program, report, target),
        *_wire_lints(program, report, target),
        *rematerializations(warnings),
        *replicated_arrays(program.abstract_state, program.mesh),
        *recompiles(program.abstract_state, lowered.out_info[0]),
        *_product_lints(program, report),
        *_memory_lints(program, report, target),
    ]
    return tuple(Lint(rule=finding.rule, message=_message(finding)) for finding in findings)


def layers_per_loop(program: Program) -> int:
    """Trips of the loops over layers: those of one chunk of a pipeline stage."""
    chunks = program.config.pipeline.chunks if program.plan.mesh["pipeline"] > 1 else 1
    return program.config.model.num_layers // (program.plan.mesh["pipeline"] * chunks)


def _weight_lints(program: Program, report: ProgramReport, target: Target) -> list[Finding]:
    """Gathers and gradients of weights; gathers of activations are over other axes."""
    mesh, config = program.mesh, program.config
    if not used_axes(mesh, GATHER_AXES):
        return []
    # The CPU compiler widens bfloat16.
    compute = 4 if config.precision.compute == "float32" or target.gpu is None else 2
    layers = jax.tree.leaves(program.abstract_state.params["layers"])
    sizes = [math.prod(leaf.shape[1:]) * compute for leaf in layers if _is_gathered(leaf)]
    whole = {leaf.sharding.shard_shape(leaf.shape) for leaf in layers if not _is_gathered(leaf)}
    num_layers = layers_per_loop(program)
    context = mesh.shape[CONTEXT_AXIS]
    context_mode = resolved_context_mode(config.mesh.context_mode, config.data.seq_len / context)
    gathers_keys = context > 1 and context_mode == "allgather"
    stack = num_layers * min(sizes) // mesh.shape["tensor"]
    table = program.plan.padded_vocab_size * config.model.embed_dim * compute
    gathers = [
        *gathers_of_stacked_weights(report, num_layers=num_layers, min_bytes=stack),
        *gathers_outside_loops(report, max_bytes=table),
    ]
    if program.strategy.name != "full":  # once per step all weights are gathered, outside of any loop
        gathers = []
    return [
        *(found for found in gathers if set(found.collective.axes or GATHER_AXES) & set(GATHER_AXES)),
        *weight_sized_all_reduces(report, weight_bytes=min(sizes), whole=whole),
        *gather_storms(report, num_layers=num_layers, matrices_per_layer=len(sizes) + gathers_keys),
    ]


def _is_gathered(leaf: jax.ShapeDtypeStruct) -> bool:
    return any(set(axes_of(entry)) & set(GATHER_AXES) for entry in leaf.sharding.spec.partitions)


def _wire_lints(program: Program, report: ProgramReport, target: Target) -> list[Finding]:
    """Types on the wire, and collectives that nothing hides. The CPU compiler widens bfloat16 and makes none async."""
    if target.gpu is None:
        return []
    precision = program.config.precision
    compute = {_HLO_TYPES[precision.compute], *_INDICES}
    reduce = {*compute, _HLO_TYPES[precision.reduce]}
    wrong = [
        finding
        for op in ("all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
        for finding in unwanted_wire_dtypes(report, allowed=compute, op=op, min_bytes=_SMALL_BYTES)
        if not (_is_ring(finding.collective) and set(finding.collective.dtypes) <= reduce)
        if not _is_placement(finding.collective)
    ]
    for op in ("reduce-scatter", "all-reduce"):
        wrong += unwanted_wire_dtypes(report, allowed=reduce, op=op, min_bytes=_SMALL_BYTES)
    return [*wrong, *exposed_collectives(report)]


def _is_ring(found: Collective) -> bool:
    """Ring attention sums gradients of keys and values up as it passes them on: permutes that reduce."""
    return found.op == "collective-permute" and set(found.axes or ()) == {CONTEXT_AXIS}


def _is_placement(found: Collective) -> bool:
    """Master weights on their way to the stage that runs them, and gradients back, once per step."""
    return found.op == "collective-permute" and set(found.axes or ()) == {PIPELINE_AXIS} and not found.in_loop


def _product_lints(program: Program, report: ProgramReport) -> list[Finding]:
    """Experts computed as masked dense products: three forwards and one recomputation are expected."""
    config = program.config
    if not config.model.num_experts:
        return []
    flops = training_flops_per_token(config.model, config.data.seq_len, "B")
    per_device = flops * program.plan.tokens_per_step / program.plan.num_devices
    return list(masked_products(report, expected_flops=4 / 3 * per_device))


def _memory_lints(program: Program, report: ProgramReport, target: Target) -> list[Finding]:
    if target.gpu is None:
        return []
    budget = program.config.runtime.memory_fraction * target.gpu.memory
    return list(memory_above_budget(report, budget_bytes=budget))


def _message(finding: Finding) -> str:
    return str(finding).removeprefix(f"{finding.rule}: ")
