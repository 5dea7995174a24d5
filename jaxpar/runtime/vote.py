"""Agreement of several processes on the step after which they stop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.runtime.interrupt import StopReason


class StopVote:
    """Lets every process say after each step whether it was told to stop, and all of them hear the same answer.

    A signal reaches the processes at different moments, and a process that left its loop alone would leave the others
    waiting in the next step's collectives. Casting does not wait; the answer of a step can be read with that step's
    loss.
    """

    def __init__(self, mesh: Mesh):
        """``mesh`` holds all devices of the run."""
        axes = mesh.axis_names
        self._ballots = NamedSharding(mesh, PartitionSpec(axes))
        self._num_devices = mesh.size
        self._count = jax.jit(
            jax.shard_map(
                lambda ballots: jax.lax.pmax(jnp.max(ballots), axes),
                mesh=mesh,
                in_specs=PartitionSpec(axes),
                out_specs=PartitionSpec(),
            )
        )
        self._alone = len({device.process_index for device in mesh.devices.flat}) == 1

    def cast(self, reason: StopReason) -> jax.Array | StopReason:
        """Starts the vote of one step, which every process must cast.

        Returns the largest reason of any process: as it is in a run of one process, else an int32 scalar on the mesh,
        to be read with ``StopReason(int(...))``.
        """
        if self._alone:
            return reason
        ballots = jax.make_array_from_callback(
            (self._num_devices,),
            self._ballots,
            lambda index: np.full(len(range(*index[0].indices(self._num_devices))), reason, np.int32),
        )
        return self._count(ballots)
