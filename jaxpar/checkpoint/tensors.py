"""What copies, checks and conversions read from: arrays by name, box by box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class ArrayType(Protocol):
    """Anything with a shape and a dtype: an array, its abstract form, its metadata."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""

    @property
    def dtype(self) -> Any:
        """Element type."""


class TensorReader(Protocol):
    """Arrays by name that are read in parts."""

    @property
    def types(self) -> Mapping[str, ArrayType]:
        """Shape and dtype of every array."""

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One box of an array, in its stored dtype; ``index`` has a start and a stop for every dim."""
