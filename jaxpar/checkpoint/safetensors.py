"""Reads parameters from a Hugging Face directory: only the slices that this process's devices hold.

A file is mapped into memory, and a slice copies its own bytes only. Row ranges of a tensor are contiguous in the file;
a slice of an inner dim is read row by row, so the bytes copied are still exactly those needed, although the operating
system fetches whole pages (4 KiB) around each piece.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpar.checkpoint.boxes import Bounds, pieces
from jaxpar.checkpoint.compare import differences
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.model.keymap import HARMLESS_TENSORS, ParamPath, TensorSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CONVERTIBLE = tuple(_DTYPES[name] for name in ("F32", "F16", "BF16"))
_LISTED = 20
"""Lines per kind of difference in an error; a wrong config makes every layer differ."""

_ALL_TRUE_SIZES: Mapping[str, int] = MappingProxyType({})


class TensorDirectory:
    """The tensors of a directory, by name: one ``model.safetensors``, or the files of an index.

    With both, the single file counts, as in Hugging Face transformers. A context manager; closes the files.
    """

    def __init__(self, directory: str | Path):
        """Opens the directory and reads the headers of all its files.

        Raises:
            CheckpointError: There are no safetensors, a file of the index is missing or damaged, or lacks a tensor
                that the index has in it.
        """
        self.directory = Path(directory)
        self.bytes_read = 0
        """Bytes of all slices read so far."""
        self.types: dict[str, jax.ShapeDtypeStruct] = {}
        """Shape and dtype by tensor name, in the order of the files."""
        self._slices: dict[str, Any] = {}
        self._files = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._files.close)
            for file_name, names in _files_of(self.directory).items():
                self._open(file_name, names)
            on_error.pop_all()

    def __enter__(self) -> Self:
        """Returns the directory itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes the files."""
        self._slices.clear()
        self._files.close()

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One slice of a tensor, in its stored dtype; ``index`` has a start and a stop for every dim."""
        values = self._slices[name][tuple(index)]
        self.bytes_read += values.nbytes
        return values

    def _open(self, file_name: str, names: Collection[str] | None) -> None:
        """Adds the tensors of one file; ``names`` are those that the index has in it, None means all."""
        path = self.directory / file_name
        try:
            file = self._files.enter_context(safe_open(path, "numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file: {error}{_pointer_remedy(path)}"
            ) from error
        held = file.keys()
        if absent := sorted(set(names or ()) - set(held)):
            raise CheckpointError(f"{path} lacks tensors that {INDEX_FILE} has in it: {_short_list(absent)}")
        for name in held if names is None else names:
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"tensor {name} of {path} has dtype {tensor.get_dtype()}, which is not supported; supported: "
                    f"{', '.join(_DTYPES)}"
                )
            self._slices[name] = tensor
            self.types[name] = jax.ShapeDtypeStruct(tuple(tensor.get_shape()), _DTYPES[tensor.get_dtype()])


def read_tensors(
    directory: str | Path | TensorDirectory,
    plan: Mapping[ParamPath, TensorSource],
    targets: Mapping[ParamPath, jax.ShapeDtypeStruct],
    *,
    unpadded: Mapping[str, int] = _ALL_TRUE_SIZES,
    dtype: Any = None,
    ignored: Collection[str] = HARMLESS_TENSORS,
) -> dict[ParamPath, jax.Array]:
    """Reads the parameters of a Hugging Face checkpoint onto their target shardings.

    Bytes read are those of the distinct shards that this process's devices hold, no more.

    Args:
        directory: The checkpoint's directory, or an open ``TensorDirectory``.
        plan: Where each parameter comes from.
        targets: Shape, dtype and sharding of each parameter; the same paths as ``plan``.
        unpadded: True size by dim name (``{"vocab": 50257}``) of dims that the targets have padded; what lies beyond
            is zero.
        dtype: Converts every parameter (float32, float16 or bfloat16) to this dtype, which the targets must have.
            None: stored and target dtype must be equal.
        ignored: Patterns (full match) of tensor names that may be in the checkpoint without being read.

    Returns:
        The parameters, of exactly the target shapes, dtypes and shardings.

    Raises:
        CheckpointError: One message with every missing, unexpected, wrong-shape and wrong-dtype tensor, before any is
            read; or a file cannot be read.
        ValueError: Plan and targets do not belong together.
    """
    sizes = {path: _true_sizes(path, plan, targets, unpadded, dtype) for path in _same_paths(plan, targets)}
    with contextlib.ExitStack() as stack:
        tensors = (
            directory if isinstance(directory, TensorDirectory) else stack.enter_context(TensorDirectory(directory))
        )
        expected = {
            name: jax.ShapeDtypeStruct(source.source_shape(sizes[path]), targets[path].dtype)
            for path, source in plan.items()
            for _, name in source.names(sizes[path])
        }
        _refuse_misfits(tensors, expected, ignored, converts=dtype is not None)
        return {path: _read_parameter(tensors, plan[path], targets[path], sizes[path]) for path in plan}


def _files_of(directory: Path) -> dict[str, list[str] | None]:
    """File names of a checkpoint directory, each with the tensors that the index has in it (None: all)."""
    if (directory / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    index = directory / INDEX_FILE
    if not index.exists():
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else None
        there = "it does not exist" if found is None else f"it has {_short_list(found)}" if found else "it is empty"
        raise CheckpointError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: {there}\n-> give the directory of a checkpoint "
            "in safetensors form; other forms (pytorch_model.bin) can be converted with transformers' "
            "save_pretrained(..., safe_serialization=True)"
        )
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, list[str] | None] = collections.defaultdict(list)
        for name, file_name in weight_map.items():
            files[file_name].append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index (no weight_map): {error}") from error
    if absent := sorted(name for name in files if not (directory / name).exists()):
        raise CheckpointError(f"{index} names files that do not exist in {directory}: {_short_list(absent)}")
    return dict(files)


def _pointer_remedy(path: Path) -> str:
    """A cloned repository without its large files has small text files in their place."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            return "\n-> it is a Git LFS pointer, not the file itself; run `git lfs pull` in the repository"
    return "\n-> copy or download it again"


def _same_paths(plan: Mapping[ParamPath, Any], targets: Mapping[ParamPath, Any]) -> Iterator[ParamPath]:
    if plan.keys() != targets.keys():
        raise ValueError(
            "the key map and the parameters differ; only in the key map: "
            f"{sorted(plan.keys() - targets.keys())}, only in the parameters: {sorted(targets.keys() - plan.keys())}"
        )
    return iter(plan)


def _true_sizes(
    path: ParamPath,
    plan: Mapping[ParamPath, TensorSource],
    targets: Mapping[ParamPath, jax.ShapeDtypeStruct],
    unpadded: Mapping[str, int],
    dtype: Any,
) -> dict[str, int]:
    """Size of each dim as the checkpoint has it, after checking the target against its rule."""
    name, dims, target = "/".join(path), plan[path].dims, targets[path]
    if len(dims) != len(target.shape):
        raise ValueError(f"parameter {name} has shape {target.shape}, but its key map has the dims {dims}")
    if target.sharding is None:
        raise ValueError(f"parameter {name}: the target has no sharding")
    if dtype is not None and np.dtype(dtype) != np.dtype(target.dtype):
        raise ValueError(f"parameter {name} is {target.dtype}, but dtype = {np.dtype(dtype)} is asked for")
    sizes = {dim: unpadded.get(dim, size) for dim, size in zip(dims, target.shape, strict=True)}
    if too_big := [dim for dim, size in zip(dims, target.shape, strict=True) if sizes[dim] > size]:
        raise ValueError(f"parameter {name} has shape {target.shape}, smaller than the true size of {too_big}")
    return sizes


def _refuse_misfits(
    tensors: TensorDirectory, expected: Mapping[str, jax.ShapeDtypeStruct], ignored: Collection[str], *, converts: bool
) -> None:
    """Raises one error with everything that keeps the stored tensors from being the expected ones."""
    harmless = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    stored = {name: t for name, t in tensors.types.items() if name in expected or not harmless.fullmatch(name)}
    problems = differences(expected, stored, limit=_LISTED, dtypes=not converts)
    problems += [
        f"cannot be converted: {name}: {stored[name].dtype}"
        for name in expected
        if converts and name in stored and stored[name].dtype not in _CONVERTIBLE
    ]
    if problems:
        remedy = "check that the model config is the one of this checkpoint"
        if any(problem.startswith("wrong dtype") for problem in problems):
            remedy += ", or ask for a conversion with dtype="
        raise CheckpointError(
            f"{tensors.directory} does not fit this model; nothing was read:\n  "
            + "\n  ".join(problems)
            + f"\n-> {remedy}"
        )


def _read_parameter(
    tensors: TensorDirectory, source: TensorSource, target: jax.ShapeDtypeStruct, sizes: Mapping[str, int]
) -> jax.Array:
    """One parameter, each distinct shard read once however many devices hold it."""
    shards: dict[tuple[Bounds, ...], np.ndarray] = {}

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        box = tuple(s.indices(size)[:2] for s, size in zip(index, target.shape, strict=True))
        if box not in shards:
            shards[box] = np.zeros([stop - start for start, stop in box], target.dtype)
            for piece in pieces(source, box, sizes):
                values = tensors.read(piece.name, piece.index).reshape(piece.shape).transpose(piece.order)
                shards[box][piece.where] = values.astype(target.dtype, copy=False)
        return shards[box]

    return jax.make_array_from_callback(target.shape, target.sharding, shard, dtype=target.dtype)


def _short_list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
