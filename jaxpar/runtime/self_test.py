"""A first all-reduce over all devices, so that a network that cannot carry one shows before the model is built."""

from __future__ import annotations

import os
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_HINT = (
    "Check that the network interface that the processes should use is the one they chose (NCCL_SOCKET_IFNAME, or "
    "GLOO_SOCKET_IFNAME on the CPU), that no firewall blocks traffic between the nodes, and that every node sees the "
    "same driver and library versions; NCCL_DEBUG=INFO shows what NCCL chose"
)


def self_test(mesh: Mesh, *, timeout_s: float = 300) -> float:
    """All-reduces a different number from each device, over all of them and over each mesh axis, and checks the sums.

    A collective that never ends cannot be interrupted, so after ``timeout_s`` the process says what it waited for and
    ends with exit code 1.

    Args:
        mesh: a mesh of all devices of the run.
        timeout_s: seconds that the test may take, compiling included.

    Returns:
        Seconds that it took.

    Raises:
        RuntimeError: a sum is wrong on a device of this process.
    """
    started = time.monotonic()
    groups = [mesh.axis_names, *((axis,) for axis in mesh.axis_names if 1 < mesh.shape[axis] < mesh.size)]
    waiting_for = [groups[0]]
    timer = threading.Timer(timeout_s, lambda: _give_up(mesh, waiting_for[0], timeout_s))
    timer.daemon = True
    timer.start()
    try:
        for axes in groups:
            waiting_for[0] = axes
            _check_sum(mesh, axes, _all_reduce(mesh, axes))
    finally:
        timer.cancel()
    return time.monotonic() - started


def _contributions(mesh: Mesh) -> np.ndarray:
    """One number per device, in the mesh's shape; all different, so that no device can stand in for another."""
    return np.arange(1, mesh.size + 1, dtype=np.int32).reshape(mesh.devices.shape)


def _all_reduce(mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """Sum over ``axes`` of each device's number; shape of the mesh, every device holding its own group's sum."""
    spec = PartitionSpec(*mesh.axis_names)
    numbers = _contributions(mesh)
    mine = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, spec), lambda index: numbers[index])

    def total(number: jax.Array) -> jax.Array:
        # Added to a zero that varies over the axes, so that the result has the same spec on every mesh.
        return jax.lax.psum(number, axes) + 0 * number

    return jax.block_until_ready(jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec))(mine))


def _check_sum(mesh: Mesh, axes: tuple[str, ...], sums: jax.Array) -> None:
    dims = tuple(mesh.axis_names.index(axis) for axis in axes)
    expected = np.broadcast_to(_contributions(mesh).sum(axis=dims, keepdims=True), mesh.devices.shape)
    wrong = [
        f"{shard.device} has {int(shard.data.item())} instead of {int(expected[shard.index].item())}"
        for shard in sums.addressable_shards
        if shard.data.item() != expected[shard.index].item()
    ]
    if wrong:
        raise RuntimeError(
            f"start-up test: an all-reduce over {_name(mesh, axes)} is wrong: {'; '.join(wrong)}. {_HINT}"
        )


def _give_up(mesh: Mesh, axes: tuple[str, ...], timeout_s: float) -> None:
    text = f"error: start-up test: an all-reduce over {_name(mesh, axes)} did not end within {timeout_s:g} s. {_HINT}\n"
    sys.stderr.flush()
    os.write(2, text.encode())
    os._exit(1)


def _name(mesh: Mesh, axes: tuple[str, ...]) -> str:
    return (
        f"all {mesh.size} devices" if axes == mesh.axis_names else f"the {axes[0]} axis ({mesh.shape[axes[0]]} devices)"
    )
