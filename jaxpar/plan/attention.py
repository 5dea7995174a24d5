"""Which attention kernel a run uses, and why the others cannot. Pure facts; no JAX."""

from __future__ import annotations

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import Config
from jaxpar.plan.accelerator import TOKAMAX_MISSING, Accelerator, KernelChoice
from jaxpar.plan.context import resolved_context_mode

KERNELS = ("cudnn", "tokamax", "xla")
"""Values of ``train.attention`` besides "auto", the fastest first."""


def choose_attention(config: Config, context: int, accelerator: Accelerator) -> KernelChoice:
    """The kernel that ``train.attention`` asks for, or with "auto" the first of ``KERNELS`` that can do the work:
    ``xla``, ``cudnn``, or tokamax's ``mosaic_gpu`` or ``triton``.

    Args:
        config: The config; dimensions complete.
        context: Devices on the context axis.
        accelerator: What it runs on.

    Raises:
        ConfigError: The kernel asked for cannot do it; says why, and which can.
    """
    asked = config.train.attention
    objections = {kernel: objection(kernel, config, context, accelerator) for kernel in KERNELS}
    able = [kernel for kernel in KERNELS if objections[kernel] is None]
    if asked == "auto":
        refused = "; ".join(f"not {kernel}: {text}" for kernel, text in objections.items() if text)
        kernel = _variant(able[0], accelerator)
        return KernelChoice(kernel=kernel, reason=f"attention {kernel} (auto{'; ' + refused if refused else ''})")
    if objections[asked] is not None:
        works = ", ".join(f'"{kernel}"' for kernel in able)
        problem = Problem(
            key="train.attention",
            value=asked,
            message=f"cannot be used: {objections[asked]}",
            remedy=f'works here: {works}; "auto" chooses',
        )
        raise ConfigError([problem])
    kernel = _variant(asked, accelerator)
    return KernelChoice(kernel=kernel, reason=f"attention {kernel} (train.attention)")


def objection(kernel: str, config: Config, context: int, accelerator: Accelerator) -> str | None:
    """Why a kernel cannot do what the config needs; None if it can. "xla" always can.

    cuDNN: 16-bit types, head_dim a multiple of 8 up to 128, on Hopper and newer 256 (JAX 0.12,
    ``cudnn/fused_attention_stablehlo.py``); here only without packing, since it takes no document of each token.
    tokamax 0.0.17: 16-bit types, Ampere and newer; backward passes above head_dim 128 were not compiled.
    """
    if kernel == "xla":
        return None
    capability, head_dim = accelerator.capability, config.model.head_dim
    if capability is None:
        return f"it runs on GPUs, and this is {accelerator.name}"
    if capability < (8, 0):
        return (
            f"it needs an Ampere GPU or newer (compute capability 8.0), and {accelerator.name} has "
            + "{}.{}".format(*capability)
        )
    if context > 1 and kernel == "cudnn":
        return f"mesh.context = {context} splits the sequence, and it takes as many queries as keys"
    if context > 1 and resolved_context_mode(config.mesh.context_mode, config.data.seq_len / context) == "ring":
        return "keys and values go around a ring (mesh.context_mode), whose blocks are merged by log-sums: not yet"
    if config.precision.compute != "bfloat16":
        return f"it computes in bfloat16, and precision.compute is {config.precision.compute}"
    if kernel == "cudnn":
        largest = 256 if capability >= (9, 0) else 128
        if head_dim % 8 or head_dim > largest:
            return f"head_dim {head_dim} is not a multiple of 8 up to {largest}"
        if config.data.pack:
            return "rows are packed (data.pack), and it cannot keep documents apart"
        return None
    if not accelerator.has_tokamax:
        return TOKAMAX_MISSING
    if head_dim > 128:
        return f"head_dim {head_dim} is above 128"
    return None


def _variant(kernel: str, accelerator: Accelerator) -> str:
    """Of tokamax there are two: mosaic_gpu is written for Hopper (9.x) and Blackwell (10.x), triton for the others."""
    if kernel != "tokamax":
        return kernel
    return "mosaic_gpu" if accelerator.capability[0] in (9, 10) else "triton"
