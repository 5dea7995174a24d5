"""Sizes as people write and read them."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def readable_bytes(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def readable_count(count: int) -> str:
    """``1,498,176 (1.5 M)``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count:,} ({count / size:.3g} {unit})"
    return f"{count:,}"


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB``, ``500 MB`` or ``1073741824``.

    Raises:
        ValueError: It is none of these.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = _UNITS | _BINARY_UNITS | {"": 1}
    if not match or match[2].upper() not in units:
        raise ValueError(f"{text!r} is not a size; write e.g. 4GiB, 500MB, or a number of bytes")
    return int(float(match[1]) * units[match[2].upper()])
