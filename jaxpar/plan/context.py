"""How the context axis splits the sequence, and which way of attention it uses."""

from __future__ import annotations

import math

RING_TOKENS = 2048
"""Tokens of a row on one device from which ``auto`` takes the ring.

A turn of the ring sends 4 s K h bytes (bfloat16 keys and values of s tokens) and computes 2 s^2 H h floating-point
operations, so s H / (2 K) operations hide a byte. At s = 2048 and 4 query heads per kv head that is 4096 per byte: an
H100 that reaches 600 TFLOP/s hides a link of 150 GB/s, a third of its NVLink. Shorter parts hide less, and their
gathered rows are small.
"""

SCORE_BYTES = 512 * 2**20
"""Largest float32 scores that exist at one time; longer blocks go through their queries in parts."""


def resolved_context_mode(mode: str, tokens_per_device: float) -> str:
    """``ring`` or ``allgather``: what ``mesh.context_mode`` means for parts of this many tokens of a row."""
    if mode != "auto":
        return mode
    return "ring" if tokens_per_device >= RING_TOKENS else "allgather"


def sequence_shards(*, tensor: int, context: int) -> int:
    """What data.seq_len must divide by: two chunks per context member (zig-zag order), which tensor splits further."""
    return tensor if context == 1 else context * math.lcm(2, tensor)
