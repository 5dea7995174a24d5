"""What a program runs on, as far as the choice of a kernel depends on it, and what a choice says. No JAX."""

from __future__ import annotations

import dataclasses

TOKAMAX_MISSING = (
    "the package tokamax is not installed (pip install tokamax==0.0.17, part of the extras cuda12 and cuda13)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device of a mesh."""

    name: str
    """``jax.Device.device_kind``."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on the CPU."""
    has_tokamax: bool
    """Whether the package is installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The kernel of a run."""

    kernel: str
    """Its name where kernels are called."""
    reason: str
    """For the log: what was chosen, and why not a faster one."""
