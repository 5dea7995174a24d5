"""A seeded permutation of any size, computed at the places that are asked for.

Ours, because the data order must be exact and Grain's ``index_shuffle`` is not (grain 0.2.18): of 4**k + 1 rows, k from
8, it returns one twice and the last never. It also takes 6.6 ms per place of 10 rows, and is 32-bit.
"""

from __future__ import annotations

import numpy as np

# Luby and Rackoff (1988) need 4 rounds for large halves. In small ones a round has few choices: with 12 rounds the
# permutations of 5 rows differ in frequency by 12%, with 24 by no more than chance (20,000 keys).
_ROUNDS = 24
_HASH_SHIFT = np.uint64(32)


def permuted(places: np.ndarray, num_rows: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns where the permutation of ``range(num_rows)`` that ``key`` names takes ``places``, int64 ``[n]``.

    A Feistel network over the next power of two, walked until it lands below ``num_rows`` (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002, section 3): a bijection whatever the round function is.

    Args:
      places: any of ``range(num_rows)``, integers ``[n]``.
      num_rows: size of the permutation, from 1.
      key: non-negative integers.
    """
    # SeedSequence is frozen across numpy releases (NEP 19), unlike Generator.permutation: a resumed run may have a
    # newer numpy.
    round_keys = np.random.SeedSequence(key).generate_state(2 * _ROUNDS, np.uint64).reshape(_ROUNDS, 2)
    rows = _encrypted(np.asarray(places, np.uint64), num_rows, round_keys)
    while (outside := rows >= num_rows).any():
        rows[outside] = _encrypted(rows[outside], num_rows, round_keys)
    return rows.astype(np.int64)


def _encrypted(values: np.ndarray, num_rows: int, round_keys: np.ndarray) -> np.ndarray:
    num_bits = (num_rows - 1).bit_length()
    right_bits = np.uint64(num_bits - num_bits // 2)
    left_mask, right_mask = np.uint64(2 ** (num_bits // 2) - 1), np.uint64(2 ** int(right_bits) - 1)
    left, right = values >> right_bits, values & right_mask
    for i in range(0, _ROUNDS, 2):
        left ^= _hashed(right, *round_keys[i]) & left_mask
        right ^= _hashed(left, *round_keys[i + 1]) & right_mask
    return (left << right_bits) | right


def _hashed(bits: np.ndarray, factor: np.uint64, term: np.uint64) -> np.ndarray:
    """Strongly universal hash of 32 to 32 bits (Dietzfelbinger, "Universal hashing ... without primes", 1996)."""
    return (factor * bits + term) >> _HASH_SHIFT
