"""Which elements of a stored tensor are read by the parameters that share it: all of them, each once?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpar.families.keymap import TensorSource, product


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Elements of one tensor by how many parameters have them."""

    total: int
    unread: int
    """Elements that no parameter has."""
    shared: int
    """Elements that more than one parameter has."""


def coverage(readers: Sequence[tuple[TensorSource, Mapping[str, int]]], shape: Sequence[int]) -> Coverage:
    """How the parameters that read a tensor cover it.

    Args:
        readers: Rule and sizes of each parameter that reads the tensor.
        shape: Shape of the tensor.
    """
    if 0 in shape:
        return Coverage(0, 0, 0)
    # What a rule reads is a product of index sets, one per dim. Indices that the same rules select behave alike, so
    # each dim shrinks to a few kinds of index, and the product of kinds is small whatever the shape.
    elements, is_read = np.ones((), np.int64), np.ones(len(readers), np.int64)
    for dim in range(len(shape)):
        selected = np.stack([_selected(source, sizes, dim) for source, sizes in readers])
        kinds, lengths = np.unique(selected, axis=1, return_counts=True)
        is_read = is_read[..., None] * kinds.reshape(len(readers), *(1,) * dim, -1)
        elements = elements[..., None] * lengths
    times = is_read.sum(axis=0)
    return Coverage(math.prod(shape), int(elements[times == 0].sum()), int(elements[times > 1].sum()))


def _selected(source: TensorSource, sizes: Mapping[str, int], dim: int) -> np.ndarray:
    """For every index of one dim of the tensor, whether the rule reads it."""
    stored = source.stored_dims[dim]
    part = np.zeros([sizes[factor] for factor in stored.factors], bool)
    part[tuple(source.pinned.get(factor, slice(None)) for factor in stored.factors)] = True
    before, after = (sum(product(term, sizes) for term in terms) for terms in (stored.before, stored.after))
    return np.concatenate([np.zeros(before, bool), part.reshape(-1), np.zeros(after, bool)])
