"""A TensorReader over arrays in memory, which counts what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np


class ArrayReader:
    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = dict(arrays)
        self.types = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
        self.elements_read = 0

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        array = self.arrays[name]
        assert len(index) == array.ndim
        assert all(0 <= s.start < s.stop <= size for s, size in zip(index, array.shape, strict=True)), (name, index)
        self.elements_read += array[tuple(index)].size
        return array[tuple(index)]


def whole(reader, name: str) -> np.ndarray:
    return reader.read(name, [slice(0, size) for size in reader.types[name].shape])
