"""What a block keeps of its forward pass for its backward pass, and what it computes again.

Activations that can be kept have names (``jaxpar.config.schema.Activation``), put on them in ``jaxpar.model`` by
``checkpoint_name``. Gathered weights have none, so no policy keeps them: the backward pass gathers again.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable

import jax
from jax.ad_checkpoint import Offloadable, Saveable, checkpoint_name
from jax.extend.core import Primitive

from jaxpar.config.schema import Activation, TrainConfig

BLOCK_INPUT = "block_input"
"""Name of what enters a block; every policy but ``none`` keeps it, on the device or on the host."""


def is_attention_kernel(primitive: Primitive, *arguments: jax.core.AbstractValue) -> bool:
    """Whether it is a fused attention's forward pass, whose results are the output and the log-sums.

    A backward kernel needs both: keeping the output alone, by name, would run the forward kernel again. cuDNN's has a
    primitive of its own. tokamax's (0.0.17) is a ``custom_vjp`` with ``optimize_remat``, of which JAX 0.12 makes a
    ``remat_opt``; attention is the only one with operands of four dims.
    """
    if primitive.name == "remat_opt":
        return any(getattr(argument, "ndim", 0) == 4 for argument in arguments)
    return primitive.name.startswith("dot_product_attention_fwd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """Recomputation, fixed while tracing."""

    mode: str
    """``none``, ``full``, ``selective`` or ``offload``, see ``train.remat``."""
    save: tuple[str, ...] = ()
    """Names of kept activations, see ``train.remat_save``."""

    @classmethod
    def of(cls, train: TrainConfig) -> Remat:
        """What a config asks for."""
        return cls(mode=train.remat, save=train.remat_save if train.remat in ("selective", "offload") else ())

    def wrap(self, block: Callable) -> Callable:
        """The body of a scan over blocks, (x, weights) -> (x, y), as it is to be differentiated."""
        if self.mode == "none":
            return block

        def named(x: jax.Array, weights: object) -> tuple:
            return block(checkpoint_name(x, BLOCK_INPUT), weights)

        # A scan body cannot be merged with its recomputation, so the barrier against that is not needed.
        return jax.checkpoint(named, policy=self._policy(), prevent_cse=False)

    def _policy(self) -> Callable:
        policies = jax.checkpoint_policies
        if self.mode == "full":
            return policies.nothing_saveable
        if self.mode == "offload":
            kept = Offloadable(src="device", dst="pinned_host")
            by_name = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[BLOCK_INPUT, *self.save],
                offload_src=kept.src,
                offload_dst=kept.dst,
            )
        else:
            kept, by_name = Saveable, policies.save_only_these_names(*self.save)
        if "attention" not in self.save:
            return by_name

        def policy(primitive, *arguments, **params):
            is_kept = is_attention_kernel(primitive, *arguments)
            return kept if is_kept else by_name(primitive, *arguments, **params)

        return policy


KEEP_ALL = Remat(mode="none")
"""Nothing is computed again but gathers of weights; also for programs without a backward pass."""

KEEP_NAMED = Remat(mode="selective", save=typing.get_args(Activation))
"""Only what has no name is computed again: norms, activation functions, and gathers of weights."""
