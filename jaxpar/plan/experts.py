"""How the tokens of a mixture of experts travel and are multiplied: which exchange, how many rows, how much room, which
kernel. No JAX.
"""

from __future__ import annotations

import math

from jaxpar.config.schema import Config
from jaxpar.plan.accelerator import TOKAMAX_MISSING, Accelerator, KernelChoice


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


def choose_grouped_product(config: Config, tensor: int, accelerator: Accelerator) -> KernelChoice:
    """What multiplies the rows of each expert with its weights: a name of ``jaxpar.model.grouped.GROUPED_PRODUCTS``.

    On Hopper tokamax's kernel makes the product and both gradients; on Ampere the product and the gradient of the rows
    (tokamax 0.0.17, ``ragged_dot/pallas_mosaic_gpu.py``), and a loop over tiles that of the weights. Everywhere else
    the loop makes all: tokamax's triton kernels need a package that is not asked for here, and that for Blackwell fails
    to trace where values vary over mesh axes ("mpmd_map does not support Refs with varying manual axis types").

    Args:
        config: the config; dimensions complete.
        tensor: devices on the tensor axis.
        accelerator: what it runs on.
    """
    objection = _kernel_objection(config, tensor, accelerator)
    if accelerator.capability is None:
        return KernelChoice(kernel="tiles_64", reason="experts multiplied tile by tile (CPU)")
    if objection:
        reason = f"experts multiplied tile by tile in a loop (not tokamax: {objection})"
        return KernelChoice(kernel="tiles_512", reason=reason)
    if accelerator.capability[0] == 9:
        return KernelChoice(kernel="mosaic_gpu", reason="experts multiplied by tokamax mosaic_gpu")
    reason = (
        "experts multiplied by tokamax mosaic_gpu, gradients of their weights tile by tile in a loop (not tokamax: its "
        "kernel for them is written for Hopper)"
    )
    return KernelChoice(kernel="mosaic_gpu_tiles_512", reason=reason)


def _kernel_objection(config: Config, tensor: int, accelerator: Accelerator) -> str | None:
    """Why tokamax's grouped product cannot do the work; None if it can."""
    if accelerator.capability is None:
        return f"it runs on GPUs, and this is {accelerator.name}"
    if accelerator.capability[0] not in (8, 9):
        return f"its kernels that can be used here are written for Ampere and Hopper, and this is {accelerator.name}"
    if config.precision.compute != "bfloat16":
        return f"it computes in bfloat16, and precision.compute is {config.precision.compute}"
    if not accelerator.has_tokamax:
        return TOKAMAX_MISSING
    # Rows of operands begin at multiples of 16 bytes; on Ampere inner dims come in whole blocks.
    multiple = 32 if accelerator.capability[0] == 8 else 8
    for name, width in (
        ("model.embed_dim", config.model.embed_dim),
        ("model.expert_mlp_dim / mesh.tensor", config.model.expert_mlp_dim // tensor),
    ):
        if width % multiple:
            return f"{name} = {width} is not a multiple of {multiple}"
    return None
