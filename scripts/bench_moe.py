"""What a mixture of experts costs: bytes on the expert axis against the least possible, and time against a dense model.

    python scripts/bench_moe.py                 # some minutes on 2 cores
    python scripts/bench_moe.py --steps 2 --json bench_moe.json

1. Bytes that the exchange of tokens sends per token and layer, forward: read from the compiled program of a mesh
   fsdp=2 x expert=4 for each exchange that the CPU has. The lower bound sends every row once to the device of its
   expert: top_k (n - 1) / n rows per token. That is what a ragged all-to-all (GPU) sends when the load is even.
2. Seconds of a step of the mixture and of a dense model with as many active parameters, alternating in one process on
   the same number of fake devices, median of each. The mixture's experts are on the expert axis, the dense model's
   weights on the fsdp axis.

Fake devices share the cores of this machine: only ratios mean something, and nothing here says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

NUM_DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax  # noqa: E402 (after the flags that it reads)
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from jaxpar.audit import audit  # noqa: E402
from jaxpar.config import load_config  # noqa: E402
from jaxpar.plan.experts import rows_moved  # noqa: E402
from jaxpar.plan.parameters import count_parameters  # noqa: E402
from jaxpar.plan.resolve import resolve  # noqa: E402
from jaxpar.program import Program  # noqa: E402

EXPERT, TOP_K, SEQ_LEN, ROWS = 4, 2, 128, 16
SHARED = {
    "vocab_size": 512,
    "embed_dim": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
MIXTURE = SHARED | {"family": "mixtral", "num_experts": 8, "top_k": TOP_K, "mlp_dim": 512, "expert_mlp_dim": 512}
DENSE = SHARED | {"family": "llama", "mlp_dim": TOP_K * 512}


def program_of(model: dict, **mesh: object) -> Program:
    """The program that the Trainer would run."""
    values = {f"model.{name}": value for name, value in model.items()}
    values |= {f"mesh.{name}": value for name, value in mesh.items()}
    values |= {"data.seq_len": SEQ_LEN, "train.global_batch_size": ROWS, "precision.compute": "float32"}
    values |= {"runtime.cpu_devices": NUM_DEVICES}
    config = load_config(None, [f"{name}={value}" for name, value in values.items()])
    return Program.build(resolve(config, num_devices=NUM_DEVICES))


def batch_of(program: Program, seed: int) -> dict[str, jax.Array]:
    """Random tokens, one document per row."""
    tokens = np.random.default_rng(seed).integers(0, SHARED["vocab_size"], (1, ROWS, SEQ_LEN + 1))
    ones, positions = np.ones((1, ROWS, SEQ_LEN)), np.broadcast_to(np.arange(SEQ_LEN), (1, ROWS, SEQ_LEN))
    arrays = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "weights": ones, "segment_ids": ones}
    arrays |= {"positions": positions}
    return {
        name: jax.device_put(arrays[name].astype(leaf.dtype), leaf.sharding)
        for name, leaf in program.abstract_batch.items()
    }


def exchange_rows() -> list[dict[str, object]]:
    """Rows per token, layer and direction that each exchange sends, and what they are of the lower bound."""
    bound = rows_moved("all_to_all", TOP_K, EXPERT)
    measured = [{"exchange": "lower bound", "rows": bound}]
    tokens_per_device = ROWS * SEQ_LEN / NUM_DEVICES
    row_bytes = 4 * SHARED["embed_dim"]
    for mode in ("all_to_all", "gather"):
        program = program_of(MIXTURE, fsdp=2, expert=EXPERT, expert_exchange=mode)
        report = audit(program.lower_train_step().compile(), program.mesh)
        # Rows only: the counts that both ends need are a few integers.
        sent = report.select(axes="expert", in_loop=True, is_backward=False, min_bytes=1024)
        rows = sum(found.wire_bytes for found in sent) / row_bytes / tokens_per_device
        note = "CPU: buffers hold the worst case" if mode == "all_to_all" else ""
        measured.append({"exchange": mode, "rows": rows / 2, "note": note})
    for row in measured:
        row["of the bound"] = row["rows"] / bound
    return measured


def step_times(num_steps: int) -> dict[str, object]:
    """Median seconds of a step of the mixture and of the dense model."""
    programs = {
        "mixture": program_of(MIXTURE, fsdp=2, expert=EXPERT),
        "dense": program_of(DENSE, fsdp=NUM_DEVICES),
    }
    steps = {name: program.lower_train_step().compile() for name, program in programs.items()}
    states = {name: program.init(0) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for index in range(num_steps + 1):
        for name, program in programs.items():
            batch = batch_of(program, index)
            started = time.perf_counter()
            states[name], metrics = steps[name](states[name], batch)
            jax.block_until_ready((states[name], metrics))
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    active = {
        name: count_parameters(program.config.model).active(program.config.model) for name, program in programs.items()
    }
    return {"seconds": medians, "ratio": medians["mixture"] / medians["dense"], "active_params": active}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    exchange, times = exchange_rows(), step_times(arguments.steps)
    console = Console(width=120)
    table = Table(title=f"rows per token, layer and direction, expert={EXPERT}, top_k={TOP_K}", box=None)
    for heading in ("exchange", "rows", "of the bound", "note"):
        table.add_column(heading, justify="left" if heading in ("exchange", "note") else "right")
    for row in exchange:
        table.add_row(
            str(row["exchange"]), f"{row['rows']:.2f}", f"{row['of the bound']:.2f}", str(row.get("note", ""))
        )
    console.print(table)
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in times["seconds"].items())
    active = ", ".join(f"{name} {value:,}" for name, value in times["active_params"].items())
    console.print(f"step: {seconds}, ratio {times['ratio']:.2f}; active parameters: {active}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"exchange": exchange, "step": times}, indent=2) + "\n")


if __name__ == "__main__":
    main()
