"""Rows of whole records: none is cut, so that a response is never without its prompt."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from jaxpar.data.packing import Shard, Spans, assemble_row

_WINDOW = 4096
_OPEN_ROWS = 64


def rows_of_records(num_pairs: Sequence[int], seq_len: int, *, pack: bool) -> list[list[int]]:
    """Returns which records each row holds; every record is in one row, about in the order of the records.

    With ``pack``, 4096 records at a time are put into rows from the longest to the shortest, each into the fullest row
    that it fits in (best fit decreasing); 64 rows with the most space stay open for the next 4096.

    Args:
      num_pairs: of each record, from 1 to ``seq_len``.
      seq_len: pairs per row.
      pack: whether records share rows.
    """
    if not pack:
        return [[record] for record in range(len(num_pairs))]
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (pairs that are free, row), fullest first
    for first in range(0, len(num_pairs), _WINDOW):
        window = range(first, min(first + _WINDOW, len(num_pairs)))
        for record in sorted(window, key=lambda record: -num_pairs[record]):
            count = num_pairs[record]
            place = bisect.bisect_left(open_rows, (count, 0))
            if place == len(open_rows):
                free, row = seq_len, len(rows)
                rows.append([])
            else:
                free, row = open_rows.pop(place)
            rows[row].append(record)
            if free > count:
                bisect.insort(open_rows, (free - count, row))
        del open_rows[:-_OPEN_ROWS]
    return rows


class RecordRows:
    """Rows of ``seq_len`` pairs, each of whole records, padded.

    Args:
      shard: the records.
      records: which of them the rows are made of, int64 ``[n]``.
      seq_len: pairs per row; no record has more.
      pack: whether records share rows.
    """

    def __init__(self, shard: Shard, records: np.ndarray, seq_len: int, *, pack: bool):
        self.seq_len = seq_len
        self._shard = shard
        starts = np.append(0, shard.ends[:-1])
        self._starts = starts[records]
        self._counts = shard.ends[records] - self._starts - 1
        assert not len(records) or (self._counts.min() > 0 and self._counts.max() <= seq_len)
        self._rows = rows_of_records(self._counts.tolist(), seq_len, pack=pack)

    @property
    def num_pairs(self) -> int:
        """Pairs of all records, trained on or not."""
        return int(self._counts.sum())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``jaxpar.data.packing.ROW_DTYPES``, each ``[seq_len]``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        records = self._rows[i]
        return assemble_row([Spans(self._shard, self._starts[records], self._counts[records])], self.seq_len)
