"""Writes a step array by array and slab by slab, in Orbax's form, without ever holding an array whole.

The step grows in a directory beside its place, ``STEP.unfinished``, which runs ignore. A journal there says which slabs
are on disk, so that a copy that was killed goes on where it was; the finished step is renamed into its place, where
nothing may be yet.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.arrays import TREE_FILE, array_spec, storage_message
from jaxpar.checkpoint.checksum import to_text
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.store import write_skeleton

JOURNAL = "journal.jsonl"
"""Beside the unfinished step: what it will hold, then a line per slab that is on disk."""

_INDEX_CACHE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class NewArray:
    """An array to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    sharding: Mapping[str, Any] | None = None
    """Mesh and spec for which it is cut, as Orbax records them; for people."""


class StepWriter:
    """A step that is being written. Slabs of one array may come in any order, each once."""

    def __init__(
        self, directory: Path, step: int, arrays: Mapping[str, NewArray], metadata: Mapping[str, Any], identity: str
    ):
        """Opens the unfinished step, or a new one.

        Args:
            directory: The checkpoints directory; is created.
            step: Number of the step; must not be there.
            arrays: What it will hold, by leaf name (``params/layers/q``).
            metadata: What ``Store.metadata`` will give.
            identity: Names what is copied and how. An unfinished step of another identity is not gone on with.

        Raises:
            CheckpointError: The step is there, or an unfinished one of something else is.
        """
        self.place = directory / str(step)
        self.work = directory / f"{step}.unfinished"
        self._step_directory = self.work / str(step)
        self.arrays = dict(arrays)
        described = {name: [a.shape, a.dtype.name, a.chunk] for name, a in arrays.items()}
        wanted = json.dumps([identity, described, dict(metadata)], sort_keys=True)
        self._identity = hashlib.sha256(wanted.encode()).hexdigest()
        if self.place.exists():
            raise CheckpointError(f"{self.place} is there already; nothing is overwritten\n-> name another directory")
        self._sums: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {name: {} for name in arrays}
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#index": {"total_bytes_limit": _INDEX_CACHE_BYTES},
                "file_io_concurrency": {"limit": 4},
                "data_copy_concurrency": {"limit": 4},
            }
        )
        self.resumed = self._read_journal()
        """Whether an unfinished step is gone on with."""
        if not self.resumed:
            self._create(dict(metadata))
        self._open = {name: self._open_array(name, create=not self.resumed) for name in arrays}
        self._journal = (self.work / JOURNAL).open("a")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.work}: another process is writing it") from None

    def done(self, name: str, slab: int) -> bool:
        """Whether a slab is on disk already."""
        return slab in self._sums[name]

    def sums_read(self, name: str, slab: int) -> np.ndarray:
        """Sums of a slab as it was read, before its type was changed."""
        return self._sums[name][slab][1]

    def write(
        self,
        name: str,
        slab: int,
        index: Sequence[slice],
        values: np.ndarray,
        sums: np.ndarray,
        sums_read: np.ndarray,
    ) -> None:
        """Writes one slab and waits until it is on disk.

        Args:
            name: The leaf.
            slab: Number of the slab, for the journal.
            index: Where it goes.
            values: The slab, of the array's dtype.
            sums: Its ``box_checksum``.
            sums_read: The same of what it was made from.

        Raises:
            CheckpointError: It cannot be written, e.g. because the disk is full; what is there can be gone on with.
        """
        try:
            self._open[name][tuple(index)].write(values).result()
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be written to {self.work}: {storage_message(error)}\n-> mend that and give the same "
                "command again: it goes on from there"
            ) from error
        self._sums[name][slab] = sums, sums_read
        pair = [[int(part) for part in both] for both in (sums, sums_read)]
        self._journal.write(json.dumps({"name": name, "slab": slab, "sums": pair}) + "\n")
        self._journal.flush()

    def checksum(self, name: str) -> str:
        """Checksum of the slabs written so far."""
        return to_text(sum((written for written, _ in self._sums[name].values()), np.zeros(2, np.uint32)))

    def close(self) -> Path:
        """Marks the step as complete where it grew, so that it can be verified there; returns its directory."""
        self._journal.close()
        self._open.clear()
        checksums = {name: self.checksum(name) for name in self.arrays}
        commit.write_commit_mark(self._step_directory, checksums=checksums)
        return self._step_directory

    def publish(self) -> Path:
        """Moves the closed step to its place; returns it."""
        if self.place.exists():
            raise CheckpointError(f"{self.place} has appeared meanwhile; nothing is overwritten")
        self._step_directory.rename(self.place)
        shutil.rmtree(self.work)
        return self.place

    def _read_journal(self) -> bool:
        journal = self.work / JOURNAL
        if not journal.exists():
            if self.work.exists():  # killed before the first line
                shutil.rmtree(self.work)
            return False
        lines = journal.read_text().split("\n")
        if json.loads(lines[0])["identity"] != self._identity:
            raise CheckpointError(
                f"{self.work} is an unfinished copy of something else, or to another mesh or type\n-> finish it with "
                "the command that began it, or remove it"
            )
        whole = lines[: -1 if lines[-1] == "" else len(lines) - 1]  # a line cut off by a kill has no end
        for line in whole[1:]:
            entry = json.loads(line)
            written, read = (np.array(sums, np.uint32) for sums in entry["sums"])
            self._sums[entry["name"]][entry["slab"]] = written, read
        with journal.open("w") as file:
            file.write("\n".join(whole) + "\n")
        return True

    def _create(self, metadata: dict[str, Any]) -> None:
        self.work.mkdir(parents=True)
        write_skeleton(self._step_directory, {name: len(array.shape) for name, array in self.arrays.items()}, metadata)
        for tree in {self._tree(name)[0] for name in self.arrays}:
            for entry in tree.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != TREE_FILE:
                    entry.unlink()
            _describe_arrays(tree, dict(self._in_tree(tree)))
        for name in self.arrays:
            self._open_array(name, create=True)
        unfinished = self.work / f"{JOURNAL}.writing"
        with unfinished.open("w") as file:
            file.write(json.dumps({"identity": self._identity}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self.work / JOURNAL)

    def _tree(self, name: str) -> tuple[Path, str]:
        """Directory of the Orbax tree of a leaf, and the array's name in it."""
        section, *keys = name.split("/")
        return self._step_directory / section, ".".join(keys)

    def _in_tree(self, tree: Path) -> list[tuple[str, NewArray]]:
        return [(self._tree(name)[1], array) for name, array in self.arrays.items() if self._tree(name)[0] == tree]

    def _open_array(self, name: str, *, create: bool) -> ts.TensorStore:
        array = self.arrays[name]
        spec = array_spec(*self._tree(name), zarr3=True, ocdbt=True)
        spec["kvstore"]["config"] = {"compression": None}
        if create:
            spec["metadata"] = {
                "shape": array.shape,
                "data_type": array.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            }
            spec["store_data_equal_to_fill_value"] = True
        return ts.open(spec, open=True, create=create, context=self._context).result()


def _describe_arrays(tree: Path, arrays: Mapping[str, NewArray]) -> None:
    """Puts chunks and shardings into the files where Orbax keeps them beside a tree's arrays."""
    described = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": array.chunk,
                "chunk_shape": array.chunk,
                "ext_metadata": None,
            }
        }
        for name, array in arrays.items()
    ]
    (tree / "array_metadatas").mkdir()
    (tree / "array_metadatas" / "process_0").write_text(json.dumps({"array_metadatas": described}))
    shardings = {
        base64.b64encode(name.encode()).decode(): json.dumps(array.sharding)
        for name, array in arrays.items()
        if array.sharding is not None
    }
    if shardings:
        (tree / "_sharding").write_text(json.dumps(shardings))
    metadata = json.loads((tree / TREE_FILE).read_text())
    for leaf in metadata["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in leaf["key_metadata"])
        leaf["value_metadata"]["write_shape"] = arrays[name].chunk
    (tree / TREE_FILE).write_text(json.dumps(metadata))


def described_sharding(mesh: Mapping[str, int], spec: Sequence[Any]) -> dict[str, Any]:
    """A sharding on a mesh that need not exist, as Orbax records it. ``spec`` has an entry per dim."""
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.values()),
        "axis_names": list(mesh),
        "axis_types": ["AxisType.Explicit"] * len(mesh),
        "partition_spec": [list(entry) if isinstance(entry, tuple) else entry for entry in spec],
        "device_mesh": {"mesh": []},
    }
