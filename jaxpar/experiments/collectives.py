"""Times collectives over the axes of a mesh, on the devices that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.experiments.links import OPS, Measurement, strides

_ITEM_BYTES = 4
"""Messages are float32."""


def measure(
    mesh: Mesh,
    *,
    sizes: Sequence[int],
    iterations: int,
    ops: Sequence[str] = OPS,
    say: Callable[[Measurement], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Every collective over every axis with several devices, for every message size; all groups of an axis at once.

    Call it in all processes alike.

    Args:
        mesh: All devices.
        sizes: Bytes of a message, as nccl-tests counts them; rounded up to what the members of a group divide.
        iterations: Calls of which the mean time is taken, after one that is not counted.
        ops: Which collectives.
        say: Is told about each when it is done.
    """
    distance = strides(tuple(mesh.shape.items()))
    for axis, members in mesh.shape.items():
        if members == 1:
            continue
        for op in ops:
            for size in sizes:
                unit = members * _ITEM_BYTES
                size = -(-size // unit) * unit
                seconds = _seconds(mesh, axis, op, size // _ITEM_BYTES, iterations)
                found = Measurement(
                    axis=axis, op=op, devices=members, stride=distance[axis], bytes=size, seconds=seconds
                )
                say(found)
                yield found


def _seconds(mesh: Mesh, axis: str, op: str, items: int, iterations: int) -> float:
    """Mean seconds of a call, of the slowest process."""
    members = mesh.shape[axis]
    start_items = items // members if op == "all-gather" else items
    run, message = collective(mesh, axis, op), filled(mesh, start_items)
    compiled = run.lower(message).compile()
    multihost_utils.sync_global_devices(f"{op} over {axis}, {items} items")
    jax.block_until_ready(compiled(message))
    # Calls queue up on a GPU, so that the host's part of them hides; on the CPU several at once would only be in each
    # other's way.
    waits = mesh.devices.flat[0].platform == "cpu"
    started = time.perf_counter()
    for _ in range(iterations):
        result = compiled(message)
        if waits:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - started) / iterations
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def collective(mesh: Mesh, axis: str, op: str) -> jax.stages.Wrapped:
    """A jitted collective over one axis, of messages made by :func:`filled`."""
    members = mesh.shape[axis]
    dim = len(mesh.axis_names)
    around = [(member, (member + 1) % members) for member in range(members)]
    bodies: Mapping[str, Callable[[jax.Array], jax.Array]] = {
        "all-reduce": lambda x: lax.psum(x, axis),
        "all-gather": lambda x: lax.all_gather(x, axis, axis=dim, tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, axis, split_axis=dim, concat_axis=dim, tiled=True),
        "permute": lambda x: lax.ppermute(x, axis, around),
    }
    spec = PartitionSpec(*mesh.axis_names)
    # Without the check: a sum is the same on all members, and a spec would have to say so.
    return jax.jit(jax.shard_map(bodies[op], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def filled(mesh: Mesh, items: int) -> jax.Array:
    """[*mesh, items] float32: each device holds its own message, filled with its number plus 1."""
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    shape = (*mesh.devices.shape, items)

    def message(index: tuple[slice, ...]) -> np.ndarray:
        number = int(np.ravel_multi_index([part.start or 0 for part in index[:-1]], mesh.devices.shape))
        return np.full((*[1] * (len(shape) - 1), items), number + 1, np.float32)

    return jax.make_array_from_callback(shape, sharding, message)


def count_hosts(name: str) -> int:
    """Different hosts among the processes of the run.

    Args:
        name: Of this process's host.
    """
    mine = np.frombuffer(name.encode()[:64].ljust(64, b"\0"), np.uint8).astype(jnp.int32)
    return len(np.unique(np.atleast_2d(multihost_utils.process_allgather(mine)), axis=0))
