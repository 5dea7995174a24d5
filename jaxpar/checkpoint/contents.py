"""What goes into a checkpoint and what may come out of it: leaves by name, their shapes on disk, metadata.

A state is a dict of sections (``params``, ``optimizer``, ...); a leaf's name is ``section/key/key``. A leaf that is
padded in memory has a smaller shape on disk, which the caller gives by name as ``stored_shapes``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.checkpoint.compare import differences
from jaxpar.checkpoint.paths import LeafPath, leaves_by_path, nested, path_string
from jaxpar.checkpoint.unpad import leading_box

StoredShapes = Mapping[str, Sequence[int]]
"""Shape on disk by leaf name, for leaves that are padded in memory."""

UNPADDED: StoredShapes = MappingProxyType({})
"""Every leaf has the same shape in memory and on disk."""

FORMAT_VERSION = 2
"""Version of the layout on disk and of the metadata's own keys. Readers refuse newer ones and read older ones.

1: no checksums. 2: the commit mark has a checksum of every array, CRCs of files, the step and its metrics.
"""

_OWN_KEYS = ("format_version", "step")


def sections_by_path(state: Mapping[str, Any]) -> dict[str, dict[LeafPath, Any]]:
    """The leaves of every section by path; refuses names that cannot be directories or keys on disk."""
    for section in state:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", section) or section == "metrics":
            raise ValueError(f"section {section!r}: the name has lower-case letters, digits, '_'; 'metrics' is taken")
    return {section: leaves_by_path(tree, section) for section, tree in state.items()}


def arrays_to_store(state: Mapping[str, Any], stored_shapes: StoredShapes) -> dict[str, Any]:
    """The sections as nested dicts of the arrays that go to disk; sections without leaves are left out.

    Raises:
        ValueError: A leaf is not an array that can be stored, or a stored shape does not fit; names the leaf.
    """
    arrays, names = {}, set()
    for section, leaves in sections_by_path(state).items():
        for path, leaf in leaves.items():
            name = path_string(section, path)
            names.add(name)
            if not isinstance(leaf, jax.Array) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"{name} is {type(leaf).__name__} {getattr(leaf, 'dtype', '')}: every leaf of a saved state is a "
                    "jax.Array of numbers (scalars on the mesh, PRNG keys as jax.random.key_data)"
                )
            if name in stored_shapes:
                _check_fits(name, leaf.shape, stored_shapes[name])
                leaves[path] = leading_box(leaf, stored_shapes[name])
        if leaves:
            arrays[section] = nested(leaves)
    if not arrays:
        raise ValueError("the state has no leaves to save")
    _refuse_unknown(stored_shapes, names)
    return arrays


def metadata_to_store(step: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with the store's own keys, as JSON will give it back.

    Raises:
        ValueError: JSON cannot hold it, or would change it (keys that are not strings, NaN); names the key.
    """
    taken = [key for key in _OWN_KEYS if key in metadata]
    if taken:
        raise ValueError(f"metadata: the store itself writes {', '.join(taken)}")
    full = {"format_version": FORMAT_VERSION, "step": step, **metadata}
    _refuse_other_keys(full, "metadata")
    try:
        return json.loads(json.dumps(full, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metadata cannot be stored as JSON: {error}") from error


def misfits(
    targets: Mapping[str, Any],
    stored: Mapping[str, jax.ShapeDtypeStruct],
    stored_shapes: StoredShapes,
    ignore: Collection[str],
    *,
    cast: bool,
) -> list[str]:
    """Everything that keeps the stored leaves from being the targets, one line each.

    A section that only one side has is one line, however many leaves it has.

    Args:
        targets: What is asked for, by leaf name: shape in memory, dtype, sharding.
        stored: What is on disk, by leaf name.
        stored_shapes: Shapes on disk of padded targets.
        ignore: Sections that may be on disk without being asked for.
        cast: Whether another float type on disk is no misfit.
    """
    _refuse_unknown(stored_shapes, targets)
    asked = dict.fromkeys(map(_section, targets))
    held = dict.fromkeys(section for section in map(_section, stored) if section not in ignore)
    lines = [f"missing section: {section}" for section in asked if section not in held]
    lines += [f"unexpected section: {section}" for section in held if section not in asked]
    expected = {}
    for name, leaf in targets.items():
        if getattr(leaf, "sharding", None) is None:
            lines.append(f"target without sharding: {name}")
        if name in stored_shapes:
            _check_fits(name, leaf.shape, stored_shapes[name])
        dtype = leaf.dtype
        if cast and name in stored and _both_float(stored[name].dtype, dtype):
            dtype = stored[name].dtype
        expected[name] = jax.ShapeDtypeStruct(tuple(stored_shapes.get(name, leaf.shape)), dtype)
    common = asked.keys() & held.keys()
    return lines + differences(
        {name: leaf for name, leaf in expected.items() if _section(name) in common},
        {name: leaf for name, leaf in stored.items() if _section(name) in common},
    )


def _both_float(*dtypes: Any) -> bool:
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def _section(name: str) -> str:
    return name.partition("/")[0]


def _check_fits(name: str, shape: Sequence[int], stored: Sequence[int]) -> None:
    if len(shape) != len(stored) or any(small > full for small, full in zip(stored, shape, strict=True)):
        raise ValueError(
            f"stored shape of {name} is {tuple(stored)}; it must lie within the shape in memory, {tuple(shape)}"
        )


def _refuse_unknown(stored_shapes: StoredShapes, names: Collection[str]) -> None:
    unknown = [name for name in stored_shapes if name not in names]
    if unknown:
        raise ValueError(f"stored_shapes names leaves that the state does not have: {', '.join(unknown)}")


def _refuse_other_keys(value: Any, where: str) -> None:
    """JSON turns the key 1 into "1" without a word."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which is not a string; JSON would make it one")
            _refuse_other_keys(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item, where)
