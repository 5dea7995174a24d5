"""What a pipeline costs: work that is done for nothing, step time beside the same batch without stages, and memory.

    python scripts/bench_pipeline.py             # 4 stages, every schedule, 4 and 32 microbatches: minutes on 2 cores
    python scripts/bench_pipeline.py --steps 0   # all but the times: compiles, runs nothing

On fake CPU devices, in float32; the step without stages spreads the same rows over a data axis.

- lanes: forward and backward passes of a chunk that every stage runs, and how many of them a step needs. A stage that
  has nothing to do in a lane runs it all the same, and throws the result away.
- products: FLOPs of matrix products that a device executes, read from the compiled program, each lane as often as its
  table runs it, over those of the step without stages. Both steps run each layer forward twice, but the second time the
  one without stages leaves out the layer's last product: 6%.
- step time: over that of the step without stages, medians of steps that alternate in one process. Fake devices share
  the cores of this machine, so that time goes with all work that is done, idle stages' included.
- temp memory: of the compiled program, on one device. One row has the same number of tokens whatever the microbatches,
  so the batch grows with them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

NUM_DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax  # noqa: E402 (after the flags that it reads)
import numpy as np  # noqa: E402

from jaxpar.audit.hlo import parse_module  # noqa: E402
from jaxpar.audit.report import matmul_flops  # noqa: E402
from jaxpar.config.schema import Config  # noqa: E402
from jaxpar.plan.resolve import resolve  # noqa: E402
from jaxpar.program import Program  # noqa: E402
from jaxpar.schedule import NOTHING, Schedule, build_schedule  # noqa: E402

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "breadth_first": 2}
"""Chunks per stage."""


def main() -> None:
    """Print one line per number of microbatches and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--embed-dim", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="Timed steps; 0 only compiles.")
    options = parser.parse_args()
    print("| schedule | microbatches | lanes run / needed | products | step time | temp memory, KiB |")
    print("|---|---|---|---|---|---|")
    for microbatches in options.microbatches:
        plain = Compiled(options, microbatches, mesh={"data": options.stages})
        for kind, chunks in SCHEDULES.items():
            pipeline = {"schedule": kind, "chunks": chunks}
            staged = Compiled(options, microbatches, mesh={"pipeline": options.stages}, pipeline=pipeline)
            table = build_schedule(kind, num_stages=options.stages, num_microbatches=microbatches, num_chunks=chunks)
            lanes = f"{int(table.forward_runs.sum() + table.backward_runs.sum())} / {2 * microbatches * chunks}"
            products = staged.products_by_lane(table) / plain.products()
            seconds = "-"
            if options.steps:
                of_staged, of_plain = alternating(staged.stepper(), plain.stepper(), options.steps)
                seconds = f"{of_staged / of_plain:.2f}"
            memory = f"{staged.temp_bytes / 1024:,.0f} (without stages {plain.temp_bytes / 1024:,.0f})"
            print(f"| {kind} | {microbatches} | {lanes} | {products:.2f} | {seconds} | {memory} |", flush=True)


class Compiled:
    """One compiled training step."""

    def __init__(self, options: argparse.Namespace, microbatches: int, *, mesh: dict[str, int], pipeline=None):
        width = options.embed_dim
        config = Config(
            model={
                "vocab_size": 256,
                "embed_dim": width,
                "num_layers": options.layers,
                "num_heads": 4,
                "mlp_dim": 4 * width,
            },
            mesh=mesh,
            pipeline=pipeline or {},
            data={"seq_len": 64},
            train={"microbatches": microbatches, "global_batch_size": options.stages * microbatches},
            precision={"compute": "float32"},
        )
        devices = jax.devices()[: options.stages]
        self._program = Program.build(resolve(config, num_devices=len(devices)), devices)
        self._compiled = self._program.lower_train_step().compile()
        self._sites = list(parse_module(self._compiled.as_text()).walk())
        self.temp_bytes = self._compiled.memory_analysis().temp_size_in_bytes

    def products(self) -> float:
        """FLOPs of all matrix products of a device, as if every branch were taken."""
        return sum(matmul_flops(site) * site.trips for site in self._sites)

    def products_by_lane(self, table: Schedule) -> float:
        """The same, of lanes that run: those of a tick are conditionals, in the order of ``jaxpar.schedule.table``."""
        embedded, lost = (int((column != NOTHING).sum()) for column in (table.embed_microbatch, table.loss_microbatch))
        forward, backward = int(table.forward_runs.sum()), int(table.backward_runs.sum())
        runs = (embedded, forward, lost, embedded, backward, embedded)
        lane, total = -1, 0.0
        for site in self._sites:
            lane += site.instruction.opcode == "conditional"
            if flops := matmul_flops(site):
                total += flops * site.trips / table.num_ticks * runs[lane]
        assert lane == len(runs) - 1, f"{lane + 1} conditionals in a tick"
        return total

    def stepper(self) -> Callable[[], float]:
        """A function that runs one step and returns its seconds."""
        rng = np.random.default_rng(0)
        batch = {
            name: jax.device_put(rng.integers(1, 2, leaf.shape).astype(leaf.dtype), leaf.sharding)
            for name, leaf in self._program.abstract_batch.items()
        }
        state = self._program.init(0)

        def step() -> float:
            nonlocal state
            started = time.perf_counter()
            state, metrics = self._compiled(state, batch)
            jax.block_until_ready(metrics)
            return time.perf_counter() - started

        return step


def alternating(one: Callable[[], float], other: Callable[[], float], steps: int) -> tuple[float, float]:
    """Median seconds of each, after one step of each that is not counted."""
    seconds = [(one(), other()) for _ in range(steps + 1)][1:]
    return tuple(statistics.median(column) for column in zip(*seconds, strict=True))


if __name__ == "__main__":
    main()
