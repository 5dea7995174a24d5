"""What a block keeps of its forward pass for its backward pass, and what it computes again.

Activations that can be kept have names (``jaxpar.config.schema.Activation``), put on them in ``jaxpar.model`` by
``checkpoint_name``. Gathered weights have none, so no policy keeps them: the backward pass gathers again.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config.schema import Activation, TrainConfig

BLOCK_INPUT = "block_input"
"""Name of what enters a block; every policy but ``none`` keeps it, on the device or on the host."""

KERNEL_PRIMITIVES = ("dot_product_attention_fwd",)
"""Primitives of fused attention, by the start of their names. Their results are the attention output and its
log-sum-exp, which a backward kernel needs: keeping the output alone would run the forward kernel again."""


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
        """The body of a scan over blocks, ((x, ...), weights) -> ((x, ...), y), as it is to be differentiated."""
        if self.mode == "none":
            return block

        def named(carry: tuple, weights: object) -> tuple:
            x, *rest = carry
            return block((checkpoint_name(x, BLOCK_INPUT), *rest), weights)

        # A scan body cannot be merged with its recomputation, so the barrier against that is not needed.
        return jax.checkpoint(named, policy=self._policy(), prevent_cse=False)

    def _policy(self) -> Callable:
        policies = jax.checkpoint_policies
        if self.mode == "full":
            return policies.nothing_saveable
        if self.mode == "offload":
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[BLOCK_INPUT, *self.save],
                offload_src="device",
                offload_dst="pinned_host",
            )
        by_name = policies.save_only_these_names(*self.save)
        if "attention" not in self.save:
            return by_name

        def policy(primitive, *args, **params):
            return primitive.name.startswith(KERNEL_PRIMITIVES) or by_name(primitive, *args, **params)

        return policy


KEEP_ALL = Remat(mode="none")
"""Nothing is computed again but gathers of weights; also for programs without a backward pass."""

KEEP_NAMED = Remat(mode="selective", save=typing.get_args(Activation))
"""Only what has no name is computed again: norms, activation functions, and gathers of weights."""
