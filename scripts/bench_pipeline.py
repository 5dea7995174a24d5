"""What a pipeline costs: memory by microbatches, products executed, and step time beside the same batch without stages.

    python scripts/bench_pipeline.py                                # 2 stages, every schedule, 4 and 32 microbatches
    python scripts/bench_pipeline.py --steps 0 --microbatches 4 32  # memory and products only: compiles, runs nothing

Runs on fake CPU devices, in float32. Memory and products are read from compiled programs, so they hold on any machine;
step times mean something only as ratios to each other, taken in one run. The last two columns are ratios to a mesh of
data axes; products are counted as if every tick ran both its lanes, so they are an upper bound. One row has the same
number of tokens whatever the microbatches, so that the batch grows with them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "breadth_first": 2}


def main() -> None:
    """Print one line per schedule and number of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="Timed steps; 0 only compiles.")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.stages} "
        "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    )
    columns = (
        "schedule",
        "microbatches",
        "idle share",
        "temp memory, KiB",
        "products, both lanes in every tick",
        "time",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|")
    for microbatches in options.microbatches:
        plain = Measured(options, microbatches, mesh={"data": options.stages})
        for schedule in options.schedules:
            measured = Measured(options, microbatches, mesh={"pipeline": options.stages}, schedule=schedule)
            print(measured.line(plain), flush=True)


class Measured:
    """One compiled training step, and its time."""

    def __init__(self, options: argparse.Namespace, microbatches: int, mesh: dict[str, int], schedule: str = "1f1b"):
        # JAX reads the number of fake devices when it is imported.
        from jaxpar.audit import audit
        from jaxpar.config.schema import Config
        from jaxpar.plan.resolve import resolve
        from jaxpar.program import Program

        width = options.embed_dim
        self.schedule, self.microbatches, self.stages = schedule, microbatches, options.stages
        self.chunks = SCHEDULES[schedule] if "pipeline" in mesh else 1
        config = Config(
            model={
                "vocab_size": 256,
                "embed_dim": width,
                "num_layers": options.layers,
                "num_heads": 4,
                "mlp_dim": 4 * width,
            },
            mesh=mesh,
            pipeline={
                "schedule": schedule if self.chunks > 1 or schedule == "gpipe" else "1f1b",
                "chunks": self.chunks,
            },
            data={"seq_len": 64},
            train={"microbatches": microbatches, "global_batch_size": options.stages * microbatches},
            precision={"compute": "float32"},
        )
        program = Program.build(resolve(config, num_devices=options.stages))
        compiled = program.lower_train_step().compile()
        self.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        self.matmul_flops = audit(compiled).matmul_flops
        self.step_s = timed(program, compiled, options.steps) if options.steps else None

    def line(self, plain: Measured) -> str:
        """A row of the table."""
        from jaxpar.schedule import build_schedule

        sizes = {"num_stages": self.stages, "num_microbatches": self.microbatches, "num_chunks": self.chunks}
        idle = float(build_schedule(self.schedule, **sizes).idle_share())
        ratio = f"{self.step_s / plain.step_s:.2f}" if self.step_s else "-"
        return (
            f"| {self.schedule} | {self.microbatches} | {idle:.1%} | {self.temp_bytes / 1024:,.0f} | "
            f"{self.matmul_flops / plain.matmul_flops:.2f} | {ratio} |"
        )


def timed(program, compiled, steps: int) -> float:
    """Median seconds of a step, after one that is not counted."""
    import jax
    import numpy as np

    state = program.init(0)
    rng = np.random.default_rng(0)
    batch = {
        name: jax.device_put(rng.integers(1, 2, leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in program.abstract_batch.items()
    }
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
