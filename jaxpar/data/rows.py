"""What a run trains and validates on: rows by index, with the identity of what they were made from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxpar.data.mixture import Mixture, MixtureOrder
from jaxpar.data.order import GlobalOrder, Order


class Rows(Protocol):
    """Rows by index. Reading must be safe from several threads at once, and depend on nothing but the index."""

    seq_len: int

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


class ConcatenatedRows:
    """The rows of several sources one after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self.seq_len = parts[0].seq_len
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``jaxpar.data.packing.ROW_DTYPES``, each ``[seq_len]``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        part = int(np.searchsorted(self._starts, i, side="right")) - 1
        return self._parts[part][i - int(self._starts[part])]


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Rows by index, with the identity of what they were made from."""

    rows: Rows
    identity: Mapping[str, str | int | bool]
    """What decides the rows: content, tokenizer, packing, seq_len. A resumed run can name the part that has changed."""
    mixture: Mixture | None = None
    """Sources and proportions where ``data.weights`` are given; the rows are those of the sources in order."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``jaxpar.data.packing.ROW_DTYPES``, each ``[seq_len]``."""
        return self.rows[i]

    @property
    def seq_len(self) -> int:
        """Positions per row."""
        return self.rows.seq_len

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """Returns the global order in which a run trains on the rows."""
        if self.mixture is not None:
            return MixtureOrder(self.mixture, seed=seed, shuffle=shuffle)
        return GlobalOrder(len(self), seed=seed, shuffle=shuffle)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of ``identity``: equal on every process and machine that has the same rows."""
        return hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run trains and validates on."""

    train: TokenDataset
    validation: TokenDataset | None
    """None when ``data.validation_fraction`` is 0."""
    vocab_size_of_tokenizer: int
    """Every token id of the rows is below this; what ``model.vocab_size = 0`` stands for."""
    num_documents: int
    """Documents of both splits (synthetic: rows)."""
    num_tokens: int
    """Tokens of both splits, end-of-document tokens included."""
    notes: list[str]
    """What the user should be told: sizes, skipped files, the split."""
