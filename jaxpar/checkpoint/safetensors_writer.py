"""Writes safetensors files piece by piece, in any order, so that a large export needs little memory and can go on.

Files are laid out before any data is there: names, shapes and dtypes decide every offset. Each grows under a name that
no reader takes for a checkpoint (``....partial``) and gets its own name when all of it is written. Layout of a file:
https://github.com/huggingface/safetensors#format; names of several files and their index: transformers'
``save_pretrained``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from jaxpar.checkpoint.compare import array_type
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.safetensors import DTYPES, INDEX_FILE, SINGLE_FILE
from jaxpar.checkpoint.tensors import ArrayType

PARTIAL = ".partial"
"""Ending of a file that is not finished."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
"""Dtypes as the safetensors library sorts tensors: widest first, so that every tensor is aligned to its element."""

_COPY_BYTES = 16 * 2**20
"""Size of the pieces in which an array that is not contiguous is copied."""


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """One file: its header and where each tensor's bytes begin."""

    name: str
    header: bytes
    """Everything before the data."""
    offsets: Mapping[str, int]
    """Position in the file of each tensor's first byte."""
    num_bytes: int
    """Size of the file."""


def plan_files(
    types: Mapping[str, ArrayType], *, max_file_bytes: int, metadata: Mapping[str, str]
) -> tuple[FilePlan, ...]:
    """How tensors are laid out in files; the same every time.

    Args:
        types: Shape and dtype by name. Files are filled in this order; inside a file tensors are sorted by dtype and
            name, as the safetensors library does.
        max_file_bytes: Tensor bytes per file. A larger tensor has a file of its own.
        metadata: Text entries of every header.

    Raises:
        ValueError: A dtype that safetensors cannot hold.
    """
    for name, leaf in types.items():
        if np.dtype(leaf.dtype) not in _NAMES:
            raise ValueError(f"tensor {name} is {array_type(leaf)}; safetensors hold {', '.join(map(str, _NAMES))}")
    contents: list[list[str]] = []
    current: list[str] = []
    room = max_file_bytes
    for name, leaf in types.items():
        size = _num_bytes(leaf)
        if size > max_file_bytes:
            contents.append([name])
            continue
        if size > room:
            contents.append(current)
            current, room = [], max_file_bytes
        current.append(name)
        room -= size
    contents += [current] if current or not contents else []
    count = len(contents)
    file_names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return tuple(
        _file_plan(file_name, {name: types[name] for name in names}, metadata)
        for file_name, names in zip(file_names, contents, strict=True)
    )


def _file_plan(file_name: str, types: Mapping[str, ArrayType], metadata: Mapping[str, str]) -> FilePlan:
    order = sorted(types, key=lambda name: (_ORDER.index(_NAMES[np.dtype(types[name].dtype)]), name))
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    starts, position = {}, 0
    for name in order:
        leaf = types[name]
        starts[name], end = position, position + _num_bytes(leaf)
        dtype = _NAMES[np.dtype(leaf.dtype)]
        entries[name] = {"dtype": dtype, "shape": list(leaf.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return FilePlan(file_name, header, offsets, len(header) + position)


class TensorFilesWriter:
    """Safetensors files of a directory, written row range by row range.

    A context manager; leaving it without :meth:`finish` keeps what is there, and a writer with the same arguments goes
    on with it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        types: Mapping[str, ArrayType],
        *,
        max_file_bytes: int = 5 * 2**30,
        metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
    ):
        """Creates the files with their headers, or opens those that an interrupted writer left.

        Args:
            directory: Made if it does not exist.
            types: Shape and dtype of every tensor by name, in the order in which files are filled.
            max_file_bytes: Tensor bytes per file; a larger tensor has a file of its own.
            metadata: Text entries of every header; transformers looks for ``{"format": "pt"}``.

        Raises:
            CheckpointError: The directory has finished safetensors, or unfinished ones of another export.
            ValueError: A dtype that safetensors cannot hold.
        """
        self.directory = Path(directory)
        self.types = dict(types)
        self.files = plan_files(types, max_file_bytes=max_file_bytes, metadata=metadata)
        """The files, in the order of their numbers."""
        self._file_of = {name: i for i, file in enumerate(self.files) for name in file.offsets}
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in types}
        self.directory.mkdir(parents=True, exist_ok=True)
        self._refuse_others()
        self._descriptors: list[int] = []
        try:
            for file in self.files:
                self._descriptors.append(self._open(file))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Returns the writer itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes the files, finished or not."""
        self.close()

    def write(self, name: str, row_start: int, array: np.ndarray) -> None:
        """Writes rows ``row_start`` and on of a tensor; a tensor without dims is row 0.

        Nothing is copied but an array that is not contiguous, and that in pieces.

        Raises:
            ValueError: No such tensor, another dtype or row shape, or rows outside the tensor.
            OSError: The disk is full or cannot be written.
        """
        leaf = self.types.get(name)
        if leaf is None:
            raise ValueError(f"there is no tensor {name}")
        rows_differ = array.ndim != len(leaf.shape) or array.shape[1:] != tuple(leaf.shape[1:])
        if rows_differ or np.dtype(array.dtype) != np.dtype(leaf.dtype):
            raise ValueError(f"{array_type(array)} are not rows of the tensor {name}, which is {array_type(leaf)}")
        rows = array.shape[0] if array.ndim else 1
        self._check_rows(name, row_start, row_start + rows)
        file = self._file_of[name]
        position = self.files[file].offsets[name] + row_start * _row_bytes(leaf)
        for piece in _contiguous(array):
            data = piece.reshape(-1).view(np.uint8).data
            while data:
                count = os.pwrite(self._descriptors[file], data, position)
                data, position = data[count:], position + count
        self.mark_written(name, row_start, row_start + rows)

    def mark_written(self, name: str, row_start: int, row_stop: int) -> None:
        """Says that rows are in the files: after :meth:`write`, or written by an earlier writer before it stopped."""
        self._check_rows(name, row_start, row_stop)
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._written[name], (row_start, row_stop)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        self._written[name] = merged

    def sync(self) -> None:
        """Waits until everything written is on the disk; then it may be recorded as done."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)

    def finish(self) -> None:
        """Gives the files their names and writes the index, if there are several.

        Raises:
            CheckpointError: Rows are neither written nor marked as written; names the first tensors.
        """
        unwritten = [
            f"{name} {array_type(leaf)}: has rows {self._written[name] or 'none'}"
            for name, leaf in self.types.items()
            if math.prod(leaf.shape) and self._written[name] != [(0, _num_rows(leaf))]
        ]
        if unwritten:
            raise CheckpointError(
                f"{self.directory}: {len(unwritten)} tensors are not complete:\n  " + "\n  ".join(unwritten[:20])
            )
        self.sync()
        self.close()
        if len(self.files) > 1:
            index = self.directory / (INDEX_FILE + PARTIAL)
            index.write_text(self._index(), encoding="utf-8")
            _sync_path(index)
        # A directory without the index is not a checkpoint, so it gets its name last.
        names = [file.name for file in self.files] + ([INDEX_FILE] if len(self.files) > 1 else [])
        for name in names:
            if (partial := self.directory / (name + PARTIAL)).exists():
                partial.rename(self.directory / name)
        _sync_path(self.directory)

    def close(self) -> None:
        """Closes the files as they are."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _index(self) -> str:
        """The index file of several files, in the form that transformers writes."""
        sizes = self.types.values()
        totals = {
            "total_parameters": sum(math.prod(leaf.shape) for leaf in sizes),
            "total_size": sum(map(_num_bytes, sizes)),
        }
        weight_map = {name: self.files[i].name for name, i in self._file_of.items()}
        return json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"

    def _refuse_others(self) -> None:
        """What is in the directory must be this export, not finished; nothing is ever written over."""
        ours = {file.name for file in self.files}
        files = ours | {INDEX_FILE} if len(ours) > 1 else ours
        is_unfinished = any((self.directory / (name + PARTIAL)).exists() for name in files)
        for path in sorted(self.directory.iterdir()):
            name = path.name.removesuffix(PARTIAL)
            is_weights = name.endswith(".safetensors") or name == INDEX_FILE
            # A writer that stopped while it gave the files their names has left some with and some without the ending.
            if is_weights and not (name in files and is_unfinished and path.name != INDEX_FILE):
                raise CheckpointError(
                    f"{path} exists already and is not the unfinished part of this export\n-> give another directory"
                )

    def _open(self, file: FilePlan) -> int:
        """Descriptor of a file with its header and full length; data that an earlier writer left stays."""
        partial, final = self.directory / (file.name + PARTIAL), self.directory / file.name
        path = final if final.exists() else partial
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            found, size = os.pread(descriptor, len(file.header), 0), os.fstat(descriptor).st_size
            if size <= len(file.header) and file.header.startswith(found):  # new, or stopped while it was made
                os.pwrite(descriptor, file.header, 0)
                os.ftruncate(descriptor, file.num_bytes)
            elif found != file.header or size != file.num_bytes:
                raise CheckpointError(f"{path} belongs to another export\n-> remove it or give another directory")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_rows(self, name: str, row_start: int, row_stop: int) -> None:
        if name not in self.types or not 0 <= row_start <= row_stop <= _num_rows(self.types[name]):
            raise ValueError(
                f"rows {row_start} to {row_stop} are not in the tensor {name}, which has {_num_rows(self.types[name])}"
            )


def _num_bytes(leaf: ArrayType) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _num_rows(leaf: ArrayType) -> int:
    return leaf.shape[0] if leaf.shape else 1


def _row_bytes(leaf: ArrayType) -> int:
    return math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize


def _contiguous(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array itself if its bytes lie in order, else copies of some of its rows after each other."""
    if array.flags.c_contiguous:
        yield array
        return
    rows = max(1, _COPY_BYTES // max(1, array[:1].nbytes))
    for start in range(0, array.shape[0], rows):
        yield np.ascontiguousarray(array[start : start + rows])


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
