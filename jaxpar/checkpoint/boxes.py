"""Which ranges of which arrays hold a box of another array: arithmetic only, no files, no arrays read.

A key map rule describes both its sides as dims made of factors, so one algorithm serves both ways: a parameter's box
from the tensors of a checkpoint, and a tensor's box from parameters. The box that is wanted is cut into *blocks*, each
a box of factors; each block is read as few contiguous ranges of every dim on the other side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxpar.families.keymap import TensorSource, product

Bounds = tuple[int, int]
"""Start and stop of a range of indices."""

_TILE = 256
"""Elements per side of the tiles of a transposing copy: a tile of float32 fits in a core's cache."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one array that goes to one place of the box; :meth:`put` copies it there."""

    index: tuple[slice, ...]
    """Range in every dim of the array that is read."""
    shape: tuple[int, ...]
    """Shape of what is read with the merged dims taken apart."""
    order: tuple[int, ...]
    """Permutation from the factors as they are read to the factors as they are wanted."""
    where: tuple[slice, ...]
    """Range of the box that this piece lies in."""
    parts: tuple[int, ...]
    """Shape of that range with the merged dims taken apart."""
    inner: tuple[int | slice, ...]
    """Place in that range; a number for a factor that what is read does not have."""

    def put(self, box: np.ndarray, values: np.ndarray) -> None:
        """Copies ``values``, which is ``array[index]``, to its place, converting to the dtype of ``box``."""
        # Taking a dim apart never needs a copy, so this is a view; "..." keeps it one for an array without dims.
        place = box[(*self.where, ...)].reshape(self.parts)[(*self.inner, ...)]
        _copy(values.reshape(self.shape).transpose(self.order), place)


@dataclasses.dataclass(frozen=True)
class _Dim:
    """One dim of an array: its factors, the last one fastest, after some elements that belong to something else."""

    factors: tuple[str, ...]
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class _Block:
    """A box of factors that is a contiguous range in every dim of the box that is wanted."""

    where: tuple[slice, ...]
    held: dict[str, Bounds]


def pieces(source: TensorSource, box: Sequence[Bounds], sizes: Mapping[str, int]) -> Iterator[tuple[str, Piece]]:
    """What fills a box of a parameter: (tensor name, piece); together they hold each element once and nothing else.

    Args:
        source: Where the parameter comes from.
        box: Bounds in every dim of the parameter. What lies beyond a dim's size is in no piece.
        sizes: Size of every factor by name, as the tensors have it.
    """
    stored, target = _stored_dims(source, sizes), _target_dims(source)
    for block in _blocks(target, box, sizes):
        for index in itertools.product(*(range(*block.held[dim]) for dim in source.stacked_dims)):
            indices = dict(zip(source.stacked_dims, index, strict=True))
            name = source.name.format(**indices)
            yield from ((name, piece) for piece in _pieces(stored, target, block, sizes, source.pinned | indices))


def tensor_pieces(
    source: TensorSource, indices: Mapping[str, int], box: Sequence[Bounds], sizes: Mapping[str, int]
) -> Iterator[Piece]:
    """What a parameter contributes to a box of one of its tensors: the inverse of :func:`pieces`.

    Args:
        source: Where the parameter comes from.
        indices: Index of every stacked dim: which tensor.
        box: Bounds in every dim of the tensor. What a rule skips or does not pin is in no piece.
        sizes: Size of every factor by name.
    """
    stored, target = _stored_dims(source, sizes), _target_dims(source)
    for block in _blocks(stored, box, sizes):
        pinned = source.pinned.items()
        if all(block.held[name][0] <= index < block.held[name][1] for name, index in pinned):
            yield from _pieces(target, stored, block, sizes, source.pinned | dict(indices))


def _stored_dims(source: TensorSource, sizes: Mapping[str, int]) -> list[_Dim]:
    return [_Dim(dim.factors, sum(product(term, sizes) for term in dim.before)) for dim in source.stored_dims]


def _target_dims(source: TensorSource) -> list[_Dim]:
    return [_Dim(factors) for factors in source.target_dims]


def _blocks(dims: Sequence[_Dim], box: Sequence[Bounds], sizes: Mapping[str, int]) -> Iterator[_Block]:
    """The box, as far as the dims hold it, cut into boxes of factors."""
    per_dim = []
    for dim, (start, stop) in zip(dims, box, strict=True):
        shape = [sizes[factor] for factor in dim.factors]
        first, last = max(start - dim.offset, 0), min(stop - dim.offset, math.prod(shape))
        cuts = []
        for bounds in _cut(first, last, shape) if first < last else ():
            low = sum(lo * math.prod(shape[i + 1 :]) for i, (lo, _) in enumerate(bounds)) + dim.offset - start
            length = math.prod(hi - lo for lo, hi in bounds)
            cuts.append((slice(low, low + length), dict(zip(dim.factors, bounds, strict=True))))
        per_dim.append(cuts)
    for combination in itertools.product(*per_dim):
        held = {factor: bounds for _, factors in combination for factor, bounds in factors.items()}
        yield _Block(tuple(where for where, _ in combination), held)


def _cut(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Bounds, ...]]:
    """A range of a merged dim as boxes of its factors, in order: a torn head, whole indices, a torn tail."""
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if start < first * inner:
        row = first - 1
        end = min(stop, first * inner)
        yield from (((row, row + 1), *rest) for rest in _cut(start - row * inner, end - row * inner, shape[1:]))
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if max(last, first) * inner < stop:
        yield from (((last, last + 1), *rest) for rest in _cut(0, stop - last * inner, shape[1:]))


def _pieces(
    read: Sequence[_Dim], wanted: Sequence[_Dim], block: _Block, sizes: Mapping[str, int], fixed: Mapping[str, int]
) -> Iterator[Piece]:
    """The fewest pieces that fill a block.

    Args:
        read: Dims of the array that is read.
        wanted: Dims of the array whose box is filled.
        block: The part of that box.
        sizes: Size of every factor by name.
        fixed: The one index of factors that only one of the two arrays has.
    """
    held = block.held | {factor: (index, index + 1) for factor, index in fixed.items()}
    wanted_factors = [factor for dim in wanted for factor in dim.factors]
    shared = set(wanted_factors) - set(fixed)
    read_factors = [factor for dim in read for factor in dim.factors if factor in shared]
    order = tuple(read_factors.index(factor) for factor in wanted_factors if factor in shared)
    parts = tuple(block.held[factor][1] - block.held[factor][0] for factor in wanted_factors)
    for combination in itertools.product(*(list(_runs(dim, held, sizes)) for dim in read)):
        got = {factor: bounds for _, factors in combination for factor, bounds in factors.items()}
        yield Piece(
            index=tuple(run for run, _ in combination),
            shape=tuple(got[factor][1] - got[factor][0] for factor in read_factors),
            order=order,
            where=block.where,
            parts=parts,
            inner=tuple(_place(factor, block.held[factor][0], got, fixed) for factor in wanted_factors),
        )


def _copy(values: np.ndarray, place: np.ndarray) -> None:
    """``place[...] = values``; in tiles when transposing, where numpy would fetch a cache line for every element."""
    read, written = _fastest_dim(values), _fastest_dim(place)
    if read == written or values.size <= _TILE**2:
        place[...] = values
        return
    tile = [slice(None)] * values.ndim
    for rows, columns in itertools.product(_tiles(values.shape[read]), _tiles(values.shape[written])):
        tile[read], tile[written] = rows, columns
        place[tuple(tile)] = values[tuple(tile)]


def _fastest_dim(array: np.ndarray) -> int:
    """The dim whose neighbours lie closest in memory; -1 when no dim has any."""
    strides = [
        (abs(stride), dim)
        for dim, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True))
        if size > 1
    ]
    return min(strides, default=(0, -1))[1]


def _tiles(size: int) -> list[slice]:
    return [slice(start, start + _TILE) for start in range(0, size, _TILE)]


def _place(factor: str, origin: int, got: Mapping[str, Bounds], fixed: Mapping[str, int]) -> int | slice:
    if factor in fixed:
        return fixed[factor] - origin
    return slice(got[factor][0] - origin, got[factor][1] - origin)


def _runs(dim: _Dim, held: Mapping[str, Bounds], sizes: Mapping[str, int]) -> Iterator[tuple[slice, dict[str, Bounds]]]:
    """The contiguous ranges of one dim that hold a box of its factors.

    Yields each range with the bounds that it has in every factor. Factors after the last split one are whole and stay
    in one run; every index of the factors before it starts another.
    """
    factors = dim.factors
    split = max((i for i, factor in enumerate(factors) if held[factor] != (0, sizes[factor])), default=0)
    for leading in itertools.product(*(range(*held[factor]) for factor in factors[:split])):
        bounds = {factor: (index, index + 1) for factor, index in zip(factors[:split], leading, strict=True)}
        bounds |= {factor: held[factor] for factor in factors[split:]}
        start, length = 0, 1
        for factor in factors:
            start = start * sizes[factor] + bounds[factor][0]
            length *= bounds[factor][1] - bounds[factor][0]
        yield slice(dim.offset + start, dim.offset + start + length), bounds
