r"""Measures compiler options on the H100 program, without a GPU: what they hide, and what they cost in memory.

    PYTHONPATH=.venv/gpu-compiler .venv/bin/python scripts/compiler_options.py \
        model.preset=llama-3.1-8b model.num_layers=8 data.seq_len=8192 mesh.fsdp=8 train.global_batch_size=8

Prints a table for docs/compile.md; the choice is made in jaxpar/plan/compiler_options.py. One trace of the step is
compiled under each set of options. What a compiler schedules is an estimate, not a measurement.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX: there is no GPU to look for

from jaxpar.audit import audit
from jaxpar.audit.lints import synchronous_collectives
from jaxpar.audit.program_lints import hidden_share
from jaxpar.config import load_config
from jaxpar.experiments.compile.pretend import as_if_on
from jaxpar.experiments.compile.targets import gpu_target
from jaxpar.experiments.compile.worker import GPU_OPTIONS, target_devices
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.compiler_options import PLAIN, WITH_TENSOR
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.resolve import resolve
from jaxpar.plan.topology import make_cluster
from jaxpar.program import Program

GIB = 2**30
PIPELINED, IN_PLACE = "COLLECTIVE_PIPELINING_MODE_ON", "COLLECTIVE_PIPELINING_MODE_OFF"
CASES = {
    "compiler's own": {},
    "gathers pipelined": {"xla_gpu_pipeline_all_gather": PIPELINED},
    "reduce-scatters in place (PLAIN)": PLAIN,
    "both in place": {**PLAIN, "xla_gpu_pipeline_all_gather": IN_PLACE},
    "gathers pipelined, reduce-scatters in place": {**PLAIN, "xla_gpu_pipeline_all_gather": PIPELINED},
    "reduce-scatters one by one": {"xla_gpu_reduce_scatter_combine_threshold_bytes": 1},
    "reduce-scatters in place, one by one (WITH_TENSOR)": WITH_TENSOR,
}


def main() -> None:
    """Compile every case and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE")
    parser.add_argument("--gpu", default="h100")
    arguments = parser.parse_args()
    config = load_config(None, arguments.overrides)
    num_devices = math.prod(gather_facts(config).mesh.values())
    target = gpu_target(make_cluster(gpu_named(arguments.gpu), num_devices=num_devices))
    devices = target_devices(target)
    print(f"{target.label}\n{' '.join(arguments.overrides)}\n")
    print("| options | hidden | exposed in loops, 1 MiB or more | peak GiB |\n|---|---|---|---|")
    with as_if_on(devices[0]):
        program = Program.build(resolve(config, num_devices=num_devices), devices)
        # The table's own choice must not be in the way.
        lowered = program.with_options({}).lower_train_step()
        for name, options in CASES.items():
            report = audit(lowered.compile(compiler_options={**GPU_OPTIONS, **options}), program.mesh)
            exposed = [found.collective for found in synchronous_collectives(report) if found.collective.in_loop]
            named = ", ".join(f"{found.op} over {'+'.join(found.axes)}" for found in exposed) or "none"
            print(f"| {name} | {hidden_share(report):.1%} | {named} | {report.memory.total / GIB:.2f} |", flush=True)


if __name__ == "__main__":
    main()
