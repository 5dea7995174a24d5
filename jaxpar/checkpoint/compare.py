"""Compares what a checkpoint holds with what is asked for, before any data is read.

Checkpoint libraries are lenient here: Orbax casts float32 to int32 without a word. We list every difference, with both
sides, in one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxpar.checkpoint.tensors import ArrayType

_NO_NOTES: Mapping[str, str] = MappingProxyType({})


def array_type(leaf: ArrayType) -> str:
    """``float32[64,16]``."""
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def differences(
    wanted: Mapping[str, ArrayType],
    stored: Mapping[str, ArrayType],
    *,
    limit: int | None = None,
    dtypes: bool = True,
    notes: Mapping[str, str] = _NO_NOTES,
) -> list[str]:
    """One line per missing, unexpected, wrong-shape or wrong-dtype leaf.

    Args:
        wanted: What this run asks for, by name.
        stored: What the checkpoint holds, by name.
        limit: Lines per kind of difference; the rest is counted. None lists all.
        dtypes: Whether a different dtype is a difference.
        notes: What to add to the line of a missing or wrong-shape leaf, by name.
    """
    both = [name for name in wanted if name in stored]
    kinds = {
        "missing from the checkpoint": [
            f"{n}: {array_type(wanted[n])}{notes.get(n, '')}" for n in wanted if n not in stored
        ],
        "unexpected in the checkpoint": [f"{n}: {array_type(stored[n])}" for n in stored if n not in wanted],
        "wrong shape": [
            f"{n}: {array_type(stored[n])} in the checkpoint, {array_type(wanted[n])} expected{notes.get(n, '')}"
            for n in both
            if tuple(stored[n].shape) != tuple(wanted[n].shape)
        ],
        "wrong dtype": [
            f"{n}: {np.dtype(stored[n].dtype).name} in the checkpoint, {np.dtype(wanted[n].dtype).name} expected"
            for n in both
            if dtypes and np.dtype(stored[n].dtype) != np.dtype(wanted[n].dtype)
        ],
    }
    lines = []
    for kind, found in kinds.items():
        shown = found if limit is None else found[:limit]
        lines += [f"{kind}: {line}" for line in shown]
        if len(found) > len(shown):
            lines.append(f"{kind}: and {len(found) - len(shown)} more")
    return lines
