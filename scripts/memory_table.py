"""Memory of every fsdp strategy and remat mode: what the compiler needs, beside what `jaxpar plan` says.

    python scripts/memory_table.py                        # prints the table; some minutes on 2 cores
    python scripts/memory_table.py --docs docs/memory.md  # also writes it into the page

A small Llama is compiled for fsdp=8 (fake CPU devices) in float32 with two microbatches; nothing is run. Compiled bytes
are arguments and temporaries of the fullest device, planned bytes are `jaxpar.plan.memory` without its reserve.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxpar.audit import audit
from jaxpar.config import Config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.layout import layout_of
from jaxpar.plan.memory import Memory, training_memory
from jaxpar.plan.resolve import ResolvedPlan, resolve
from jaxpar.plan.shape import shape_of
from jaxpar.program import Program

STRATEGIES = ("full", "grads", "optimizer")
REMATS = ("full", "selective", "none")
DEVICES = 8
MIB = 2**20
BEGIN, END = "<!-- table: scripts/memory_table.py -->\n", "<!-- end of table -->\n"
HEADER = (
    "| fsdp_strategy | remat | compiled | planned | planned / compiled | of it: state, gradients | whole weights "
    "| activations, logits |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def plan_of(strategy: str, remat: str) -> ResolvedPlan:
    """The run that a row of the table is about; large against what the compiler needs besides, small to compile."""
    config = Config(
        model={
            "family": "llama",
            "vocab_size": 2048,
            "embed_dim": 512,
            "num_layers": 8,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 64,
            "mlp_dim": 1536,
        },
        mesh={"fsdp": DEVICES, "fsdp_strategy": strategy},
        data={"seq_len": 64, "num_samples": 1024},
        train={"global_batch_size": 2 * 16 * DEVICES, "microbatches": 2, "remat": remat, "loss_chunk_tokens": 256},
        precision={"compute": "float32"},
    )
    return resolve(config, num_devices=DEVICES)


def planned(plan: ResolvedPlan) -> Memory:
    """The arithmetic, for a device that keeps nothing back."""
    config = plan.config
    layout = layout_of(gather_facts(config, num_devices=DEVICES))
    chunk = config.train.loss_chunk_tokens
    return training_memory(shape_of(config.model), layout, device_bytes=0, loss_chunk_tokens=chunk)


def compiled_bytes(plan: ResolvedPlan) -> int:
    """Bytes of the fullest device: the arguments, and what the step needs besides."""
    program = Program.build(plan)
    memory = audit(program.lower_train_step().compile(), program.mesh).memory
    return memory.argument + memory.temp


def planned_cells(memory: Memory) -> list[str]:
    """The parts of the planned bytes, in MiB."""
    state = memory.params + memory.optimizer + memory.grads
    parts = (state, memory.gathered, memory.activations + memory.logits)
    return [f"{part / MIB:.1f}" for part in parts]


def rows() -> Iterator[str]:
    """The table, a line at a time."""
    for strategy in STRATEGIES:
        for remat in REMATS:
            plan = plan_of(strategy, remat)
            memory, compiled = planned(plan), compiled_bytes(plan)
            sizes = (f"{compiled / MIB:.1f}", f"{memory.total_bytes / MIB:.1f}", f"{memory.total_bytes / compiled:.2f}")
            yield "| " + " | ".join((strategy, remat, *sizes, *planned_cells(memory))) + " |\n"


def write_into(page: Path, table: str) -> None:
    """Put the table between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table + END + after, encoding="utf-8")


def main() -> None:
    """Compile, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="write the table between its marks in this page")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    jax.config.update("jax_platforms", "cpu")
    sys.stdout.write(HEADER)
    lines = []
    for line in rows():
        sys.stdout.write(line)
        sys.stdout.flush()
        lines.append(line)
    if options.docs:
        write_into(options.docs, HEADER + "".join(lines))


if __name__ == "__main__":
    main()
