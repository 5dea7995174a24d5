"""What a parameter is to an optimizer: its role, and the blocks and matrices in its dims, by its logical axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from jaxpar.config.schema import OptimConfig

STACKED = ("layers", "dense_layers", "moe_layers", "experts")
"""Leading logical axes that stack independent parameters, each of which an optimizer must see by itself."""

Role = Literal["norm", "bias", "embedding", "head", "weight"]


def role_of(name: str) -> Role:
    """Role of a parameter by its own name (the last part of its path)."""
    if name.endswith(("norm", "scale")):
        return "norm"
    if name.endswith("bias"):
        return "bias"
    if name in ("embedding", "positions"):
        return "embedding"
    return "head" if name == "head" else "weight"


@dataclasses.dataclass(frozen=True)
class View:
    """The dims of a parameter as an optimizer that looks across a leaf sees them.

    ``[stacked..., rows..., columns...]``: each index into the stacked dims is a block, which is a matrix if it has two
    groups of dims. A head and its head_dim are one group: the attention projections are the matrices that they would
    be with their heads side by side.
    """

    num_stacked: int
    """Leading dims that stack blocks."""
    num_dims: int
    split: int | None
    """Dim where a matrix's columns begin; None: blocks are no matrices."""
    padded_dim: int | None
    """Dim of the vocabulary, which may be padded."""
    true_size: int | None
    """Size of that dim without its padding; None: it has none."""

    @property
    def block_dims(self) -> tuple[int, ...]:
        """Dims of a block."""
        return tuple(range(self.num_stacked, self.num_dims))

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Dims that make a matrix's rows."""
        assert self.split is not None
        return tuple(range(self.num_stacked, self.split))

    @property
    def column_dims(self) -> tuple[int, ...]:
        """Dims that make a matrix's columns."""
        assert self.split is not None
        return tuple(range(self.split, self.num_dims))

    def count(self, shape: Sequence[int], dims: Sequence[int]) -> int:
        """Elements along some dims, without padding."""
        true = dict(enumerate(shape))
        if self.padded_dim is not None and self.true_size is not None:
            true[self.padded_dim] = self.true_size
        return math.prod(true[dim] for dim in dims)


def view_of(logical_axes: tuple[str, ...], vocab_size: int | None = None) -> View:
    """The view of a parameter with these logical axes.

    Args:
        logical_axes: One name per dim.
        vocab_size: True size of ``vocab`` dims; None if they are not padded.
    """
    num_dims, stacked = len(logical_axes), 0
    while stacked < num_dims and logical_axes[stacked] in STACKED:
        stacked += 1
    # A dim begins a group unless it is the inner part of the heads before it.
    starts = [dim for dim in range(stacked, num_dims) if not (logical_axes[dim] == "head_dim" and dim > stacked)]
    vocab = logical_axes.index("vocab") if "vocab" in logical_axes else None
    return View(
        num_stacked=stacked,
        num_dims=num_dims,
        split=starts[1] if len(starts) == 2 else None,
        padded_dim=vocab,
        true_size=vocab_size if vocab is not None else None,
    )


def is_factored(optim: OptimConfig, view: View, shape: Sequence[int]) -> bool:
    """Whether row and column means stand for the second moment that adafactor keeps of a parameter."""
    if not optim.factored or view.split is None:
        return False
    return min(view.count(shape, view.row_dims), view.count(shape, view.column_dims)) >= optim.min_factored_dim


def is_hidden_matrix(name: str, logical_axes: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix that maps hidden values to hidden values: no embedding, no head, no vector."""
    return view_of(logical_axes).split is not None and role_of(name) == "weight" and "vocab" not in logical_axes
