"""Copies of a checkpoint that is bigger than the bound on memory: the process stays below it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.checkpoint.verify import verify_step
from jaxpar.config import config_to_toml
from jaxpar.config.schema import Config
from jaxpar.plan.resolve import resolve
from jaxpar.program import Program
from jaxpar.resume import stored_shapes

BOUND_MIB = 640
MODEL = {
    "family": "llama",
    "vocab_size": 32003,
    "embed_dim": 1024,
    "num_layers": 8,
    "num_heads": 16,
    "num_kv_heads": 8,
    "mlp_dim": 4096,
}


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """Parameters of 183 M float32 elements, 730 MB, saved from fsdp=8."""
    directory = tmp_path_factory.mktemp("big")
    config = Config(model=MODEL, mesh={"fsdp": 8}, run={"dir": str(directory)})
    program = Program.build(resolve(config, num_devices=8))

    rng = np.random.default_rng(0)

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(rng.random(leaf.shape, np.float32), leaf.sharding)

    params = jax.tree.map(filled, program.abstract_state.params)
    shapes = stored_shapes(program, {"params": params})
    metadata = {"config": dataclasses.asdict(program.config), "mesh": dict(program.plan.mesh)}
    with Store(directory / "checkpoints") as store:
        store.save(5, {"params": params}, metadata, stored_shapes=shapes)
    (directory / "config.toml").write_text(config_to_toml(config))
    return directory


def peak_mib(*arguments: object) -> float:
    """Highest resident memory of the command, as the kernel counts it; the command must succeed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", "reshard", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = 0.0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            peak = max(peak, int(found[1]) / 1024)
        time.sleep(0.02)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return peak


@pytest.mark.proof
def test_resharding_and_exporting_stay_below_the_bound(big, tmp_path):
    size = sum(file.stat().st_size for file in (big / "checkpoints").rglob("*") if file.is_file())
    assert size > 1.05 * BOUND_MIB * 2**20
    bound = f"{BOUND_MIB}MiB"
    assert peak_mib(big, tmp_path / "new", "--mesh", "fsdp=16,tensor=4", "--max-memory", bound) < BOUND_MIB
    assert verify_step(tmp_path / "new" / "5").faults == ()
    assert peak_mib(tmp_path / "new", tmp_path / "hf", "--to", "hf", "--max-memory", bound) < BOUND_MIB
    assert peak_mib(tmp_path / "hf", tmp_path / "back", "--mesh", "fsdp=2", "--max-memory", bound) < BOUND_MIB
    before, after = (verify_step(path) for path in (tmp_path / "new" / "5", tmp_path / "back" / "0"))
    assert after.faults == ()
    assert after.num_bytes == before.num_bytes
