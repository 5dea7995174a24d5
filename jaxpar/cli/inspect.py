"""``jaxpar inspect``: what a checkpoint holds, without loading it."""

from __future__ import annotations

import dataclasses
import json

from rich.table import Table

from jaxpar.checkpoint.describe import Description, describe
from jaxpar.cli.output import output_console
from jaxpar.cli.sizes import readable_bytes, readable_count


def print_description(path: str, step: int | None, as_json: bool) -> None:
    """Print steps, arrays, data position and config of a checkpoint."""
    found = describe(path, step)
    if as_json:
        print(json.dumps(_as_json(found)))
        return
    console = output_console()
    console.print(_heading(found), highlight=False)
    table = Table()
    for column in ("array", "shape", "dtype", "saved as", "chunk"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    for name, leaf in found.leaves.items():
        shape, chunk = (" x ".join(map(str, dims)) or "scalar" for dims in (leaf.shape, leaf.read_chunk))
        table.add_row(name, shape, leaf.dtype.name, leaf.sharding or "-", chunk, f"{leaf.nbytes:,}")
    console.print(table)
    for name, why in found.unreadable.items():
        console.print(f"cannot be opened: {name}: {why}", highlight=False)


def _heading(found: Description) -> str:
    metadata = found.metadata
    writer = f"jaxpar {metadata.get('jaxpar', '')}" if found.by_jaxpar else "another Orbax trainer: no checksums"
    lines = [str(found.directory), f"  written by   {writer}"]
    lines.append(f"  complete     {', '.join(f'step {step}' for step in found.steps) or 'no step'}")
    lines += [f"  passed over  step {step}: {why}" for step, why in found.skipped]
    lines += [f"  set aside    {line}" for line in found.left_aside]
    if found.step is not None:
        lines.append(f"step {found.step}")
    lines.append(f"  size         {readable_bytes(found.num_bytes)} in {len(found.leaves)} arrays")
    if found.num_params is not None:
        lines.append(f"  parameters   {readable_count(found.num_params)}")
    if position := metadata.get("position"):
        tokens = f", {metadata['tokens_seen']:,} tokens seen" if "tokens_seen" in metadata else ""
        lines.append(f"  data         sample {position['offset']:,} of epoch {position['epoch']}{tokens}")
    if mesh := metadata.get("mesh"):
        sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
        lines.append(f"  saved on     {sizes or 'one device'}")
    for name, value in metadata.get("metrics", {}).items():
        lines.append(f"  {name:<12} {value:.4f}")
    if model := metadata.get("config", {}).get("model"):
        lines.append(
            f"  model        {model['preset'] or model['family']}: {model['num_layers']} layers, width "
            f"{model['embed_dim']}, {model['num_heads']} heads ({model['num_kv_heads']} kv), vocabulary "
            f"{model['vocab_size']}"
        )
    return "\n".join(lines)


def _as_json(found: Description) -> dict[str, object]:
    return {
        "directory": str(found.directory),
        "by_jaxpar": found.by_jaxpar,
        "steps": list(found.steps),
        "skipped": [{"step": step, "reason": why} for step, why in found.skipped],
        "left_aside": list(found.left_aside),
        "latest": found.latest,
        "complete": found.complete,
        "step": found.step,
        "bytes": found.num_bytes,
        "params": found.num_params,
        "format_version": found.metadata.get("format_version"),
        "position": found.metadata.get("position"),
        "tokens_seen": found.metadata.get("tokens_seen"),
        "tree": [
            {"name": name, "bytes": leaf.nbytes, **dataclasses.asdict(leaf) | {"dtype": leaf.dtype.name}}
            for name, leaf in found.leaves.items()
        ],
        "unreadable": dict(found.unreadable),
        "metadata": dict(found.metadata),
    }
