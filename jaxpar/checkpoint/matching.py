"""Does a key map fit a checkpoint? Everything that stands against it, in one message, before any data is read."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxpar.checkpoint.compare import array_type, differences
from jaxpar.checkpoint.coverage import coverage
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.factor_sizes import given_sizes, missing_sizes, name_pattern, solve_sizes, stacked_size
from jaxpar.checkpoint.tensors import ArrayType
from jaxpar.families.keymap import HARMLESS_TENSORS, ParamPath, TensorSource

NO_SIZES: Mapping[str, int] = MappingProxyType({})
"""No size is given."""

_LISTED = 20
"""Lines per kind of difference in an error; a wrong config makes every layer differ."""


class Matching:
    """A key map against the tensors of a checkpoint: the size of every factor, and every problem."""

    def __init__(
        self,
        types: Mapping[str, ArrayType],
        plan: Mapping[ParamPath, TensorSource],
        *,
        shapes: Mapping[ParamPath, Sequence[int]] | None,
        given: Mapping[str, int] = NO_SIZES,
        dtypes: Mapping[ParamPath, Any] | None = None,
        ignored: Collection[str] = HARMLESS_TENSORS,
    ):
        """Solves all sizes and collects the problems.

        Args:
            types: Shape and dtype of every stored tensor, by name.
            plan: Where each parameter comes from.
            shapes: Shape of each parameter; None: the stored tensors decide.
            given: Sizes by name, for what the shapes do not tell.
            dtypes: Dtype that each parameter's tensors must have; None: any, but one and the same.
            ignored: Patterns (full match) of tensor names that need not be read, or not all of them.
        """
        self.sizes: dict[ParamPath, dict[str, int]] = {}
        """By parameter: size of every factor and skipped part."""
        self._types = types
        self._plan = plan
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
        self._misfits: dict[ParamPath, str] = {}
        self._expected: dict[str, jax.ShapeDtypeStruct] = {}
        self._readers: dict[str, list[ParamPath]] = collections.defaultdict(list)
        if shapes is not None:
            same_paths(plan, shapes)
        for path, known in given_sizes(plan, given, shapes).items():
            self._match(path, plan[path], None if shapes is None else shapes[path], known, dtypes)

    def dtype(self, path: ParamPath) -> np.dtype:
        """Dtype of a parameter's tensors."""
        _, name = next(self._plan[path].names(self.sizes[path]))
        return np.dtype(self._expected[name].dtype)

    def refuse_misfits(
        self, origin: str, *, on_wrong_dtype: str, dtypes: bool = True, more: Sequence[str] = ()
    ) -> None:
        """Raises one error with everything that keeps the checkpoint from being read.

        Args:
            origin: What the checkpoint is called in the message.
            on_wrong_dtype: What to add to the remedy when a dtype differs.
            dtypes: Whether a different dtype is a problem.
            more: Problems that the caller found.

        Raises:
            CheckpointError: Lists missing, unexpected, wrong-shape, wrong-dtype and partly read tensors and rules that
                do not fit.
        """
        harmless = self._ignored.fullmatch
        stored = {name: t for name, t in self._types.items() if name in self._readers or not harmless(name)}
        # The tensors of a rule that does not fit are not unexpected.
        misfits = [re.compile(name_pattern(self._plan[path])) for path in self._misfits]
        stored = {n: t for n, t in stored.items() if n in self._readers or not any(m.fullmatch(n) for m in misfits)}
        notes = {name: f" ({self._reader_text(name)})" for name in self._expected}
        problems = differences(self._expected, stored, limit=_LISTED, dtypes=dtypes, notes=notes)
        problems += _cut([*self._misfits.values()])
        problems += [] if problems else _cut(self._partly_read())
        problems += more
        if problems:
            remedy = "check that the model config and the key map are the ones of this checkpoint"
            if any(problem.startswith("wrong dtype") for problem in problems):
                remedy += f", {on_wrong_dtype}"
            raise CheckpointError(
                f"{origin} does not fit this model; nothing was read:\n  " + "\n  ".join(problems) + f"\n-> {remedy}"
            )

    @property
    def expected(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shape and dtype that every tensor of the key map must have, by name."""
        return self._expected

    def _match(
        self,
        path: ParamPath,
        source: TensorSource,
        shape: Sequence[int] | None,
        given: Mapping[str, int],
        dtypes: Mapping[ParamPath, Any] | None,
    ) -> None:
        try:
            sizes, first = self._solve(source, shape, given)
        except ValueError as error:
            self._misfits[path] = f"{'/'.join(path)} does not fit {source.name} (rule {source.rule!r}): {error}"
            return
        self.sizes[path] = sizes
        dtype = dtypes[path] if dtypes is not None else self._types[first].dtype if first else np.float32
        tensor_type = jax.ShapeDtypeStruct(source.source_shape(sizes), dtype)
        for _, name in source.names(sizes):
            self._readers[name].append(path)
            fits = name in self._types and tuple(self._types[name].shape) == tensor_type.shape
            if name not in self._expected or not fits:
                self._expected[name] = tensor_type

    def _solve(
        self, source: TensorSource, shape: Sequence[int] | None, given: Mapping[str, int]
    ) -> tuple[dict[str, int], str | None]:
        """Sizes, and the first stored tensor of the parameter.

        What the parameter's shape and the given sizes tell comes first, so that a stored tensor of another shape is
        reported as such; the first stored tensor tells what is then still unknown.
        """
        sizes = solve_sizes(source, given, target_shape=shape)
        for dim in source.stacked_dims:
            if dim not in sizes:
                sizes[dim] = stacked_size(source, dim, self._types)
            if not sizes[dim]:
                raise ValueError(f"no tensor has such a name; the parameter has shape {_listed(shape)}")
        first = next((name for _, name in source.names(sizes) if name in self._types), None)
        if not (unknown := missing_sizes(source, sizes)):
            return sizes, first
        if first is None:
            name = next(name for _, name in source.names(sizes))
            raise ValueError(f"{name} is missing from the checkpoint; the parameter has shape {_listed(shape)}")
        both = f"tensor {array_type(self._types[first])}, parameter {_listed(shape)}"
        try:
            sizes = solve_sizes(source, sizes, target_shape=shape, source_shape=self._types[first].shape)
        except ValueError as error:
            raise ValueError(f"{error}; {both}") from error
        if unknown := missing_sizes(source, sizes):
            raise ValueError(f"the shapes do not tell the size of {', '.join(unknown)}, give it; {both}")
        return sizes, first

    def _partly_read(self) -> list[str]:
        """Tensors of which some elements belong to no parameter."""
        lines = []
        for name, paths in self._readers.items():
            readers = [(self._plan[path], self.sizes[path]) for path in paths]
            if any(source.reads_whole_tensors for source, _ in readers) or self._ignored.fullmatch(name):
                continue
            covered = coverage(readers, self._types[name].shape)
            if covered.unread:
                lines.append(
                    f"read in part: {name}: {covered.unread} of {covered.total} elements belong to no parameter (read "
                    f"by {self._reader_text(name)}); list it as ignored if they are not wanted"
                )
        return lines

    def _reader_text(self, name: str) -> str:
        return "; ".join(f"{'/'.join(path)}: {self._plan[path].rule}" for path in self._readers[name])


def same_paths(plan: Mapping[ParamPath, Any], shapes: Mapping[ParamPath, Any]) -> None:
    """Raises CheckpointError unless a key map has exactly the model's parameters; names those that differ."""
    if plan.keys() != shapes.keys():
        raise CheckpointError(
            "the key map and the model have different parameters; only in the key map: "
            f"{_paths(plan.keys() - shapes.keys())}; only in the model: {_paths(shapes.keys() - plan.keys())}"
        )


def _paths(paths: Iterable[ParamPath]) -> str:
    return ", ".join(sorted("/".join(path) for path in paths)) or "none"


def _cut(lines: Sequence[str]) -> list[str]:
    return list(lines) if len(lines) <= _LISTED else [*lines[:_LISTED], f"and {len(lines) - _LISTED} more"]


def _listed(shape: Sequence[int] | None) -> str:
    return "unknown" if shape is None else f"[{','.join(map(str, shape))}]"
