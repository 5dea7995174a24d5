"""Reads parameters from a Hugging Face directory: only the slices that this process's devices hold.

A slice copies its own bytes only. Row ranges of a tensor are contiguous in the file; a slice of an inner dim is read
row by row, so the bytes copied are still exactly those needed, although the operating system fetches whole pages
(4 KiB) around each piece.

The part of a file that is being read is mapped into memory, not the file: pages of a mapping count as resident memory
of the process, and a mapping that stays would grow to the size of the checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpar.checkpoint.boxes import Bounds
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.matching import NO_SIZES, Matching, same_paths
from jaxpar.checkpoint.tensors import TensorReader
from jaxpar.checkpoint.views import fill_box
from jaxpar.families.keymap import HARMLESS_TENSORS, ParamPath, TensorSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
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
"""Element types by their name in a file's header."""
_CONVERTIBLE = tuple(DTYPES[name] for name in ("F32", "F16", "BF16"))
_MAPPED_BYTES = 64 * 2**20
"""Bytes of a file that are mapped at a time."""

_LISTED = 20
"""Names listed in an error."""


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
        self._places: dict[str, tuple[int, int]] = {}
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
        self._places.clear()
        self._files.close()

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One slice of a tensor, in its stored dtype; ``index`` has a start and a stop for every dim."""
        leaf, (descriptor, begin) = self.types[name], self._places[name]
        values = np.empty([s.stop - s.start for s in index], leaf.dtype)
        rows, inner = (index[0], tuple(index[1:])) if index else (slice(0, 1), ())
        row_bytes = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        step = max(1, _MAPPED_BYTES // max(1, row_bytes))
        for first in range(rows.start, rows.stop, step) if values.size else ():
            last = min(first + step, rows.stop)
            part = values.reshape(-1, *values.shape[1:])[first - rows.start : last - rows.start]
            offset = begin + first * row_bytes
            start = offset - offset % mmap.ALLOCATIONGRANULARITY
            length = offset - start + (last - first) * row_bytes
            with mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=start) as mapping:
                _copy_rows(mapping, offset - start, leaf, inner, part)
        self.bytes_read += values.nbytes
        return values

    def _open(self, file_name: str, names: Collection[str] | None) -> None:
        """Adds the tensors of one file; ``names`` are those that the index has in it, None means all."""
        path = self.directory / file_name
        try:
            with safe_open(path, "numpy") as file:
                tensors = [(name, file.get_slice(name)) for name in list(file.keys())]
                found = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors}
            descriptor = os.open(path, os.O_RDONLY)
            self._files.callback(os.close, descriptor)
            begins = _data_begins(descriptor)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is not a readable safetensors file: {error}{_pointer_remedy(path)}"
            ) from error
        if absent := sorted(set(names or ()) - set(found)):
            raise CheckpointError(f"{path} lacks tensors that {INDEX_FILE} has in it: {_short_list(absent)}")
        for name in found if names is None else names:
            dtype, shape = found[name]
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"tensor {name} of {path} has dtype {dtype}, which is not supported; supported: {', '.join(DTYPES)}"
                )
            self._places[name] = descriptor, begins[name]
            self.types[name] = jax.ShapeDtypeStruct(shape, DTYPES[dtype])


def _data_begins(descriptor: int) -> dict[str, int]:
    """Position in the file of each tensor's first byte; the library has checked the header."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _copy_rows(
    mapping: mmap.mmap, offset: int, leaf: jax.ShapeDtypeStruct, inner: tuple[slice, ...], values: np.ndarray
) -> None:
    """Copies a part of every mapped row; no array over the mapping is left, so that it can be closed."""
    shape = (len(values), *leaf.shape[1:])
    stored = np.frombuffer(mapping, np.uint8, math.prod(shape) * leaf.dtype.itemsize, offset)
    values[...] = stored.view(leaf.dtype).reshape(shape)[(slice(None), *inner)]


def read_tensors(
    tensors: str | os.PathLike[str] | TensorReader,
    plan: Mapping[ParamPath, TensorSource],
    targets: Mapping[ParamPath, jax.ShapeDtypeStruct],
    *,
    unpadded: Mapping[str, int] = NO_SIZES,
    sizes: Mapping[str, int] = NO_SIZES,
    dtype: Any = None,
    ignored: Collection[str] = HARMLESS_TENSORS,
) -> dict[ParamPath, jax.Array]:
    """Reads parameters onto their target shardings, from a Hugging Face checkpoint or any tensors by name.

    Bytes read are those of the distinct shards that this process's devices hold, no more.

    Args:
        tensors: The directory of a Hugging Face checkpoint, or an open reader.
        plan: Where each parameter comes from.
        targets: Shape, dtype and sharding of each parameter; the same paths as ``plan``.
        unpadded: True size by dim name (``{"vocab": 50257}``) of dims that the targets have padded; what lies beyond
            is zero.
        sizes: Sizes by factor name that the shapes do not tell.
        dtype: Converts every parameter (float32, float16 or bfloat16) to this dtype, which the targets must have.
            None: stored and target dtype must be equal.
        ignored: Patterns (full match) of tensor names that may be in the checkpoint without being read.

    Returns:
        The parameters, of exactly the target shapes, dtypes and shardings.

    Raises:
        CheckpointError: One message with every missing, unexpected, wrong-shape and wrong-dtype tensor, before any is
            read; or a file cannot be read.
        ValueError: A target does not fit its rule, has no sharding or another dtype than asked for.
    """
    same_paths(plan, targets)
    shapes = {path: _true_shape(path, plan[path], targets[path], unpadded, dtype) for path in plan}
    with contextlib.ExitStack() as stack:
        if isinstance(tensors, str | os.PathLike):
            tensors = stack.enter_context(TensorDirectory(tensors))
        matching = Matching(
            tensors.types,
            plan,
            shapes=shapes,
            given=sizes,
            dtypes={path: target.dtype for path, target in targets.items()},
            ignored=ignored,
        )
        origin = str(tensors.directory) if isinstance(tensors, TensorDirectory) else "the checkpoint"
        unconvertible = [
            f"cannot be converted: {name}: {tensors.types[name].dtype}"
            for name in matching.expected
            if dtype is not None and name in tensors.types and tensors.types[name].dtype not in _CONVERTIBLE
        ]
        matching.refuse_misfits(
            origin, dtypes=dtype is None, more=unconvertible, on_wrong_dtype="or ask for a conversion with dtype="
        )
        return {path: _read_parameter(tensors, plan[path], targets[path], matching.sizes[path]) for path in plan}


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


def _true_shape(
    path: ParamPath, source: TensorSource, target: jax.ShapeDtypeStruct, unpadded: Mapping[str, int], dtype: Any
) -> tuple[int, ...]:
    """Shape of a parameter as the checkpoint has it, after checking the target against its rule."""
    name = "/".join(path)
    if len(source.target_dims) != len(target.shape):
        raise ValueError(f"parameter {name} has shape {target.shape}, but its key map has the dims {source.dims}")
    if target.sharding is None:
        raise ValueError(f"parameter {name}: the target has no sharding")
    if dtype is not None and np.dtype(dtype) != np.dtype(target.dtype):
        raise ValueError(f"parameter {name} is {target.dtype}, but dtype = {np.dtype(dtype)} is asked for")
    padded = list(zip(source.target_dims, target.shape, strict=True))
    true = tuple(unpadded.get(factors[0], size) if len(factors) == 1 else size for factors, size in padded)
    if too_big := [factors[0] for (factors, size), true_size in zip(padded, true, strict=True) if true_size > size]:
        raise ValueError(f"parameter {name} has shape {target.shape}, smaller than the true size of {too_big}")
    return true


def _read_parameter(
    tensors: TensorReader, source: TensorSource, target: jax.ShapeDtypeStruct, sizes: Mapping[str, int]
) -> jax.Array:
    """One parameter, each distinct shard read once however many devices hold it."""
    shards: dict[tuple[Bounds, ...], np.ndarray] = {}

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        box = tuple(s.indices(size)[:2] for s, size in zip(index, target.shape, strict=True))
        if box not in shards:
            shards[box] = np.zeros([stop - start for start, stop in box], target.dtype)
            fill_box(tensors, source, box, sizes, shards[box])
        return shards[box]

    return jax.make_array_from_callback(target.shape, target.sharding, shard, dtype=target.dtype)


def _short_list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
