"""Device memory, where the backend reports it."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one local device, in bytes."""

    peak_bytes: int
    """Highest use since the process started."""
    limit_bytes: int
    """What the allocator may use."""


def device_memory() -> dict[int, DeviceMemory] | None:
    """Memory by local device id, or None where the backend does not report it (the CPU)."""
    memory = {}
    for device in jax.local_devices():
        stats = device.memory_stats()
        if not stats or "peak_bytes_in_use" not in stats:
            return None
        memory[device.id] = DeviceMemory(
            peak_bytes=int(stats["peak_bytes_in_use"]), limit_bytes=int(stats.get("bytes_limit", 0))
        )
    return memory
