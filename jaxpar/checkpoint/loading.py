"""Reads the arrays of a step straight onto devices, each device only its shards.

Orbax 0.12.8 could do it too, at half the speed: it fills the buffer of every shard with zeros, reads into it, and on
CPUs copies it once more, because the buffer is not aligned as XLA wants it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import SingleDeviceSharding

from jaxpar.checkpoint.arrays import StepArrays, storage_message
from jaxpar.checkpoint.chunks import Box, as_index, box_bytes, box_shape, within
from jaxpar.checkpoint.errors import DamagedCheckpointError

READS_AT_ONCE = 128
"""Files or chunks that are read at a time; file systems on a network need many."""

BYTES_IN_FLIGHT = 4 * 2**30
"""Host memory of shards that are being read or wait for a device."""

_ALIGNMENT = 64
"""XLA:CPU takes a buffer aligned so as it is, without a copy."""


def load_arrays(step_directory: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays by leaf name, of the shapes and shardings of ``targets``; every process reads what its devices hold.

    Args:
        step_directory: A step of any Orbax trainer.
        targets: By leaf name, with shardings, of the dtypes on disk. What lies beyond the shape on disk is zero.

    Raises:
        DamagedCheckpointError: An array cannot be read; names it.
    """
    stored = StepArrays(step_directory, reads_at_once=READS_AT_ONCE)
    loaded: dict[str, list[jax.Array]] = {name: [] for name in targets}
    reading: collections.deque[_ShardRead] = collections.deque()
    bytes_in_flight = 0

    def finish_oldest() -> int:
        oldest = reading.popleft()
        loaded[oldest.name] += oldest.arrays()
        return oldest.buffer.nbytes

    for name, target in targets.items():
        if name in stored.faults:
            raise DamagedCheckpointError(f"{name} of {step_directory} cannot be read: {stored.faults[name]}")
        for box, devices in _distinct_shards(target).items():
            reading.append(_ShardRead(stored, name, target, box, devices))
            bytes_in_flight += reading[-1].buffer.nbytes
            while bytes_in_flight > BYTES_IN_FLIGHT:
                bytes_in_flight -= finish_oldest()
    while reading:
        finish_oldest()
    return {
        name: jax.make_array_from_single_device_arrays(target.shape, target.sharding, loaded[name], dtype=target.dtype)
        for name, target in targets.items()
    }


class _ShardRead:
    """One shard on its way from disk to the devices that hold it."""

    def __init__(
        self, stored: StepArrays, name: str, target: jax.ShapeDtypeStruct, box: Box, devices: list[jax.Device]
    ):
        self.name = name
        self._directory = stored.directory
        self._devices = devices
        self._memory_kind = target.sharding.memory_kind
        self.buffer = _aligned_buffer(box_shape(box), np.dtype(target.dtype))
        on_disk = within(box, stored.types[name].shape)
        if on_disk != box:
            self.buffer[...] = 0
        self._read: ts.Future | None = None
        if box_bytes(on_disk, 1):
            inside = (..., *(slice(0, size) for size in box_shape(on_disk)))  # with ..., a view of a scalar too
            self._read = stored.start_read(name, as_index(on_disk), self.buffer[inside])

    def arrays(self) -> list[jax.Array]:
        """Waits for the disk; the shard on every device that holds it."""
        try:
            if self._read is not None:
                self._read.result()
        except ValueError as error:
            message = f"{self.name} of {self._directory} cannot be read: {storage_message(error)}"
            raise DamagedCheckpointError(message) from error
        return [
            jax.device_put(self.buffer, SingleDeviceSharding(device, memory_kind=self._memory_kind))
            for device in self._devices
        ]


def _distinct_shards(target: jax.ShapeDtypeStruct) -> dict[Box, list[jax.Device]]:
    """Devices of this process by the box of the array that they hold."""
    shards: dict[Box, list[jax.Device]] = {}
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        bounds = (part.indices(size)[:2] for part, size in zip(index, target.shape, strict=True))
        shards.setdefault(tuple(bounds), []).append(device)
    return shards


def _aligned_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
