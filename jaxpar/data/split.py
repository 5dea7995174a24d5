"""Which records are held out for validation: a function of the records alone.

Neither the seed, nor the mesh, nor the number of processes, nor the tokenizer changes the split, so a held-out document
stays held out for the life of a corpus. A document that is added or renamed moves no other, and copies of one document
are always on the same side.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxpar.config import ConfigError, Problem

_SALT = b"jaxpar validation split 1\0"


def document_score(text: str) -> int:
    """Returns a hash of a document's content, 64 bits."""
    return int.from_bytes(hashlib.sha256(_SALT + text.encode("utf-8")).digest()[:8], "little")


def document_scores(texts: Sequence[str]) -> np.ndarray:
    """Returns a hash of each document's content, uint64 ``[num_documents]``."""
    return np.array([document_score(text) for text in texts], np.uint64)


def token_scores(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns a hash of each document's tokens, uint64 ``[num_documents]``, where there is no text.

    Args:
      tokens: the documents one after the other, integers ``[num_tokens]``; their type does not matter.
      ends: where each document ends, ``[num_documents]``.
    """
    scores = np.empty(len(ends), np.uint64)
    start = 0
    for i, end in enumerate(ends.tolist()):
        digest = hashlib.sha256(_SALT + tokens[start:end].astype("<u4").tobytes()).digest()
        scores[i], start = int.from_bytes(digest[:8], "little"), end
    return scores


def record_scores(num_records: int) -> np.ndarray:
    """Returns a hash of each record's number, uint64 ``[num_records]``; it does not depend on ``num_records``."""
    key = int.from_bytes(hashlib.sha256(_SALT).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(num_records)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which scores are for validation."""

    threshold: int
    """Scores below it are, ..."""
    lowest: int
    """... and this one, the lowest of all, ..."""
    highest: int
    """... but not this one, the highest."""

    def held_out(self, scores: np.ndarray) -> np.ndarray:
        """Returns which records are for validation, bool ``[num_records]``."""
        mask = (scores < np.uint64(self.threshold)) | (scores == np.uint64(self.lowest))
        return mask & (scores != np.uint64(self.highest))

    def trained(self, scores: np.ndarray) -> np.ndarray:
        """Returns which records are for training: the others."""
        return ~self.held_out(scores)


def split_records(parts: Sequence[np.ndarray], fraction: float) -> Split | None:
    """Returns which records are held out; None when ``fraction`` is 0. Reads a part at a time.

    A record is held out when its score is in the lowest ``fraction`` of all possible scores, so the share is met on
    average. Where that leaves a side empty, the record with the lowest (highest) score goes to validation (training).

    Args:
      parts: scores, uint64, any number of arrays ``[num_records]``.
      fraction: as in ``data.validation_fraction``.

    Raises:
      ConfigError: there are fewer than two different records, so one side has to be empty.
    """
    if fraction == 0:
        return None
    present = [part for part in parts if len(part)]
    lowest = min((int(part.min()) for part in present), default=0)
    highest = max((int(part.max()) for part in present), default=0)
    if lowest == highest:
        num_distinct, num_records = min(1, len(present)), sum(map(len, present))
        message = (
            f"both sides need a document, and there are {num_distinct} different ones (of {num_records} documents)"
        )
        remedy = "set data.validation_fraction = 0, or give at least two different documents (one file is one document)"
        raise ConfigError([Problem(key="data.validation_fraction", value=fraction, message=message, remedy=remedy)])
    return Split(threshold=int(fraction * 2**64), lowest=lowest, highest=highest)


def held_out(scores: np.ndarray, fraction: float) -> np.ndarray:
    """Returns which records are for validation, bool ``[num_records]``, as ``split_records`` says."""
    split = split_records([scores], fraction)
    return np.zeros(len(scores), bool) if split is None else split.held_out(scores)
