"""Resolved mesh sizes -> a JAX mesh with all six named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.config import AXES


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over ``devices`` (default: all), outermost axis ``pipeline``, innermost ``tensor``.

    Every axis is in Explicit mode: a sharding mistake is then a type error while tracing, where Auto mode would
    silently replicate. Devices keep their order, so neighbours in the list (one NVLink domain) are neighbours on the
    ``tensor`` axis.

    Raises:
        ValueError: an unknown axis, a size below 1, or a product of the sizes that is not the number of devices
            (``jax.make_mesh`` would silently take the first ones).
    """
    wrong = {axis: size for axis, size in sizes.items() if axis not in AXES or size < 1}
    if wrong:
        raise ValueError(f"mesh {wrong}: the axes are {', '.join(AXES)}, and sizes are at least 1")
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes.get(axis, 1) for axis in AXES]
    if math.prod(shape) != len(devices):
        factors = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {factors} = {math.prod(shape)} devices, but {len(devices)} are present")
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def used_axes(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of ``axes`` that have more than one device, in their given order."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)
