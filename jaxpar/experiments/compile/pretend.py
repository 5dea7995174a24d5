"""Lets kernels that ask what they run on believe in the GPU that they are compiled for.

JAX's cuDNN attention asks the local devices for their generation and the installed library for its version; tokamax
asks the default device. In a process that compiles for a GPU without having one, both would hear "cpu" and refuse.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import jax
from jax._src.cudnn import fused_attention_stablehlo  # JAX 0.12: no public way to say what is compiled for
from jax.extend import backend

CUDNN_VERSION = 91000
"""That of ``dnn_version_info`` in ``targets.py``."""


@contextlib.contextmanager
def as_if_on(device: jax.Device) -> Iterator[None]:
    """Within the block kernels are chosen for ``device``; nothing changes if it is a CPU device."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        yield
        return
    own = _parts(capability)
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (fused_attention_stablehlo, "check_cudnn_version", lambda: CUDNN_VERSION),
            (fused_attention_stablehlo, "check_compute_capability", lambda least: own >= _parts(least)),
            (fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda asked: own == _parts(asked)),
            (backend, "get_default_device", lambda: device),
        ):
            stack.enter_context(_replaced(module, name, value))
        if importlib.util.find_spec("tokamax") is not None:
            from tokamax._src import config, gpu_utils

            answer = float(capability)
            stack.enter_context(_replaced(gpu_utils, "_compute_capability", lambda device=None: answer))  # noqa: ARG005
            stack.enter_context(config.cross_compile(True))
        yield


@contextlib.contextmanager
def _replaced(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
