"""How the tokens of a mixture of experts travel: which exchange, how many rows, how much room. No JAX."""

from __future__ import annotations

import math


def rows_moved(mode: str, top_k: int, num_devices: int) -> float:
    """Rows that a device sends in one direction per token of its own, with evenly spread choices.

    all_to_all: each of the k choices is on another device with chance (n - 1) / n. gather: every token goes to all
    others, and sums come back by reduce-scatter: n - 1.
    """
    return num_devices - 1 if mode == "gather" else top_k * (num_devices - 1) / num_devices


def exchange_mode(wanted: str, top_k: int, num_devices: int) -> str:
    """The exchange that ``mesh.expert_exchange`` means: "auto" takes the one that moves fewer rows."""
    if wanted != "auto":
        return wanted
    return min(("all_to_all", "gather"), key=lambda mode: rows_moved(mode, top_k, num_devices))


def receive_bound(num_tokens: int, top_k: int, num_experts: int, num_devices: int, factor: float) -> int:
    """Rows that one device makes room for.

    Args:
        num_tokens: tokens of one device.
        top_k: experts per token.
        num_experts: of the whole axis.
        num_devices: on the expert axis.
        factor: times what it would get if all got the same; 0: the worst case, all tokens of the axis choosing as many
            of its experts as they can.
    """
    worst = num_devices * num_tokens * min(top_k, num_experts // num_devices)
    return min(worst, math.ceil(factor * num_tokens * top_k)) if factor else worst


def describe_exchange(wanted: str, top_k: int, num_experts: int, num_devices: int) -> str:
    """For people: what the expert axis does, and why."""
    if num_devices == 1:
        return f"{num_experts} experts on every device"
    mode = exchange_mode(wanted, top_k, num_devices)
    other = "gather" if mode == "all_to_all" else "all_to_all"
    moved, instead = (rows_moved(m, top_k, num_devices) for m in (mode, other))
    why = "as configured" if wanted != "auto" else "which moves fewer" if moved < instead else "which moves as many"
    return (
        f"{num_experts} experts over expert={num_devices}, tokens exchanged by {mode}: {moved:.3g} rows per token and "
        f"direction ({other}: {instead:.3g}), {why}"
    )
