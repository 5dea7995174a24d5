"""Memory of every fsdp strategy and remat mode: what the GPU's compiler needs, beside what `jaxpar plan` says.

    python scripts/memory_table.py                        # prints the table; some minutes on 2 cores, no GPU
    python scripts/memory_table.py --docs docs/memory.md  # also writes it into the page

Llama 3.2 1B of 8 blocks is compiled for fsdp=8 (H100s, none of which is needed) with two microbatches; nothing is run.
Compiled bytes are the compiler's peak of a device, planned bytes are `jaxpar.plan.memory` without its reserve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config import Config, load_config
from jaxpar.experiments.compile import compile_step, gpu_target
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import evaluate_config
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.memory import Memory
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster

STRATEGIES = ("full", "grads", "optimizer")
REMATS = ("full", "selective", "none")
DEVICES = 8
CLUSTER = make_cluster(gpu_named("h100"), num_devices=DEVICES)
GIB = 2**30
BEGIN, END = "<!-- table: scripts/memory_table.py -->\n", "<!-- end of table -->\n"
HEADER = (
    "| fsdp_strategy | remat | compiled | planned | planned / compiled | of it: state, gradients | whole weights "
    "| activations, logits |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def config_of(strategy: str, remat: str) -> Config:
    """The run that a row of the table is about."""
    model = ("model.preset=llama-3.2-1b", "model.num_layers=8", "data.seq_len=4096", "data.pack=false")
    batch = (f"train.global_batch_size={2 * 2 * DEVICES}", "train.microbatches=2", f"train.remat={remat}")
    return load_config(None, [*model, *batch, f"mesh.fsdp={DEVICES}", f"mesh.fsdp_strategy={strategy}"])


def planned(config: Config) -> Memory:
    """The arithmetic."""
    facts = gather_facts(config, num_devices=DEVICES)
    return evaluate_config(facts, shape_of(facts.model), CLUSTER)[1].memory


def used_bytes(memory: Memory) -> float:
    """All but what is left to the driver."""
    return memory.total_bytes - memory.reserve


def planned_cells(memory: Memory) -> list[str]:
    """The parts of the planned bytes, in GiB."""
    state = memory.params + memory.optimizer + memory.grads
    parts = (state, memory.gathered, memory.activations + memory.logits)
    return [f"{part / GIB:.2f}" for part in parts]


def rows() -> Iterator[str]:
    """The table, a line at a time."""
    for strategy in STRATEGIES:
        for remat in REMATS:
            config = config_of(strategy, remat)
            memory, compiled = planned(config), compile_step(config, gpu_target(CLUSTER)).peak_bytes
            total = used_bytes(memory)
            sizes = (f"{compiled / GIB:.2f}", f"{total / GIB:.2f}", f"{total / compiled:.2f}")
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
