"""Which ranges of which tensors hold a box of a parameter: arithmetic only, no files, no arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxpar.model.keymap import TensorSource

Bounds = tuple[int, int]
"""Start and stop of a range of indices."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one tensor that goes to one place of the box.

    ``box[where] = tensor[index].reshape(shape).transpose(order)``
    """

    name: str
    """Name of the tensor."""
    index: tuple[slice, ...]
    """Range in every dim of the tensor."""
    shape: tuple[int, ...]
    """Shape with the merged dims taken apart."""
    order: tuple[int, ...]
    """Permutation from the tensor's order of dims to the parameter's."""
    where: tuple[int | slice, ...]
    """Place in the box; a number for a stacked dim."""


def pieces(source: TensorSource, box: Sequence[Bounds], sizes: Mapping[str, int]) -> Iterator[Piece]:
    """The fewest pieces that fill a box; together they hold each of its elements once, and nothing else.

    Args:
        source: Where the parameter comes from.
        box: Bounds in every dim of the parameter. What lies beyond a dim's size is in no piece.
        sizes: Size of every dim by name, as the tensors have it.
    """
    held = {dim: (start, min(stop, sizes[dim])) for dim, (start, stop) in zip(source.dims, box, strict=True)}
    if any(start >= stop for start, stop in held.values()):
        return
    origin = {dim: start for dim, (start, _) in zip(source.dims, box, strict=True)}
    merged = [dim for dims in source.source_dims for dim in dims]
    order = tuple(merged.index(dim) for dim in source.dims if dim in merged)
    runs = [list(_runs(dims, held, sizes)) for dims in source.source_dims]
    for stacked in itertools.product(*(range(*held[dim]) for dim in source.stacked_dims)):
        indices = dict(zip(source.stacked_dims, stacked, strict=True))
        for combination in itertools.product(*runs):
            parts = {dim: bounds for _, run_parts in combination for dim, bounds in run_parts.items()}
            yield Piece(
                name=source.name.format(**indices),
                index=tuple(run for run, _ in combination),
                shape=tuple(parts[dim][1] - parts[dim][0] for dim in merged),
                order=order,
                where=tuple(
                    indices[dim] - origin[dim]
                    if dim in indices
                    else slice(parts[dim][0] - origin[dim], parts[dim][1] - origin[dim])
                    for dim in source.dims
                ),
            )


def _runs(
    dims: Sequence[str], held: Mapping[str, Bounds], sizes: Mapping[str, int]
) -> Iterator[tuple[slice, dict[str, Bounds]]]:
    """The contiguous ranges of one tensor dim that hold the box of the dims merged in it.

    Yields each range with the bounds that it has in every merged dim. Dims after the last split one are whole and stay
    in one run; every index of the dims before it starts another.
    """
    split = max((i for i, dim in enumerate(dims) if held[dim] != (0, sizes[dim])), default=0)
    for leading in itertools.product(*(range(*held[dim]) for dim in dims[:split])):
        parts = {dim: (index, index + 1) for dim, index in zip(dims[:split], leading, strict=True)}
        parts |= {dim: held[dim] for dim in dims[split:]}
        start, length = 0, 1
        for dim in dims:
            start = start * sizes[dim] + parts[dim][0]
            length *= parts[dim][1] - parts[dim][0]
        yield slice(start, start + length), parts
