"""What several processes must see alike: damage to a checkpoint that they read together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.checkpoint.errors import DamagedCheckpointError

_TEXT_BYTES = 8192
"""Enough for the longest path that Linux has, and for the beginning of any message."""


@contextlib.contextmanager
def damage_for_all() -> Iterator[None]:
    """Damage that any process meets inside the block is raised on leaving it by all of them.

    Collective: every process enters the block, which must not wait for other processes itself. One that falls back on
    an older step alone would leave the others waiting for it. Errors of other kinds leave the block at once; they end
    the run.

    Raises:
        DamagedCheckpointError: What this process has met; otherwise what the first of the others has met, with its
            number.
    """
    error = None
    try:
        yield
    except DamagedCheckpointError as damage:
        error = damage
    if jax.process_count() > 1:
        found = _texts_of_all(str(error) if error else "")
        if error is None and any(found):
            process_id, text = next((i, text) for i, text in enumerate(found) if text)
            error = DamagedCheckpointError(f"process {process_id}: {text}")
    if error is not None:
        raise error


def text_of_first_process(text: str) -> str:
    """What process 0 says. Collective: every process calls it, with any text."""
    return _text(multihost_utils.broadcast_one_to_all(_array(text)))


def _texts_of_all(text: str) -> list[str]:
    """The text of every process, cut off where it is long."""
    return [_text(row) for row in multihost_utils.process_allgather(_array(text))]


def _array(text: str) -> np.ndarray:
    """uint8 [_TEXT_BYTES]: every process must bring an array of one shape."""
    encoded = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    return np.pad(encoded, (0, _TEXT_BYTES - len(encoded)))


def _text(array: np.ndarray) -> str:
    return bytes(array).rstrip(b"\0").decode(errors="ignore")
