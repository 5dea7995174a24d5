"""Documents to rows, decided before any index exists. Pure numpy.

A document of n tokens (its end-of-document token included) is n - 1 *pairs* of an input token and its label, the next
token. Rows are cut from the concatenated pairs, not from the concatenated tokens. So each pair of a document is trained
exactly once, a document that continues in the next row loses nothing at the cut (both rows hold the token there, one as
a label and one as an input), and no position is spent on a label across a document border, because no such pair exists.

Documents lie in shards, in memory or memory-mapped, and are read when a row needs them. What is held per document is a
few bytes per block of them, so the plan of a corpus of any size is small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

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

BLOCK = 512
"""Documents whose pairs are counted together; finding a row reads the ends of one block."""

_CHUNK = 128 * BLOCK


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Documents one after the other. The arrays may be memory-mapped."""

    tokens: np.ndarray
    """Integers ``[num_tokens]``."""
    ends: np.ndarray
    """Where each document ends, int64 ``[num_documents]``, the last being ``num_tokens``."""
    scores: np.ndarray | None = None
    """Hash of each document, uint64 ``[num_documents]``, see ``jaxpar.data.split``."""
    trained: np.ndarray | None = None
    """Whether each token is trained on as a label, bool ``[num_tokens]``; None: all are."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Stretches of pairs of one shard, each a segment of a row."""

    shard: Shard
    starts: np.ndarray
    """Input token of the first pair of each, int64 ``[n]``."""
    counts: np.ndarray
    """Pairs of each, from 1, int64 ``[n]``."""


def empty_row(seq_len: int) -> dict[str, np.ndarray]:
    """Returns a row of padding: all zero, so weight 0 and segment 0 everywhere."""
    return {name: np.zeros(seq_len, dtype) for name, dtype in ROW_DTYPES.items()}


def assemble_row(spans: Iterable[Spans], seq_len: int) -> dict[str, np.ndarray]:
    """Returns the row that holds these segments one after the other, padded: the arrays of ``ROW_DTYPES``."""
    row = empty_row(seq_len)
    place = segment = 0
    for span in spans:
        num_pairs = int(span.counts.sum())
        here = slice(place, place + num_pairs)
        positions = np.arange(num_pairs) - np.repeat(np.cumsum(span.counts) - span.counts, span.counts)
        source = np.repeat(span.starts, span.counts) + positions
        row["tokens"][here] = span.shard.tokens[source]
        row["labels"][here] = span.shard.tokens[source + 1]
        row["positions"][here] = positions
        row["segment_ids"][here] = segment + np.repeat(np.arange(1, len(span.counts) + 1), span.counts)
        row["weights"][here] = 1 if span.shard.trained is None else span.shard.trained[source + 1]
        place += num_pairs
        segment += len(span.counts)
    return row


def concatenate_documents(documents: Sequence[np.ndarray]) -> Shard:
    """Returns the documents as one shard in memory, its tokens int32."""
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    tokens = np.concatenate(documents).astype(np.int32, copy=False) if documents else np.zeros(0, np.int32)
    return Shard(tokens=tokens, ends=ends)


class PackedRows:
    """Rows of ``seq_len`` pairs; each row is assembled when it is asked for, from several threads if need be.

    With ``pack``, the pairs of all documents are cut into rows of ``seq_len``; only the last row is padded. Without it,
    a row holds pairs of one document only, padded, and a document longer than a row takes several rows. Either way a
    document that continues in the next row starts there as a new segment at position 0.

    Args:
      shards: the documents, in order.
      seq_len: pairs per row.
      pack: whether documents share rows.
      keep: scores of documents -> which of them the rows are made of, bool; None: all.

    Raises:
      ValueError: a document without tokens, or ends that do not span the tokens.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        seq_len: int,
        *,
        pack: bool,
        keep: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.seq_len = seq_len
        self.num_pairs = 0
        """Trained (input, label) pairs over all rows."""
        self._shards = shards
        self._pack = pack
        self._keep = keep
        blocks = [self._count(number) for number in range(len(shards))]
        # Of each block: its shard, its first document, and the units (pairs if packed, else rows) before it.
        self._block_shard = np.repeat(np.arange(len(shards)), [len(block) for block in blocks])
        self._block_start = np.concatenate([BLOCK * np.arange(len(b)) for b in blocks] or [np.zeros(0, np.int64)])
        self._units_before = np.cumsum(np.concatenate([[0], *blocks]), dtype=np.int64)

    def __len__(self) -> int:
        units = int(self._units_before[-1])
        return -(units // -self.seq_len) if self._pack else units

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``ROW_DTYPES``, each ``[seq_len]``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return assemble_row(self._packed(i) if self._pack else self._separate(i), self.seq_len)

    def _count(self, number: int) -> np.ndarray:
        """Units of each block of a shard, int64 ``[num_blocks]``."""
        shard = self._shards[number]
        num_tokens = int(shard.ends[-1]) if len(shard.ends) else 0
        if num_tokens != len(shard.tokens):
            raise ValueError(f"the documents of shard {number} end at {num_tokens}, not at {len(shard.tokens)}")
        blocks = [np.zeros(0, np.int64)]
        for first in range(0, len(shard.ends), _CHUNK):
            _, pairs = self._documents(shard, first, first + _CHUNK)
            if pairs.min() < 0:
                raise ValueError("every document needs at least one token (its end-of-document token)")
            self.num_pairs += int(pairs.sum())
            blocks.append(np.add.reduceat(self._units(pairs), np.arange(0, len(pairs), BLOCK)))
        return np.concatenate(blocks)

    def _documents(self, shard: Shard, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """First token and number of pairs of some documents; those that are not kept have no pairs."""
        ends = shard.ends[first:stop]
        starts = np.empty(len(ends), np.int64)
        starts[0] = shard.ends[first - 1] if first else 0
        starts[1:] = ends[:-1]
        pairs = ends - starts - 1
        if self._keep is not None:
            pairs[~self._keep(shard.scores[first:stop])] = 0
        return starts, pairs

    def _units(self, pairs: np.ndarray) -> np.ndarray:
        return pairs if self._pack else -(pairs // -self.seq_len)

    def _block_of(self, unit: int) -> int:
        # To the right of equals, so that blocks without units are passed over.
        return int(np.searchsorted(self._units_before, unit, side="right")) - 1

    def _read_block(self, block: int) -> tuple[Shard, np.ndarray, np.ndarray, np.ndarray]:
        """The shard of a block; of its documents the first token, the pairs, and the units up to and with each."""
        shard, first = self._shards[self._block_shard[block]], int(self._block_start[block])
        starts, pairs = self._documents(shard, first, first + BLOCK)
        return shard, starts, pairs, self._units_before[block] + np.cumsum(self._units(pairs))

    def _packed(self, i: int) -> Iterator[Spans]:
        """The pairs from i seq_len to (i + 1) seq_len, block by block."""
        first, stop = i * self.seq_len, min((i + 1) * self.seq_len, self.num_pairs)
        while first < stop:
            block = self._block_of(first)
            shard, starts, pairs, after = self._read_block(block)
            documents = slice(
                np.searchsorted(after, first, side="right"), np.searchsorted(after, stop, side="left") + 1
            )
            before = after[documents] - pairs[documents]
            skipped = np.maximum(first - before, 0)
            counts = np.minimum(after[documents], stop) - before - skipped
            filled = counts > 0
            yield Spans(shard, (starts[documents] + skipped)[filled], counts[filled])
            first = min(stop, int(after[-1]))

    def _separate(self, i: int) -> Iterator[Spans]:
        """The part of a document that row ``i`` holds."""
        shard, starts, pairs, after = self._read_block(self._block_of(i))
        document = int(np.searchsorted(after, i, side="right"))
        row_of_document = i - int(after[document] - self._units(pairs[document]))
        skipped = row_of_document * self.seq_len
        start, count = starts[document] + skipped, min(self.seq_len, pairs[document] - skipped)
        yield Spans(shard, np.array([start]), np.array([count]))
