"""A checksum of an array that does not depend on how the array is cut: over devices, into slabs, or into files.

Every element contributes a hash of its bits and of its place in the whole array, and contributions are added modulo
2^32, so that any partition gives the same sums. For a given place the hash is a bijection of the bits (the finalizer of
MurmurHash3, Appleby 2016), so one changed element always changes the first sum. The second sum, of hashes of hashes,
makes several changes that cancel in the first one (one in 2^32) as unlikely again. Padding does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Sums = np.ndarray
"""uint32 [2]: the two sums of an array or of a part of it. Sums of parts add up, modulo 2^32."""

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_GOLDEN = 0x9E3779B9


def to_text(sums: Sums) -> str:
    """16 hexadecimal digits."""
    return "".join(f"{int(part):08x}" for part in sums)


def array_checksums(arrays: Mapping[str, jax.Array], shapes: Mapping[str, Sequence[int]]) -> jax.Array:
    """Sums of whole arrays, uint32 [arrays, 2], replicated. Does not wait for the devices.

    Collective: every process calls it. Compiles once per set of shapes and shardings.

    Args:
        arrays: All on the same devices.
        shapes: Shape without padding, of arrays that are padded at the end of some dims.
    """
    true_shapes = tuple(tuple(shapes.get(name, array.shape)) for name, array in arrays.items())
    mesh = next((a.sharding.mesh for a in arrays.values() if isinstance(a.sharding, NamedSharding)), None)
    return _sums_of_arrays(mesh, true_shapes)(tuple(arrays.values()))


def box_checksum(values: np.ndarray, origin: Sequence[int]) -> Sums:
    """Sums of a box of an array that begins at ``origin`` in it."""
    words = _words(values)
    starts = np.zeros(words.ndim, np.uint32)
    starts[: len(origin)] = origin
    return np.asarray(_sums_of_box(words, starts))


@functools.cache
def _sums_of_arrays(mesh: jax.sharding.Mesh | None, shapes: tuple[tuple[int, ...], ...]):
    """The jitted function of all arrays; in Auto mode, where the compiler shards the hashes like the arrays."""

    def sums(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([_sums(_device_words(a), None, shape) for a, shape in zip(arrays, shapes, strict=True)])

    if mesh is None:
        return jax.jit(sums)
    if mesh.explicit_axes:
        sums = jax.sharding.auto_axes(sums, axes=mesh.explicit_axes, out_sharding=P())
    jitted = jax.jit(sums, out_shardings=NamedSharding(mesh, P()))

    def on_mesh(arrays: tuple[jax.Array, ...]) -> jax.Array:
        with jax.set_mesh(mesh):
            return jitted(arrays)

    return on_mesh


@jax.jit
def _sums_of_box(words: np.ndarray, origin: np.ndarray) -> jax.Array:
    return _sums(words, origin, words.shape)


def _sums(words: jax.Array, origin: jax.Array | None, shape: Sequence[int]) -> jax.Array:
    """uint32 [2] of words that begin at ``origin``; those beyond ``shape`` do not count."""
    place = jnp.zeros((1,) * words.ndim, jnp.uint32)
    inside = None
    for dim, size in enumerate(words.shape):
        index = jnp.arange(size, dtype=jnp.uint32)
        along = [1] * dim + [size] + [1] * (words.ndim - dim - 1)
        if dim < len(shape) and shape[dim] < size:
            within = (index < shape[dim]).reshape(along)
            inside = within if inside is None else inside & within
        index = index if origin is None else index + origin[dim]
        place = place + _mix(index * jnp.uint32(_GOLDEN) + jnp.uint32(dim + 1)).reshape(along)
    once = _mix(words.astype(jnp.uint32) ^ place)
    twice = _mix(once + jnp.uint32(1))
    if inside is not None:
        once, twice = jnp.where(inside, once, 0), jnp.where(inside, twice, 0)
    return jnp.stack([jnp.sum(once, dtype=jnp.uint32), jnp.sum(twice, dtype=jnp.uint32)])


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _words(values: np.ndarray) -> np.ndarray:
    """The bits as unsigned integers; elements of more than 4 bytes have one more dim, of words."""
    values = np.ascontiguousarray(values).reshape(values.shape)
    size = values.dtype.itemsize
    return values.view(_WORDS[size]) if size in _WORDS else values[..., None].view(np.uint32)


def _device_words(array: jax.Array) -> jax.Array:
    """As ``_words``."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(array, _WORDS.get(array.dtype.itemsize, np.uint32))
