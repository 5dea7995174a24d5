"""``jaxpar train --sharding``: how every array of the training state lies on the mesh."""

from __future__ import annotations

import dataclasses
import json

from rich.table import Table

from jaxpar.cli.output import output_console
from jaxpar.config import Config
from jaxpar.data.dataset import tokenizer_vocab_size
from jaxpar.plan.resolve import check, resolve
from jaxpar.program import Program
from jaxpar.runtime.start import start
from jaxpar.sharding import sharding_report

NEGLIGIBLE_SHARE = 0.001
"""Replicated share of the bytes that is not worth a word: norm scales of a real model stay below it."""


def print_sharding(config: Config, as_json: bool) -> None:
    """Print spec and bytes per device of every leaf, and the bytes that are replicated and need not be."""
    check(config)
    vocab_size = config.model.vocab_size or tokenizer_vocab_size(config.data)
    processes = start(config.runtime)
    plan = resolve(config, num_devices=processes.global_devices, tokenizer_vocab_size=vocab_size)
    program = Program.build(plan)
    state = program.abstract_state
    report = sharding_report({"params": state.params, "optimizer": state.optimizer}, program.mesh)
    if as_json:
        print(
            json.dumps(
                {"mesh": dict(plan.mesh), **dataclasses.asdict(report), "unsharded_share": report.unsharded_share}
            )
        )
        return
    table = Table(title=" x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device")
    for column in ("array", "shape", "dtype", "partition spec"):
        table.add_column(column, overflow="fold")
    for column in ("copies", "bytes per device"):
        table.add_column(column, justify="right")
    for leaf in report.leaves:
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        table.add_row(leaf.path, shape, leaf.dtype, leaf.spec, str(leaf.num_copies), f"{leaf.bytes_per_device:,}")
    console = output_console()
    console.print(table)
    console.print(f"{report.bytes_per_device:,} bytes of training state per device")
    share = (
        f"{report.unsharded_bytes:,} bytes per device ({report.unsharded_share:.2%}) are in arrays that no axis shards"
    )
    small = report.unsharded_share < NEGLIGIBLE_SHARE or not report.unsharded_bytes
    console.print(
        f"{share}: {'norm scales, negligible' if small else 'norm scales and scalars weigh much in so small a model'}"
    )
