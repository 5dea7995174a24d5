"""Agreement of several processes on the step after which they save or stop."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.runtime.interrupt import StopReason


@dataclasses.dataclass(frozen=True)
class Ballot:
    """What one process wants after a step."""

    reason: StopReason
    """Whether it was told to stop."""
    save: bool = False
    """Whether it finds by its clock that a checkpoint is due."""

    def __int__(self) -> int:
        """Stopping outweighs saving, because a run that stops saves anyway."""
        return 2 * self.reason + self.save

    @classmethod
    def of(cls, value: jax.Array | int) -> Self:
        """The ballot that an int is; waits for a device's answer."""
        reason, save = divmod(int(value), 2)
        return cls(StopReason(reason), bool(save))


class StopVote:
    """Lets every process say after each step whether it wants to stop or save, and all of them hear the same answer.

    A signal reaches the processes at different moments, clocks differ, and a process that left its loop alone would
    leave the others waiting in the next step's collectives. Casting does not wait; the answer of a step can be read
    with that step's loss.
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

    def cast(self, ballot: Ballot) -> jax.Array | int:
        """Starts the vote of one step, which every process must cast.

        Returns the largest ballot of any process, to be read with ``Ballot.of``: an int in a run of one process, else
        an int32 scalar on the mesh.
        """
        if self._alone:
            return int(ballot)
        ballots = jax.make_array_from_callback(
            (self._num_devices,),
            self._ballots,
            lambda index: np.full(len(range(*index[0].indices(self._num_devices))), int(ballot), np.int32),
        )
        return self._count(ballots)
