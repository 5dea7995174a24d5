"""A checksum of an array that does not depend on how the array is cut: over devices, into slabs, or into files.

Every element contributes a hash of its bits and of its place in the whole array, and contributions are added modulo
2^32, so that any partition gives the same sums. For a given place the hash is a bijection of the bits (the finalizer of
MurmurHash3, Appleby 2016), so one changed element always changes the first sum. The second sum, of hashes of hashes,
makes several changes that cancel in the first one (one in 2^32) as unlikely again. Padding does not count.
"""

from __future__ import annotations

import functools
import math
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
    shardings = [array.sharding for array in arrays.values()]
    if all(isinstance(sharding, NamedSharding) and sharding.mesh == shardings[0].mesh for sharding in shardings):
        summing = _sums_on_mesh(shardings[0].mesh, tuple(sharding.spec for sharding in shardings), true_shapes)
    else:
        summing = _sums_without_mesh(true_shapes)
    return summing(tuple(arrays.values()))


def box_checksum(values: np.ndarray, origin: Sequence[int]) -> Sums:
    """Sums of a box of an array that begins at ``origin`` in it."""
    words = _words(values)
    starts = np.zeros(words.ndim, np.uint32)
    starts[: len(origin)] = origin
    return np.asarray(_sums_of_box(words, starts))


@functools.cache
def _sums_on_mesh(mesh: jax.sharding.Mesh, specs: tuple[P, ...], shapes: tuple[tuple[int, ...], ...]):
    """The jitted function of all arrays: every device sums what it holds, then one all-reduce of all the sums."""

    def mesh_size(names: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[name] for name in names)

    def of_shards(shards: tuple[jax.Array, ...]) -> jax.Array:
        rows = []
        for shard, spec, shape in zip(shards, specs, shapes, strict=True):
            axes = [_axes(entry) for entry in spec] + [()] * (shard.ndim - len(spec))
            origin = [
                jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size) if names else jnp.uint32(0)
                for names, size in zip(axes, shard.shape, strict=True)
            ]
            whole = [mesh_size(names) * size for names, size in zip(axes, shard.shape, strict=True)]
            copies = tuple(axis for axis in mesh.axis_names if not any(axis in names for names in axes))
            is_first = jax.lax.axis_index(copies) == 0 if copies else True
            sums = _sums(_device_words(shard), origin, _padded(whole, shape))
            rows.append(jnp.where(is_first, sums, 0))
        return jax.lax.psum(jnp.stack(rows), mesh.axis_names)

    return jax.jit(jax.shard_map(of_shards, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False))


@functools.cache
def _sums_without_mesh(shapes: tuple[tuple[int, ...], ...]):
    """The same for arrays on one device."""

    def of_arrays(arrays: tuple[jax.Array, ...]) -> jax.Array:
        pairs = zip(arrays, shapes, strict=True)
        return jnp.stack([_sums(_device_words(a), (), _padded(a.shape, shape)) for a, shape in pairs])

    return jax.jit(of_arrays)


def _padded(padded: Sequence[int], shape: Sequence[int]) -> dict[int, int]:
    """Size without padding by dim, of dims that have some."""
    return {dim: size for dim, (full, size) in enumerate(zip(padded, shape, strict=True)) if size < full}


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@jax.jit
def _sums_of_box(words: np.ndarray, origin: np.ndarray) -> jax.Array:
    return _sums(words, origin, {})


def _sums(words: jax.Array, origin: jax.Array | Sequence[jax.Array], limits: Mapping[int, int]) -> jax.Array:
    """uint32 [2] of words that begin at ``origin`` of an array; ``limits`` are the sizes of its padded dims."""
    place = jnp.zeros((1,) * words.ndim, jnp.uint32)
    inside = None
    for dim, size in enumerate(words.shape):
        index = jnp.arange(size, dtype=jnp.uint32)
        along = [1] * dim + [size] + [1] * (words.ndim - dim - 1)
        if dim < len(origin):
            index = index + origin[dim]
        if dim in limits:
            within = (index < limits[dim]).reshape(along)
            inside = within if inside is None else inside & within
        place = place + _mix(index * jnp.uint32(_GOLDEN) + jnp.uint32(dim + 1)).reshape(along)
    once = _mix(words.astype(jnp.uint32) ^ place)
    twice = _mix(once + jnp.uint32(1))
    if inside is not None:
        once, twice = jnp.where(inside, once, 0), jnp.where(inside, twice, 0)
    # One reduction of both: XLA:CPU (JAX 0.12) computes the hashes of two jnp.sum twice, and eight times as slowly.
    zero = np.uint32(0)
    both = jax.lax.reduce((once, twice), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), range(words.ndim))
    return jnp.stack(both)


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
