"""The arrays of a step on disk, box by box and with bounded memory, through tensorstore.

Restoring goes through Orbax (``store``), onto devices. Here arrays stay on the host: to inspect, check and copy
checkpoints of any size, of any Orbax trainer, on a machine without devices. An Orbax tree is a directory with a JSON
file ``_METADATA`` that lists the leaves, and one zarr array per leaf named by its keys, joined by ".", in one OCDBT
database per tree or in a directory of its own.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 and float8 known to numpy)
import numpy as np
import tensorstore as ts

from jaxpar.checkpoint.errors import DamagedCheckpointError

TREE_FILE = "_METADATA"
"""File that makes a directory an Orbax tree."""

_INDEX_CACHE_BYTES = 64 * 2**20
_READS_AT_ONCE = 4
"""Chunks in flight; each takes its size in memory on top of the box that is read."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """How an array lies on disk."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read_chunk: tuple[int, ...]
    """Shape of the smallest piece that is read."""
    write_chunk: tuple[int, ...]
    """Shape of the pieces that were written; a multiple of ``read_chunk``."""
    sharding: str | None
    """Mesh and spec that it was saved from, for people; None if that was not recorded."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class StepArrays:
    """The arrays of one step, by leaf name: ``params/layers/q``. Satisfies ``tensors.TensorReader``.

    Every subdirectory that is an Orbax tree is a section; a directory that is a tree itself has leaves without section.
    """

    def __init__(self, step_directory: Path):
        """Opens every array of the step, reading no elements.

        Raises:
            DamagedCheckpointError: No tree, or an array cannot be opened; names the leaves.
        """
        self.directory = step_directory
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#index": {"total_bytes_limit": _INDEX_CACHE_BYTES},
                "file_io_concurrency": {"limit": _READS_AT_ONCE},
                "data_copy_concurrency": {"limit": _READS_AT_ONCE},
            }
        )
        self.faults: dict[str, str] = {}
        """Why a leaf that the tree lists cannot be opened, by name."""
        self.skipped: dict[str, str] = {}
        """Leaves that are no arrays (None, text), with the type that the tree gives them."""
        self._arrays: dict[str, ts.TensorStore] = {}
        self.types: dict[str, StoredArray] = {}
        """Every array that could be opened."""
        trees = [path.parent for path in sorted(step_directory.rglob(TREE_FILE))]
        if not trees:
            raise DamagedCheckpointError(f"{step_directory} holds no Orbax tree (no {TREE_FILE})")
        for tree in trees:
            self._open_tree(tree)

    @property
    def sections(self) -> list[str]:
        """First parts of the leaf names, in order."""
        return list(dict.fromkeys(name.partition("/")[0] for name in (*self.types, *self.faults)))

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """One box of an array; ``index`` has a start and a stop for every dim.

        Raises:
            DamagedCheckpointError: It cannot be read; names the leaf.
        """
        try:
            return np.asarray(self._arrays[name][tuple(index)].read().result())
        except ValueError as error:
            raise DamagedCheckpointError(
                f"{name} of {self.directory} cannot be read: {storage_message(error)}"
            ) from error

    def _open_tree(self, tree: Path) -> None:
        section = tree.relative_to(self.directory).as_posix()
        prefix = [] if section == "." else [section]
        try:
            metadata = json.loads((tree / TREE_FILE).read_text())
            leaves = [
                ([str(key["key"]) for key in leaf["key_metadata"]], leaf["value_metadata"])
                for leaf in metadata["tree_metadata"].values()
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{tree / TREE_FILE} is damaged: {error}") from error
        shardings = _saved_shardings(tree)
        opening = {}
        for keys, value in leaves:
            name = "/".join([*prefix, *keys])
            if value.get("skip_deserialize") or value.get("value_type") in ("None", "string", "str"):
                self.skipped[name] = str(value.get("value_type"))
                continue
            spec = array_spec(
                tree,
                ".".join(keys),
                zarr3=metadata.get("use_zarr3", False),
                ocdbt=metadata.get("use_ocdbt", (tree / "manifest.ocdbt").exists()),
            )
            # Otherwise a chunk whose file is missing would read as zeros.
            spec["fill_missing_data_reads"] = not metadata.get("store_array_data_equal_to_fill_value", False)
            opening[name] = ts.open(spec, open=True, read=True, context=self._context), shardings.get(".".join(keys))
        for name, (array, sharding) in opening.items():
            try:
                self._arrays[name] = array.result()
            except ValueError as error:
                self.faults[name] = storage_message(error)
                continue
            self.types[name] = _stored_array(self._arrays[name], sharding)


def array_spec(tree: Path, name: str, *, zarr3: bool, ocdbt: bool) -> dict[str, Any]:
    """Tensorstore's name for the array of a leaf; ``name`` is its keys joined by "."."""
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{tree.absolute()}/{name}/"}
    if ocdbt:
        base = f"file://{tree.absolute()}/"
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#index"}
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}


def storage_message(error: BaseException) -> str:
    """What tensorstore says, without the specs and source lines that follow."""
    return str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]


def _stored_array(array: ts.TensorStore, sharding: str | None) -> StoredArray:
    layout = array.chunk_layout
    shape = tuple(array.shape)
    read, write = layout.read_chunk.shape, layout.write_chunk.shape
    return StoredArray(shape, np.dtype(array.dtype.numpy_dtype), tuple(read or shape), tuple(write or shape), sharding)


def _saved_shardings(tree: Path) -> dict[str, str]:
    """Mesh and spec by array name, from the file that Orbax writes for them; empty where there is none."""
    try:
        recorded = json.loads((tree / "_sharding").read_text())
        return {base64.b64decode(key).decode(): _sharding_text(json.loads(value)) for key, value in recorded.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def _sharding_text(sharding: Mapping[str, Any]) -> str:
    if sharding.get("sharding_type") != "NamedSharding":
        return str(sharding.get("sharding_type"))
    spec = ", ".join(_entry_text(entry) for entry in sharding["partition_spec"])
    sizes = zip(sharding["axis_names"], sharding["shape"], strict=True)
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes if size > 1) or "one device"
    return f"({spec}) on {mesh}"


def _entry_text(entry: str | Sequence[str] | None) -> str:
    return str(entry) if entry is None or isinstance(entry, str) else f"({', '.join(entry)})"


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a whole array."""
    return tuple(slice(0, size) for size in shape)


def leaf_bytes(types: Mapping[str, StoredArray]) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in types.values())
