"""Which records are held out for validation: a function of the records alone.

Neither the seed, nor the mesh, nor the number of processes, nor the tokenizer changes the split, so a held-out document
stays held out for the life of a corpus. A document that is added or renamed moves no other, and copies of one document
are always on the same side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxpar.config import ConfigError, Problem

_SALT = b"jaxpar validation split 1\0"


def document_scores(texts: Sequence[str]) -> np.ndarray:
    """Returns a hash of each document's content, uint64 ``[num_documents]``."""
    digests = b"".join(hashlib.sha256(_SALT + text.encode("utf-8")).digest()[:8] for text in texts)
    return np.frombuffer(digests, np.dtype("<u8"))


def record_scores(num_records: int) -> np.ndarray:
    """Returns a hash of each record's number, uint64 ``[num_records]``; it does not depend on ``num_records``."""
    key = int.from_bytes(hashlib.sha256(_SALT).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(num_records)


def held_out(scores: np.ndarray, fraction: float) -> np.ndarray:
    """Returns which records are for validation, bool ``[num_records]``.

    A record is held out when its score is in the lowest ``fraction`` of all possible scores, so the share is met on
    average. Where that leaves a side empty, the record with the lowest (highest) score goes to validation (training).

    Raises:
      ConfigError: there are fewer than two different records, so one side has to be empty.
    """
    if fraction == 0:
        return np.zeros(len(scores), bool)
    num_distinct = len(np.unique(scores))
    if num_distinct < 2:
        message = (
            f"both sides need a document, and there are {num_distinct} different ones (of {len(scores)} documents)"
        )
        remedy = "set data.validation_fraction = 0, or give at least two different documents (one file is one document)"
        raise ConfigError([Problem(key="data.validation_fraction", value=fraction, message=message, remedy=remedy)])
    mask = scores < np.uint64(int(fraction * 2**64))
    mask |= scores == scores.min()
    return mask & (scores != scores.max())
