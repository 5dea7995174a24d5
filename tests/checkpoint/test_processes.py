"""Several processes save and restore one checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

directory, mode, address, num_processes, process_id = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if num_processes > 1:
    jax.distributed.initialize(address, num_processes, process_id)

from jaxpar.checkpoint.store import Store

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
values = {"w": np.arange(128, dtype=np.float32).reshape(16, 8), "n": np.ones(8, np.float32), "count": np.int32(3)}
values["w"][13:] = 0
specs = {"w": P("fsdp", "tensor"), "n": P(), "count": P()}

def put(name):
    value = np.asarray(values[name])
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, specs[name]), lambda index: value[index])

params = {name: put(name) for name in values}
stored_shapes = {"params/w": (13, 8)}
with Store(directory, keep=2) as store:
    if mode == "save":
        for step in (1, 2, 3):
            store.save(step, {"params": params}, {"processes": num_processes}, stored_shapes=stored_shapes)
        store.wait()
    assert store.steps() == [2, 3], store.steps()
    form = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in params.items()}
    restored = store.restore(3, {"params": form}, stored_shapes=stored_shapes)["params"]
    assert store.metadata(3)["processes"] == 2
for name, array in restored.items():
    assert array.sharding == params[name].sharding
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), np.asarray(values[name])[shard.index]), name
"""


def run(directory: Path, mode: str, num_processes: int) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    devices = f"--xla_force_host_platform_device_count={8 // num_processes}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory), mode, address, str(num_processes), str(process_id)],
            env=os.environ | {"XLA_FLAGS": devices},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process_id in range(num_processes)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.proof
def test_two_processes_save_and_one_or_two_restore(tmp_path):
    run(tmp_path / "checkpoints", "save", 2)
    run(tmp_path / "checkpoints", "restore", 2)
    run(tmp_path / "checkpoints", "restore", 1)
