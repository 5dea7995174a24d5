"""Documents to rows, decided before any index exists. Pure numpy.

A document of n tokens (its end-of-document token included) is n - 1 *pairs* of an input token and its label, the next
token. Rows are cut from the concatenated pairs, not from the concatenated tokens. So each pair of a document is trained
exactly once, a document that continues in the next row loses nothing at the cut (both rows hold the token there, one as
a label and one as an input), and no position is spent on a label across a document border, because no such pair exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROW_DTYPES = {
    "tokens": np.dtype(np.int32),
    "labels": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "segment_ids": np.dtype(np.int32),
    "weights": np.dtype(np.float32),
}
"""The arrays of a row, each ``[seq_len]``.

tokens: input ids. labels: the next token of the same document. positions: from 0 at the start of each segment.
segment_ids: 1, 2, ... per document in the row, 0 for padding. weights: 1 where the label is trained, 0 for padding.
"""


def empty_row(seq_len: int) -> dict[str, np.ndarray]:
    """Returns a row of padding: all zero, so weight 0 and segment 0 everywhere."""
    return {name: np.zeros(seq_len, dtype) for name, dtype in ROW_DTYPES.items()}


def concatenate_documents(documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns all tokens, int32 ``[num_tokens]``, and where each document starts, int64 ``[num_documents + 1]``."""
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) for document in documents], out=offsets[1:])
    tokens = np.concatenate(documents).astype(np.int32, copy=False) if documents else np.zeros(0, np.int32)
    return tokens, offsets


class PackedRows:
    """Rows of ``seq_len`` pairs; each row is assembled when it is asked for.

    With ``pack``, the pairs of all documents are cut into rows of ``seq_len``; only the last row is padded. Without it,
    a row holds pairs of one document only, padded, and a document longer than a row takes several rows. Either way a
    document that continues in the next row starts there as a new segment at position 0.

    Args:
      tokens: the documents one after the other, int32 ``[num_tokens]``.
      document_offsets: where each document starts, int64 ``[num_documents + 1]``, the last being ``num_tokens``.
      seq_len: pairs per row.
      pack: whether documents share rows.

    Raises:
      ValueError: a document without tokens, or offsets that do not span ``tokens``.
    """

    def __init__(self, tokens: np.ndarray, document_offsets: np.ndarray, seq_len: int, *, pack: bool):
        if document_offsets[0] != 0 or document_offsets[-1] != len(tokens):
            raise ValueError(f"document_offsets span {document_offsets[[0, -1]].tolist()}, not [0, {len(tokens)}]")
        if np.any(np.diff(document_offsets) < 1):
            raise ValueError("every document needs at least one token (its end-of-document token)")
        self.seq_len = seq_len
        self._tokens = tokens
        # Each document has one pair less than it has tokens.
        self._pair_offsets = document_offsets - np.arange(len(document_offsets))
        starts = _packed_starts if pack else _separate_starts
        self._row_offsets = np.append(starts(self._pair_offsets, seq_len), self.num_pairs)

    @property
    def num_pairs(self) -> int:
        """Trained (input, label) pairs over all rows."""
        return int(self._pair_offsets[-1])

    def __len__(self) -> int:
        return len(self._row_offsets) - 1

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``ROW_DTYPES``, each ``[seq_len]``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        first, stop = self._row_offsets[i], self._row_offsets[i + 1]
        pairs = np.arange(first, stop)
        document = np.searchsorted(self._pair_offsets, pairs, side="right") - 1
        # The documents before this one hold one token more than they hold pairs, each.
        source = pairs + document
        segment_start = np.maximum(self._pair_offsets[document], first)
        row = empty_row(self.seq_len)
        filled = slice(0, len(pairs))
        row["tokens"][filled] = self._tokens[source]
        row["labels"][filled] = self._tokens[source + 1]
        row["positions"][filled] = pairs - segment_start
        row["segment_ids"][filled] = 1 + np.cumsum(np.diff(document, prepend=document[0]) != 0)
        row["weights"][filled] = 1
        return row


def _packed_starts(pair_offsets: np.ndarray, seq_len: int) -> np.ndarray:
    return np.arange(0, pair_offsets[-1], seq_len)


def _separate_starts(pair_offsets: np.ndarray, seq_len: int) -> np.ndarray:
    rows_per_document = -(np.diff(pair_offsets) // -seq_len)
    first_row = np.cumsum(rows_per_document) - rows_per_document
    row_in_document = np.arange(rows_per_document.sum()) - np.repeat(first_row, rows_per_document)
    return np.repeat(pair_offsets[:-1], rows_per_document) + seq_len * row_in_document
