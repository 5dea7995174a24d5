"""One checkpoint under the names and shapes of another, read box by box.

``MappedTensors`` shows a foreign checkpoint as our parameters, ``ExportedTensors`` our parameters as a foreign
checkpoint; neither holds data. Copying a checkpoint is reading boxes from a view and writing them, in any order.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxpar.checkpoint.boxes import Bounds, pieces, tensor_pieces
from jaxpar.checkpoint.coverage import coverage
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.factor_sizes import given_sizes, is_known, missing_sizes, solve_sizes
from jaxpar.checkpoint.matching import NO_SIZES, Matching, same_paths
from jaxpar.checkpoint.tensors import ArrayType, TensorReader
from jaxpar.families.keymap import HARMLESS_TENSORS, ParamPath, TensorSource, product


class MappedTensors:
    """A checkpoint's tensors as our parameters, by path (``layers/q``). A ``TensorReader``.

    A box is put together from the ranges of the tensors that hold it; nothing else is read. Peak memory of a read is
    the box and the largest range, at most twice the box.
    """

    def __init__(
        self,
        reader: TensorReader,
        plan: Mapping[ParamPath, TensorSource],
        *,
        shapes: Mapping[ParamPath, Sequence[int]] | None = None,
        sizes: Mapping[str, int] = NO_SIZES,
        ignored: Collection[str] = HARMLESS_TENSORS,
        prefix: str = "",
        origin: str = "the checkpoint",
    ):
        """Checks the key map against the tensors; reads no data.

        Args:
            reader: The checkpoint.
            plan: Where each parameter comes from.
            shapes: Unpadded shape of each parameter, for the same paths as ``plan``. None: what the tensors make.
            sizes: Sizes by factor name that the shapes do not tell.
            ignored: Patterns (full match) of tensor names that need not be read, or not all of them.
            prefix: Goes in front of every parameter name, e.g. ``"params/"``.
            origin: What the checkpoint is called in errors.

        Raises:
            CheckpointError: One message with every missing, unexpected, wrong-shape and partly read tensor, with
                tensors of one parameter that differ in dtype, and with rules that do not fit; or the key map and
                ``shapes`` have different parameters.
        """
        matching = Matching(reader.types, plan, shapes=shapes, given=sizes, ignored=ignored)
        matching.refuse_misfits(origin, on_wrong_dtype="the tensors of one parameter must have one dtype")
        self._reader = reader
        self._sources = {param_name(path, prefix): (source, matching.sizes[path]) for path, source in plan.items()}
        self.types: dict[str, jax.ShapeDtypeStruct] = {
            param_name(path, prefix): jax.ShapeDtypeStruct(
                source.target_shape(matching.sizes[path]), matching.dtype(path)
            )
            for path, source in plan.items()
        }
        """Unpadded shape and stored dtype of each parameter by name, in the order of the plan."""

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One box of a parameter in its stored dtype; ``index`` has a start and a stop for every dim."""
        source, sizes = self._sources[name]
        box = bounds_of(index, self.types[name])
        values = np.empty([stop - start for start, stop in box], self.types[name].dtype)
        fill_box(self._reader, source, box, sizes, values)
        return values


class ExportedTensors:
    """Our parameters as another checkpoint's tensors, by their names there. A ``TensorReader``.

    The inverse of ``MappedTensors`` with the same key map. A box is put together from the boxes of the parameters that
    hold it; nothing else is read. A tensor that several parameters make together (fused projections) is complete or an
    error.
    """

    def __init__(
        self,
        reader: TensorReader,
        plan: Mapping[ParamPath, TensorSource],
        *,
        sizes: Mapping[str, int] = NO_SIZES,
        prefix: str = "",
    ):
        """Solves the shapes of the tensors; reads no data.

        Args:
            reader: Our parameters, unpadded, by path.
            plan: Where each parameter lies in the tensors; the same parameters as in ``reader``.
            sizes: Sizes by name that the parameters' shapes do not tell.
            prefix: What the reader's parameter names begin with, e.g. ``"params/"``; others are left alone.

        Raises:
            CheckpointError: Parameters are missing or have no place; a rule does not fit a parameter's shape; the
                parameters of a tensor leave a part of it open, overlap, or differ in dtype.
        """
        params = {tuple(n.removeprefix(prefix).split("/")): t for n, t in reader.types.items() if n.startswith(prefix)}
        same_paths(plan, params)
        by_template: dict[str, dict[ParamPath, TensorSource]] = collections.defaultdict(dict)
        for path, source in plan.items():
            by_template[source.name][path] = source
        known = given_sizes(plan, sizes, {path: param.shape for path, param in params.items()})
        groups = [_Group(sources, params, known) for sources in by_template.values()]
        self._reader, self._prefix = reader, prefix
        self._tensors: dict[str, tuple[_Group, dict[str, int]]] = {}
        self.types: dict[str, jax.ShapeDtypeStruct] = {}
        """Shape and dtype of each tensor by name: tensors of one layer stand together, as in the model."""
        for group, indices, name in _in_model_order(groups):
            if name in self._tensors:
                raise CheckpointError(f"two different names in the key map stand for the tensor {name}")
            self._tensors[name] = group, indices
            self.types[name] = group.type

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One box of a tensor in the parameters' dtype; ``index`` has a start and a stop for every dim."""
        group, indices = self._tensors[name]
        box = bounds_of(index, group.type)
        values = np.empty([stop - start for start, stop in box], group.type.dtype)
        for path, source in group.sources.items():
            for piece in tensor_pieces(source, indices, box, group.sizes[path]):
                piece.put(values, self._reader.read(param_name(path, self._prefix), piece.index))
        return values


class _Group:
    """The parameters that lie in the tensors of one name; for most names it is one."""

    def __init__(
        self,
        sources: Mapping[ParamPath, TensorSource],
        params: Mapping[ParamPath, ArrayType],
        given: Mapping[ParamPath, Mapping[str, int]],
    ):
        self.sources = sources
        pinned = [source.pinned for source in sources.values()]
        # A pinned factor has no other trace in our parameters than the indices that they take of it.
        counts = {name: 1 + max(p.get(name, 0) for p in pinned) for name in {n for p in pinned for n in p}}
        self.sizes = {path: self._solved(path, params[path], {**counts, **given[path]}) for path in sources}
        shape = self._known_shape()
        for path in sources:
            self.sizes[path] = self._solved(path, params[path], self.sizes[path], shape)
            if unknown := missing_sizes(sources[path], self.sizes[path]):
                raise self._misfit(path, params[path], f"the shapes do not tell the size of {', '.join(unknown)}")
            if any(not size for name, size in self.sizes[path].items() if name.startswith("_")):
                raise self._misfit(path, params[path], "no parameter fills the part that '_' skips")
        self.type = self._agreed_type(params)
        covered = coverage([(sources[path], self.sizes[path]) for path in sources], self.type.shape)
        if covered.unread or covered.shared:
            raise CheckpointError(
                f"{next(iter(sources.values())).name} {list(self.type.shape)} is not put together by {self._names()}: "
                f"of {covered.total} elements {covered.unread} come from no parameter and {covered.shared} from several"
            )

    def stacked_sizes(self) -> tuple[tuple[str, int], ...]:
        """Stacked dims and their sizes."""
        return self._stacked(next(iter(self.sources)))

    def _stacked(self, path: ParamPath) -> tuple[tuple[str, int], ...]:
        return tuple((dim, self.sizes[path][dim]) for dim in self.sources[path].stacked_dims)

    def _agreed_type(self, params: Mapping[ParamPath, ArrayType]) -> jax.ShapeDtypeStruct:
        """Shape and dtype of each tensor, in which all parameters must agree, as in the number of tensors."""
        made = {
            path: (self._stacked(path), source.source_shape(self.sizes[path]), np.dtype(params[path].dtype))
            for path, source in self.sources.items()
        }
        first = next(iter(made))
        for path, theirs in made.items():
            if theirs != made[first]:
                texts = [
                    f"{'/'.join(p)} {dtype}{list(shape)}" + "".join(f" for {n} {dim}" for dim, n in stacked)
                    for p, (stacked, shape, dtype) in ((first, made[first]), (path, theirs))
                ]
                raise self._misfit(path, params[path], f"{texts[0]}, but {texts[1]}")
        _, shape, dtype = made[first]
        return jax.ShapeDtypeStruct(shape, dtype)

    def _solved(
        self, path: ParamPath, param: ArrayType, given: Mapping[str, int], shape: Sequence[int | None] | None = None
    ) -> dict[str, int]:
        try:
            return solve_sizes(self.sources[path], given, target_shape=param.shape, source_shape=shape)
        except ValueError as error:
            raise self._misfit(path, param, str(error)) from error

    def _known_shape(self) -> list[int | None] | None:
        """The tensor's shape as far as the parameters tell it; None if they differ in the number of dims."""
        if len({len(source.stored_dims) for source in self.sources.values()}) > 1:
            return None
        return [self._known_size(dim) for dim in range(len(next(iter(self.sources.values())).stored_dims))]

    def _known_size(self, dim: int) -> int | None:
        """Size of one dim of the tensor, if some parameter tells it, or if together they fill it."""
        parts = [(source.stored_dims[dim], self.sizes[path]) for path, source in self.sources.items()]
        for stored, sizes in parts:
            if is_known(stored.terms, sizes):
                return sum(product(term, sizes) for term in stored.terms)
        if all(is_known([stored.factors], sizes) for stored, sizes in parts):
            return sum(product(stored.factors, sizes) for stored, sizes in parts)
        return None

    def _misfit(self, path: ParamPath, param: ArrayType, reason: str) -> CheckpointError:
        source = self.sources[path]
        return CheckpointError(
            f"{'/'.join(path)} {list(param.shape)} cannot be written as {source.name} (rule {source.rule!r}): {reason}"
        )

    def _names(self) -> str:
        return ", ".join("/".join(path) for path in self.sources)


def _in_model_order(groups: Sequence[_Group]) -> Iterator[tuple[_Group, dict[str, int], str]]:
    """Every tensor of the groups; groups that are stacked alike are gone through together, index by index."""
    alike: dict[tuple, list[_Group]] = collections.defaultdict(list)
    for i, group in enumerate(groups):
        alike[group.stacked_sizes() or (i,)].append(group)
    for members in alike.values():
        names = [list(next(iter(m.sources.values())).names(dict(m.stacked_sizes()))) for m in members]
        for per_index in zip(*names, strict=True):
            for member, (indices, name) in zip(members, per_index, strict=True):
                yield member, indices, name


def fill_box(
    reader: TensorReader, source: TensorSource, box: Sequence[Bounds], sizes: Mapping[str, int], values: np.ndarray
) -> None:
    """Reads a box of a parameter into ``values``, converting to its dtype; what lies beyond the tensors is left."""
    for name, piece in pieces(source, box, sizes):
        piece.put(values, reader.read(name, piece.index))


def param_name(path: ParamPath, prefix: str = "") -> str:
    """Name of a parameter as a tensor: ``params/layers/q``."""
    return prefix + "/".join(path)


def bounds_of(index: Sequence[slice], leaf: ArrayType) -> tuple[Bounds, ...]:
    """Start and stop of every dim.

    Raises:
        ValueError: The index is not a box inside the tensor.
    """
    box = tuple((s.start, s.stop) for s in index)
    whole = len(box) == len(leaf.shape) and all(
        s.step in (None, 1) and s.start is not None and s.stop is not None and 0 <= s.start <= s.stop <= size
        for s, size in zip(index, leaf.shape, strict=True)
    )
    if not whole:
        raise ValueError(f"{list(index)} is not a box of a tensor of shape {list(leaf.shape)}")
    return box


def row_slabs(leaf: ArrayType, max_bytes: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """A tensor cut along its first dim: (first row, box) of at most ``max_bytes`` each, but at least one row.

    Each box is contiguous in a file. A tensor without dims is one box, at row 0.
    """
    if not leaf.shape:
        yield 0, ()
        return
    row_bytes = math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize
    rows = max(1, max_bytes // row_bytes) if row_bytes else max(1, leaf.shape[0])
    for start in range(0, leaf.shape[0], rows):
        yield start, (slice(start, min(start + rows, leaf.shape[0])), *(slice(0, size) for size in leaf.shape[1:]))
