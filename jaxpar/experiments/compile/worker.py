"""The process that compiles: ``python -m jaxpar.experiments.compile.worker REQUEST RESULT``, both JSON files."""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import topologies

from jaxpar.audit import Collective, ProgramReport, audit, capture_compiler_warnings
from jaxpar.audit.hlo import Instruction, parse_module
from jaxpar.audit.program_lints import hidden_share
from jaxpar.config import load_config
from jaxpar.experiments.children import end_with_parent
from jaxpar.experiments.compile.findings import find_lints
from jaxpar.experiments.compile.outcome import CollectiveRow, CompileOutcome
from jaxpar.experiments.compile.pretend import as_if_on
from jaxpar.experiments.compile.targets import GpuTarget, Target
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program

GPU_OPTIONS: dict[str, bool | int | str] = {"xla_gpu_autotune_level": 0}
"""Without a GPU there is nothing to time kernels on."""


def main(request: str, result: str) -> None:
    """Compiles what the request file says and writes the outcome."""
    end_with_parent()
    asked = json.loads(Path(request).read_text())
    target = _target(asked["target"])
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(asked["config"])
        file.flush()
        config = load_config(file.name, [])
    plan = resolve(config, num_devices=target.num_devices)
    devices = target_devices(target)
    with as_if_on(devices[0]):
        outcome = compile_program(Program.build(plan, devices), target)
    Path(result).write_text(json.dumps(outcome.to_dict()))


def target_devices(target: Target) -> Sequence[jax.Device]:
    """Devices to compile for; nothing can run on those of a GPU."""
    if target.gpu is None:
        jax.config.update("jax_num_cpu_devices", target.num_devices)
        return jax.devices("cpu")[: target.num_devices]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.gpu.description(), topology=target.topology
    )
    return topology.devices


def compile_program(program: Program, target: Target) -> CompileOutcome:
    """Compiles the train step and reads what came out."""
    options = dict(GPU_OPTIONS) if target.gpu is not None else {}
    started = time.perf_counter()
    lowered = program.lower_train_step()
    traced = time.perf_counter()
    with capture_compiler_warnings() as warnings:
        compiled = lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - traced
    instructions = [site.instruction for site in parse_module(compiled.as_text()).walk()]
    report = audit(compiled, program.mesh)
    memory = report.memory
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return CompileOutcome(
        target=target.label,
        peak_bytes=memory.total,
        argument_bytes=memory.argument,
        temp_bytes=memory.temp,
        collectives=collective_rows(report),
        wire_bytes=report.wire_bytes_per_step(),
        hidden_share=hidden_share(report) if target.gpu is not None else None,
        conditionals=sum(instruction.opcode == "conditional" for instruction in instructions),
        custom_calls=custom_calls(instructions),
        attention=program.attention.reason,
        grouped=program.grouped.reason if program.grouped else None,
        options={**program.options.values, **options},
        lints=find_lints(program, report, lowered, warnings, target),
        lower_s=traced - started,
        compile_s=compile_s,
        cpu_s=sum(usage.ru_utime + usage.ru_stime for usage in usages),
        max_rss_bytes=max(usage.ru_maxrss for usage in usages) * 1024,
    )


def custom_calls(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Number of instructions by the kernel that they call; of Pallas kernels (``mosaic_gpu_v2 NAME``) by their name."""
    names = []
    for instruction in instructions:
        target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
        if instruction.opcode == "custom-call" and target:
            kernel = re.search(r"([^/]+)/mpmd_map$", instruction.op_name)
            names.append(f"{target[1]} {kernel[1]}" if kernel else target[1])
    return dict(Counter(names))


def collective_rows(report: ProgramReport) -> tuple[CollectiveRow, ...]:
    """Collectives grouped by what they do and where, in schedule order."""
    groups: dict[tuple, list[Collective]] = {}
    for found in report.collectives:
        axis = None if found.axes is None else "+".join(found.axes)
        loop = ("backward" if found.is_backward else "forward") if found.in_loop else None
        key = (found.op, axis, loop, found.trips, "+".join(found.dtypes), found.is_async)
        groups.setdefault(key, []).append(found)
    return tuple(
        CollectiveRow(
            op=op,
            axis=axis,
            loop=loop,
            trips=trips,
            count=len(members),
            bytes=sum(member.bytes for member in members),
            dtype=dtype,
            is_async=is_async,
            overlapped=min(member.compute_between for member in members),
            products=min(member.products_between for member in members),
        )
        for (op, axis, loop, trips, dtype, is_async), members in groups.items()
    )


def _target(values: dict) -> Target:
    gpu = values["gpu"]
    if gpu is not None:
        gpu = GpuTarget(**{**gpu, "capability": tuple(gpu["capability"])})
    return Target(**{**values, "gpu": gpu})


if __name__ == "__main__":
    main(*sys.argv[1:])
