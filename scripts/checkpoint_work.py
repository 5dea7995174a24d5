"""One measured piece of scripts/bench_checkpoint.py, in a process of its own; prints JSON.

    python scripts/checkpoint_work.py speed DIRECTORY --gb 2 --rounds 5
    python scripts/checkpoint_work.py reads DIRECTORY/store --gb 2 --mesh fsdp=16

``speed`` saves a Llama-like training state, sharded on 8 fake CPU devices as `jaxpar train` has it, through jaxpar's
Store, through tensorstore alone (the same shards, chunks and format), and as a safetensors file, and reads all three
back onto the same devices, in turns. ``reads`` counts the bytes that the devices of another mesh read to restore it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
import tensorstore as ts
from safetensors import safe_open

from jaxpar.checkpoint.arrays import StepArrays, StoredArray, array_spec
from jaxpar.checkpoint.chunks import as_index, within
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.checkpoint.store import Store
from jaxpar.cli.reshard import parse_mesh
from jaxpar.config import load_config
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.resume import SECTIONS, stored_shapes

MODEL = {
    "model.vocab_size": 8192,
    "model.embed_dim": 1024,
    "model.num_heads": 16,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.mlp_dim": 2816,
    "model.tie_embeddings": True,
    "data.seq_len": 64,
}
PARAMS_OF_EMBEDDING, PARAMS_PER_LAYER, BYTES_PER_PARAM = 8_389_632, 11_274_240, 12
SAVING_MESH = {"fsdp": 8}

Leaves = dict[str, jax.Array]


def build_program(gb: float, mesh: Mapping[str, int]) -> Program:
    """The program whose training state has about ``gb`` gigabytes; as many fake CPU devices as the mesh has."""
    num_layers = max(1, round((gb * 1e9 / BYTES_PER_PARAM - PARAMS_OF_EMBEDDING) / PARAMS_PER_LAYER))
    num_devices = math.prod(mesh.values())
    settings = MODEL | {"model.num_layers": num_layers, "runtime.cpu_devices": num_devices}
    settings |= {f"mesh.{axis}": size for axis, size in mesh.items()} | {"train.global_batch_size": num_devices}
    config = load_config(None, [f"{key}={str(value).lower()}" for key, value in settings.items()])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    return Program.build(resolve(config, num_devices=num_devices))


def make_state(program: Program) -> dict[str, object]:
    """Sections of a state whose every leaf is full of numbers that do not repeat."""
    abstract = {name: getattr(program.abstract_state, name) for name in SECTIONS}
    leaves, structure = jax.tree.flatten(abstract)
    rng = np.random.default_rng(0)
    block = rng.standard_normal(2**20, np.float32)

    def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        offset = rng.standard_normal()

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, leaf.shape, strict=True))
            return np.resize(block + offset, shape).astype(leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.block_until_ready(jax.tree.unflatten(structure, [values(leaf) for leaf in leaves]))


def named(sections: Mapping[str, object]) -> dict:
    """Leaves by name."""
    return {
        path_string(section, path): leaf
        for section, tree in sections.items()
        for path, leaf in leaves_by_path(tree, section).items()
    }


@dataclasses.dataclass
class Timed:
    """What one call took."""

    seconds: float
    cpu_seconds: float
    """Of all threads of this process; other processes disturb it less."""


def timed(work: Callable[[], object]) -> Timed:
    """Runs it, and waits for the arrays that it returns."""
    started, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(work())
    return Timed(time.perf_counter() - started, time.process_time() - cpu)


def write_tensorstore(place: Path, leaves: Leaves, types: Mapping[str, StoredArray]) -> None:
    """The shards as they are on the devices, in the chunks that the Store chose; nothing around them."""
    context = tensorstore_context()
    writes = []
    for name, leaf in leaves.items():
        spec = array_spec(place, name, zarr3=True, ocdbt=True)
        spec["kvstore"]["config"] = {"compression": None}
        spec["metadata"] = {
            "shape": leaf.shape,
            "data_type": leaf.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": types[name].read_chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        array = ts.open(spec, create=True, context=context).result()
        writes += [
            array[shard.index].write(np.asarray(shard.data), can_reference_source_data_indefinitely=True)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
    for write in writes:
        write.result()


def read_tensorstore(place: Path, forms: Mapping[str, jax.ShapeDtypeStruct]) -> Leaves:
    """Every shard that a device holds, each once, all at once."""
    context = tensorstore_context()
    opening = {
        name: ts.open(array_spec(place, name, zarr3=True, ocdbt=True), open=True, read=True, context=context)
        for name in forms
    }
    reads = {}
    for name, form in forms.items():
        array = opening[name].result()
        for index in form.sharding.addressable_devices_indices_map(form.shape).values():
            if (name, str(index)) not in reads:
                reads[name, str(index)] = array[index].read()
    return {
        name: jax.make_array_from_single_device_arrays(
            form.shape,
            form.sharding,
            [
                jax.device_put(reads[name, str(index)].result(), device)
                for device, index in form.sharding.addressable_devices_indices_map(form.shape).items()
            ],
        )
        for name, form in forms.items()
    }


def tensorstore_context() -> ts.Context:
    """As Orbax has it."""
    return ts.Context({"file_io_concurrency": {"limit": 128}, "cache_pool#index": {"total_bytes_limit": 100_000_000}})


def write_safetensors(file: Path, leaves: Leaves) -> None:
    """One file, flushed to the disk as the other two are."""
    safetensors.numpy.save_file({name: on_host(leaf) for name, leaf in leaves.items()}, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def on_host(array: jax.Array) -> np.ndarray:
    """The whole array; np.asarray would also keep that copy for as long as the array lives."""
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole


def read_safetensors(file: Path, forms: Mapping[str, jax.ShapeDtypeStruct]) -> Leaves:
    """Tensor by tensor, each whole on the host and then sharded."""
    with safe_open(file, "np") as tensors:
        return {name: jax.device_put(tensors.get_tensor(name), form.sharding) for name, form in forms.items()}


def measure_speed(directory: Path, gb: float, rounds: int) -> dict[str, object]:
    """Times of every side by name, a list over rounds; leaves a checkpoint of step 0 in ``directory/store``."""
    program = build_program(gb, SAVING_MESH)
    state = make_state(program)
    leaves = named(state)
    forms = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in leaves.items()}
    abstract = {name: getattr(program.abstract_state, name) for name in SECTIONS}
    shapes = stored_shapes(program, state)
    metadata = {"mesh": dict(program.plan.mesh), "config": dataclasses.asdict(program.config)}
    copy = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.copy(), tree))
    next_step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf[(0,) * leaf.ndim], tree))
    times: dict[str, list[Timed]] = {}

    def take(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(work))

    with Store(directory / "store") as store:
        store.save(0, state, metadata, stored_shapes=shapes)
        store.wait()
        types = StepArrays(directory / "store" / "0").types
        write_tensorstore(directory / "tensorstore", leaves, types)
        write_safetensors(directory / "safetensors", leaves)
        jax.block_until_ready([copy(state), next_step(state)])  # compiled before it is timed
        store.restore(0, abstract, stored_shapes=shapes)
        for number in range(1, rounds + 1):
            take("copy", lambda: copy(state))
            started, cpu = time.perf_counter(), time.process_time()
            take("save returns", lambda: store.save(number, state, metadata, stored_shapes=shapes))  # noqa: B023
            jax.block_until_ready(next_step(state))
            times.setdefault("next step done", []).append(Timed(time.perf_counter() - started, 0.0))
            store.wait()
            saved = Timed(time.perf_counter() - started, time.process_time() - cpu)
            times.setdefault("save, Store", []).append(saved)
            shutil.rmtree(directory / "store" / str(number))
            shutil.rmtree(directory / "tensorstore")
            take("save, tensorstore", lambda: write_tensorstore(directory / "tensorstore", leaves, types))
            take("save, safetensors", lambda: write_safetensors(directory / "safetensors", leaves))
            sides = {
                "restore, Store": lambda: store.restore(0, abstract, stored_shapes=shapes),
                "restore, Store unverified": lambda: store.restore(0, abstract, stored_shapes=shapes, verify=False),
                "restore, tensorstore": lambda: read_tensorstore(directory / "tensorstore", forms),
                "restore, safetensors": lambda: read_safetensors(directory / "safetensors", forms),
            }
            order = list(sides)
            for side in order[number % len(order) :] + order[: number % len(order)]:
                timed(sides[side])  # so that memory is as this side leaves it, not as the one before did
                take(side, sides[side])
    return {
        "num_bytes": sum(leaf.nbytes for leaf in leaves.values()),
        "num_chunks": sum(
            math.prod(-(size // -part) for size, part in zip(t.shape, t.read_chunk, strict=True))
            for t in types.values()
        ),
        "seconds": {name: [one.seconds for one in taken] for name, taken in times.items()},
        "cpu_seconds": {name: [one.cpu_seconds for one in taken] for name, taken in times.items()},
    }


def count_reads(directory: Path, gb: float, mesh: Mapping[str, int]) -> dict[str, int]:
    """Bytes that the devices of a mesh read from files to restore, and bytes of the shards that they need.

    Device by device, each opening the checkpoint anew and reading shard after shard: within one restore, tensorstore
    reads a chunk once for all shards that want it at that moment, which devices of other processes would not see.
    """
    program = build_program(gb, mesh)
    leaves = named({name: getattr(program.abstract_state, name) for name in SECTIONS})
    [step] = Store(directory).steps()
    StepArrays(directory / str(step))  # whatever is loaded once
    read = needed = 0
    for device in program.mesh.devices.flat:
        before = bytes_read()
        arrays = StepArrays(directory / str(step))
        for name, leaf in leaves.items():
            shard = leaf.sharding.devices_indices_map(leaf.shape)[device]
            bounds = (part.indices(size)[:2] for part, size in zip(shard, leaf.shape, strict=True))
            box = within(tuple(bounds), arrays.types[name].shape)
            needed += arrays.read(name, as_index(box)).nbytes
        read += bytes_read() - before
    return {"read": read, "needed": needed}


def bytes_read() -> int:
    """Bytes that this process has read so far, from files and from the page cache."""
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))[7:])


def main() -> None:
    """Does one piece and prints what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("piece", choices=("speed", "reads"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gb", type=float, required=True, help="gigabytes of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mesh", type=parse_mesh, default={}, help="mesh that reads, e.g. fsdp=16")
    options = parser.parse_args()
    if options.piece == "speed":
        print(json.dumps(measure_speed(options.directory, options.gb, options.rounds)))
    else:
        print(json.dumps(count_reads(options.directory, options.gb, options.mesh)))


if __name__ == "__main__":
    main()
