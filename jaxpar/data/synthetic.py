"""Reproducible random rows that a model can learn a little from, for tests and benchmarks."""

from __future__ import annotations

import numpy as np

from jaxpar.data.packing import empty_row

# A quarter of the tokens are unpredictable, so that the loss falls quickly but not to zero.
JUMP_PROBABILITY = 0.25


class SyntheticRows:
    """Rows that are functions of ``(seed, record)`` only: one document each, without padding.

    The seed fixes one cycle through the whole vocabulary. A row walks along it from a random token, and at each step
    jumps to a uniformly random token instead with probability ``JUMP_PROBABILITY``: a Markov chain of order 1, whose
    entropy is far below that of uniform tokens.

    Args:
      records: which records the rows are, int64 ``[num_rows]``.
      vocab_size: number of token ids.
      seq_len: pairs per row.
      seed: any non-negative integer.
    """

    def __init__(self, records: np.ndarray, *, vocab_size: int, seq_len: int, seed: int):
        self.seq_len = seq_len
        self._records = records
        self._seed = seed
        # argsort of raw bits, and raw bits below: numpy freezes the streams of its bit generators, but not Generator's
        # methods (NEP 19), and a resumed run may have a newer numpy.
        self._cycle = np.argsort(_random_bits(seed, vocab_size), kind="stable").astype(np.int32)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``jaxpar.data.packing.ROW_DTYPES``, each ``[seq_len]``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        length = self.seq_len + 1
        # The record's spawn key keeps its stream apart from that of the cycle.
        jump_bits, target_bits = _random_bits(self._seed, 2 * length, int(self._records[i])).reshape(2, length)
        jumps = jump_bits < np.uint64(JUMP_PROBABILITY * 2**64)
        jumps[0] = True
        vocab_size = len(self._cycle)
        time = np.arange(length)
        last_jump = np.maximum.accumulate(np.where(jumps, time, 0))
        targets = (target_bits % np.uint64(vocab_size)).astype(np.int64)
        tokens = self._cycle[(targets[last_jump] + time - last_jump) % vocab_size]
        row = empty_row(self.seq_len)
        row["tokens"][:] = tokens[:-1]
        row["labels"][:] = tokens[1:]
        row["positions"][:] = time[:-1]
        row["segment_ids"][:] = 1
        row["weights"][:] = 1
        return row


def _random_bits(seed: int, count: int, *spawn_key: int) -> np.ndarray:
    """Returns uint64 ``[count]``, a function of ``(seed, spawn_key)``."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=spawn_key)).random_raw(count)
