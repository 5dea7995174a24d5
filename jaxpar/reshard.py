"""Rewrites a checkpoint for another mesh, or with parameters only, or in another float type; and says what that brings.

Any mesh can restore any checkpoint. What resharding changes is how much is read for it: chunks are cut so that no
device of the target mesh fetches what it does not need.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.chunks import as_index, chunk_for_shards, grid_amplification, slab_shape
from jaxpar.checkpoint.contents import FORMAT_VERSION, refuse_newer
from jaxpar.checkpoint.copying import copy_arrays, disk_errors, refuse_big_chunks, slab_bytes_within
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.paths import leaves_by_path, of_its_param
from jaxpar.checkpoint.places import choose_step
from jaxpar.checkpoint.step_writer import NewArray, StepWriter, described_sharding
from jaxpar.checkpoint.tensors import ArrayType, Progress, TensorReader, num_bytes
from jaxpar.checkpoint.verify import verify_step
from jaxpar.config.schema import AXES, ModelConfig, PrecisionConfig
from jaxpar.model.decoder import Numerics
from jaxpar.program import decoder_definition
from jaxpar.sharding import axes_of, spec_for

FLOAT_TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Types that leaves may be converted to."""

CONVERTIBLE = {*FLOAT_TYPES.values(), np.dtype(np.float16)}
"""Types that leaves may be converted from."""

PARAMS = "params/"
"""What the names of parameters begin with."""

AVERAGE = "ema/"
"""What the names of their moving average begin with; it is float32 in every run."""

_PROBE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a leaf lies on a mesh."""

    spec: tuple[Any, ...]
    """Entry of the PartitionSpec per dim."""
    shard: tuple[int, ...]
    """Shape of a shard; the last ones may reach beyond the array on disk (padded vocabulary)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resharding:
    """A copy that has been planned; nothing is written yet."""

    source: str
    """What is read, for people."""
    reader: TensorReader
    """The arrays, by the names that they will have."""
    checksums: Mapping[str, str]
    """Checksums of the arrays as they are read, of those for which there is one."""
    identity: str
    """Changes with the source's content, so that a copy is not gone on with from another source."""
    largest_chunk: int
    """Bytes of the biggest piece that must be read at once."""
    step: int
    metadata: Mapping[str, Any]
    """Metadata of the new step."""
    arrays: Mapping[str, NewArray]
    """How every array will lie."""
    before: Mapping[str, Placement]
    """Placement on the mesh that saved them; empty if that is not known."""
    after: Mapping[str, Placement]
    """Placement on the target mesh; empty without one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays to be written."""
        return sum(map(num_bytes, self.arrays.values()))

    @property
    def bytes_to_read(self) -> int:
        """Bytes of the arrays to be read."""
        return sum(num_bytes(self.reader.types[name]) for name in self.arrays)

    def stored_chunks(self) -> dict[str, tuple[int, ...]]:
        """Shape of the smallest pieces that the arrays are read in now."""
        types = self.reader.types
        return {name: getattr(types[name], "read_chunk", types[name].shape) for name in self.arrays}

    def bytes_per_device(self, placements: Mapping[str, Placement]) -> int | None:
        """Bytes of the new arrays on one device; None if the placement is not known."""
        if not placements:
            return None
        return sum(math.prod(placements[name].shard) * array.dtype.itemsize for name, array in self.arrays.items())

    def read_amplification(self, chunks: Mapping[str, Sequence[int]]) -> float | None:
        """Bytes that the devices of the target mesh fetch, over those that they need; None without a target."""
        if not self.after:
            return None
        needed = fetched = 0
        for name, array in self.arrays.items():
            ours = grid_amplification(array.shape, self.after[name].shard, chunks[name], array.dtype.itemsize)
            needed, fetched = needed + ours[0], fetched + ours[1]
        return fetched / max(1, needed)

    def seconds(self) -> float:
        """Rough time of the copy: everything is read, written, and read once more, at the speed of a small sample."""
        name = max(self.arrays, key=lambda name: num_bytes(self.reader.types[name]))
        stored, chunk = self.reader.types[name], self.stored_chunks()[name]
        box = slab_shape(stored.shape, [1] * len(chunk), np.dtype(stored.dtype).itemsize, _PROBE_BYTES)
        started = time.perf_counter()
        sample = self.reader.read(name, as_index(tuple((0, size) for size in box)))
        per_byte = (time.perf_counter() - started) / max(1, sample.nbytes)
        return per_byte * (self.bytes_to_read + 2 * self.num_bytes)


def plan_resharding(
    source: str,
    *,
    mesh: Mapping[str, int] | None = None,
    params_only: bool = False,
    dtype: str | None = None,
    step: int | None = None,
) -> Resharding:
    """Looks at the source and decides how every array will lie. Reads no arrays.

    Args:
        source: A run, its checkpoints, or one step.
        mesh: Sizes of the target mesh by axis; None cuts chunks for no mesh in particular.
        params_only: Whether the optimizer state stays behind.
        dtype: Float type that float leaves are converted to; None keeps theirs.
        step: Step to copy; None takes the one that ``source`` names, or the newest.

    Raises:
        CheckpointError: There is no such complete step, or it does not say what model it holds.
        ValueError: The mesh does not fit the model; names parameter, dim, size and axis.
    """
    directory, step = choose_step(source, step)
    step_directory = directory / str(step)
    arrays, metadata = open_step(step_directory)
    names = [name for name in arrays.types if name.startswith(PARAMS) or not params_only]
    if not names:
        there = ", ".join(arrays.sections)
        raise CheckpointError(f"step {step} of {directory} has no section params; sections: {there}")
    mark = commit.read_commit_mark(step_directory)
    return plan_copy(
        str(step_directory),
        arrays,
        names,
        metadata=metadata,
        checksums=mark.checksums if mark else {},
        identity=files_identity(step_directory),
        largest_chunk=largest_chunk(arrays),
        step=step,
        mesh=mesh,
        dtype=dtype,
    )


def open_step(step_directory: Path) -> tuple[StepArrays, dict[str, Any]]:
    """Arrays and metadata of a complete step, as far as they can be known to be what was saved without reading arrays.

    Raises:
        CheckpointError: A newer jaxpar wrote it.
        DamagedCheckpointError: A file that describes it is damaged, or leaves are gone; names all.
    """
    metadata = commit.read_metadata(step_directory)
    faults = list(commit.content_faults(step_directory, data=False))
    if not faults:
        refuse_newer(metadata, str(step_directory))
    arrays = StepArrays(step_directory)
    faults += [f"{name}: {why}" for name, why in arrays.faults.items()]
    faults += commit.missing_leaves(step_directory, {*arrays.types, *arrays.faults})
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise DamagedCheckpointError(f"{step_directory} cannot be copied:{listed}\n-> copy another step")
    return arrays, metadata


def largest_chunk(arrays: StepArrays) -> int:
    """Bytes of the biggest piece in which an array of a step is read."""
    types = arrays.types.values()
    return max((math.prod(array.read_chunk) * array.dtype.itemsize for array in types), default=0)


def files_identity(directory: Path) -> str:
    """Changes when any file of a directory is written again."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return f"{directory} {[(str(p.relative_to(directory)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]}"


def plan_copy(
    source: str,
    reader: TensorReader,
    names: Sequence[str],
    *,
    metadata: Mapping[str, Any],
    checksums: Mapping[str, str],
    identity: str,
    largest_chunk: int,
    step: int,
    mesh: Mapping[str, int] | None,
    dtype: str | None,
) -> Resharding:
    """Decides how the named arrays of any reader will lie as a step; the arguments are those of ``Resharding``.

    Raises:
        CheckpointError: The metadata does not say what model the arrays are.
        ValueError: The mesh does not fit the model; names parameter, dim, size and axis.
    """
    types = {name: reader.types[name] for name in names}
    saved_mesh = metadata.get("mesh")
    before = placements(metadata, types, saved_mesh, where=source) if saved_mesh else {}
    after = placements(metadata, types, mesh, where=source) if mesh is not None else {}
    new = {}
    for name, array in types.items():
        stored = np.dtype(array.dtype)
        converts = dtype and stored in CONVERTIBLE and not name.startswith(AVERAGE)
        target = FLOAT_TYPES[dtype] if converts else stored
        shard = after[name].shard if after else array.shape
        chunk = chunk_for_shards(array.shape, shard, target.itemsize)
        sharding = described_sharding(mesh, after[name].spec) if after else None
        new[name] = NewArray(tuple(array.shape), target, chunk, sharding)
    return Resharding(
        source=source,
        reader=reader,
        checksums=checksums,
        identity=identity,
        largest_chunk=largest_chunk,
        step=step,
        metadata=_new_metadata(metadata, source, mesh, dtype, step),
        arrays=new,
        before=before,
        after=after,
    )


def reshard(
    planned: Resharding, destination: str, *, max_memory: int, progress: Progress = lambda _: None, verify: bool = True
) -> Path:
    """Copies, verifies the copy against the source's checksums, and puts it in place; returns the new step directory.

    Args:
        planned: What to copy.
        destination: Checkpoints directory of the copy; a step of that number must not be there.
        max_memory: Bound on the resident memory of this process, bytes.
        progress: Told bytes of the source as they are copied, then bytes of the copy as they are verified.
        verify: Whether the finished copy is read once more.

    Raises:
        CheckpointError: The destination is taken or cannot be written, or the bound is too small.
        DamagedCheckpointError: What was read is not what was saved, or the copy is not what was read.
    """
    slab_bytes = slab_bytes_within(max_memory)
    refuse_big_chunks(planned.source, planned.largest_chunk, slab_bytes)
    place = Path(destination)
    with (
        disk_errors(place),
        StepWriter(place, planned.step, planned.arrays, planned.metadata, planned.identity) as writer,
    ):
        copy_arrays(planned.reader, writer, planned.checksums, slab_bytes=slab_bytes, progress=progress)
        grown = writer.close()
        if verify:
            verdict = verify_step(grown, progress, slab_bytes=slab_bytes)
            if verdict.faults:
                listed = "".join(f"\n  {fault}" for fault in verdict.faults)
                raise DamagedCheckpointError(
                    f"the copy in {grown} is not what was read:{listed}\n-> check the disk, remove {writer.work} and "
                    "give the same command again"
                )
        return writer.publish()


def placements(
    metadata: Mapping[str, Any], types: Mapping[str, ArrayType], mesh: Mapping[str, int], *, where: str
) -> dict[str, Placement]:
    """How every leaf of a checkpoint lies on a mesh: parameters by their logical axes, the optimizer state like them.

    Raises:
        CheckpointError: The checkpoint does not say what model it holds.
        ValueError: A dim that its axes do not divide.
    """
    config = metadata.get("config", {})
    if "model" not in config:
        raise CheckpointError(f"{where} does not say what model it holds, so a mesh means nothing to it")
    abstract_mesh = AbstractMesh(tuple(mesh.get(axis, 1) for axis in AXES), AXES)
    definition = decoder_definition(ModelConfig(**config["model"]), Numerics.of(PrecisionConfig(**config["precision"])))
    axes = definition.axes_by_path
    params = {}
    for path, leaf in leaves_by_path(definition.abstract_params, "params").items():
        spec = tuple(spec_for("/".join(path), axes[path], leaf.shape, abstract_mesh))
        spec += (None,) * (len(leaf.shape) - len(spec))
        ways = [math.prod(abstract_mesh.shape[axis] for axis in axes_of(entry)) for entry in spec]
        params[path] = Placement(spec, tuple(size // n for size, n in zip(leaf.shape, ways, strict=True)))
    placed = {}
    for name, array in types.items():
        ours = of_its_param(tuple(name.split("/")), params)
        placed[name] = _placement_like(ours, array.shape)
    return placed


def _placement_like(param: Placement | None, shape: tuple[int, ...]) -> Placement:
    """Placement of a leaf that is or mirrors a parameter; a mean over some of its dims keeps them with size 1."""
    if param is None or len(param.shard) != len(shape):
        return Placement((None,) * len(shape), tuple(shape))
    is_mean = [size == 1 for size in shape]
    return Placement(
        tuple(None if mean else entry for mean, entry in zip(is_mean, param.spec, strict=True)),
        tuple(1 if mean else size for mean, size in zip(is_mean, param.shard, strict=True)),
    )


def _new_metadata(
    metadata: Mapping[str, Any], source: str, mesh: Mapping[str, int] | None, dtype: str | None, step: int
) -> dict[str, Any]:
    """The source's metadata, with what the copy changes."""
    new = {**metadata, "format_version": FORMAT_VERSION, "step": step}
    if mesh is not None:
        new["mesh"] = {axis: mesh.get(axis, 1) for axis in AXES}
    if dtype is not None and "config" in metadata:
        config = metadata["config"]
        new["config"] = {**config, "precision": {**config["precision"], "params": dtype}}
    new["resharded_from"] = source
    return new
