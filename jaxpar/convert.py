"""Checkpoints of others as ours, and ours as Hugging Face directories: streamed, resumable, checked value by value."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpar
from jaxpar.checkpoint import commit, durable
from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.checksum import box_checksum, to_text
from jaxpar.checkpoint.chunks import as_index, boxes, slab_shape
from jaxpar.checkpoint.compare import array_type
from jaxpar.checkpoint.contents import FORMAT_VERSION
from jaxpar.checkpoint.copying import disk_errors, slab_bytes_within
from jaxpar.checkpoint.describe import describe
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.keymap_file import read_keymap_file
from jaxpar.checkpoint.places import choose_step
from jaxpar.checkpoint.safetensors import TensorDirectory
from jaxpar.checkpoint.safetensors_writer import TensorFilesWriter
from jaxpar.checkpoint.side_files import copy_side_files, side_files
from jaxpar.checkpoint.tensors import ArrayType, Progress, num_bytes
from jaxpar.checkpoint.verify import leaf_checksum
from jaxpar.checkpoint.views import ExportedTensors, MappedTensors, row_slabs
from jaxpar.config.checkpoints import JAXPAR_PREFIX
from jaxpar.config.dims import with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.huggingface import PREFIX, read_model_settings
from jaxpar.config.huggingface_export import write_model_settings
from jaxpar.config.schema import Config, ModelConfig, PrecisionConfig
from jaxpar.hf import hf_ignored, hf_keymap, unpadded_shapes
from jaxpar.plan.parameters import param_count
from jaxpar.reshard import (
    AVERAGE,
    CONVERTIBLE,
    FLOAT_TYPES,
    PARAMS,
    Resharding,
    files_identity,
    largest_chunk,
    open_step,
    plan_copy,
)
from jaxpar.resume import model_fingerprint

SIDE_DIRECTORY = "huggingface"
"""In a checkpoints directory: config.json and tokenizer files that the weights came with."""

_JOURNAL = "export.journal"

_SYNC_BYTES = 64 * 2**20
"""Written bytes after which the disk is waited for, and the journal says what is there."""


def is_hf_directory(path: str | Path) -> bool:
    """Whether a path is a Hugging Face directory with safetensors."""
    directory = Path(path)
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def plan_hf_import(source: str, *, mesh: Mapping[str, int] | None, dtype: str | None) -> Resharding:
    """A Hugging Face directory as step 0 of a checkpoint with parameters only. Reads no tensors.

    Args:
        source: Holds config.json and safetensors.
        mesh: Target mesh, or None.
        dtype: Float type of the parameters; None keeps the stored one.

    Raises:
        ConfigError: config.json describes something that is not supported.
        CheckpointError: Tensors are missing, unexpected or of the wrong shape; all are named.
        ValueError: The mesh does not fit the model.
    """
    model = with_derived_dims(ModelConfig(**read_model_settings(source)))
    tensors = TensorDirectory(source)
    reader = MappedTensors(
        tensors,
        hf_keymap(model, tensors.types),
        shapes=unpadded_shapes(model),
        ignored=hf_ignored(model),
        prefix=PARAMS,
        origin=source,
    )
    identity = files_identity(Path(source))
    return _planned_import(source, reader, model, mesh=mesh, dtype=dtype, identity=identity, largest_chunk=0)


def plan_foreign_import(
    source: str, keymap: str, config: Config, *, step: int | None, mesh: Mapping[str, int] | None, dtype: str | None
) -> Resharding:
    """An Orbax checkpoint of another trainer as step 0 of a checkpoint with parameters only. Reads no arrays.

    Args:
        source: A checkpoints directory, a step, or a tree.
        keymap: Path of a key-map file.
        config: Says what model the parameters are.
        step: Step to read; None takes the newest.
        mesh: Target mesh, or None.
        dtype: Float type of the parameters; None keeps the stored one.

    Raises:
        ConfigError: The key-map file is wrong, or the config has no model.
        CheckpointError: The source has no such step, or does not fit the key map; every leaf that does not is named.
        ValueError: The mesh does not fit the model.
    """
    rules = read_keymap_file(keymap)
    model = with_derived_dims(config.model)
    step_directory = describe(source, step).step_directory
    arrays = StepArrays(step_directory)
    reader = MappedTensors(
        arrays,
        rules.plan,
        shapes=unpadded_shapes(model),
        sizes=rules.sizes,
        ignored=rules.ignored,
        prefix=PARAMS,
        origin=str(step_directory),
    )
    identity = f"{files_identity(step_directory)} {Path(keymap).read_text()}"
    return _planned_import(
        str(step_directory),
        reader,
        model,
        mesh=mesh,
        dtype=dtype,
        identity=identity,
        largest_chunk=largest_chunk(arrays),
    )


def _planned_import(
    source: str,
    reader: MappedTensors,
    model: ModelConfig,
    *,
    mesh: Mapping[str, int] | None,
    dtype: str | None,
    identity: str,
    largest_chunk: int,
) -> Resharding:
    stored = {np.dtype(leaf.dtype).name for leaf in reader.types.values()}
    params = dtype or (stored.pop() if len(stored) == 1 else "float32")
    precision = dataclasses.asdict(PrecisionConfig(params=params if params in FLOAT_TYPES else "float32"))
    settings = dataclasses.asdict(model)
    metadata = {
        "format_version": FORMAT_VERSION,
        "step": 0,
        "jaxpar": jaxpar.__version__,
        "model_fingerprint": model_fingerprint(settings),
        "num_params": param_count(model),
        "config": {"model": settings, "precision": precision},
        "imported_from": source,
    }
    return plan_copy(
        source,
        reader,
        list(reader.types),
        metadata=metadata,
        checksums={},
        identity=identity,
        largest_chunk=largest_chunk,
        step=0,
        mesh=mesh,
        dtype=dtype,
    )


def keep_side_files(source: str, destination: str) -> None:
    """Keeps config.json and the tokenizer of a Hugging Face directory with the checkpoint, to be exported again."""
    place = Path(destination) / SIDE_DIRECTORY
    copy_side_files(source, place)
    if not (place / "config.json").exists():
        shutil.copyfile(Path(source) / "config.json", place / "config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """An export to a Hugging Face directory that has been planned; nothing is written yet."""

    source: Path
    """Step directory that is read."""
    arrays: StepArrays
    tensors: ExportedTensors
    types: Mapping[str, jax.ShapeDtypeStruct]
    """Tensors as they will be written."""
    model: ModelConfig
    config: Mapping[str, Any]
    """Content of config.json."""
    prefix: str
    """What the names of the exported weights begin with in the source."""
    side_directory: Path | None
    """Where tokenizer files come from; None: there are none."""
    identity: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(num_bytes, self.types.values()))

    @property
    def param_names(self) -> list[str]:
        """Parameters in the source."""
        return [name for name in self.arrays.types if name.startswith(self.prefix)]


def plan_export(
    source: str, *, step: int | None, dtype: str | None, tokenizer: str | None, weights: str = "params"
) -> Export:
    """Looks at a checkpoint and decides what the Hugging Face directory will hold. Reads no arrays.

    Args:
        source: A run, its checkpoints, or one step.
        step: Step to export; None takes the newest.
        dtype: Float type of the tensors; None keeps the stored one.
        tokenizer: Directory with the tokenizer files to carry along; None takes those that the weights came with, or
            those beside the ``tokenizer.json`` that the run was trained with.
        weights: ``params``, or ``ema`` for their moving average.

    Raises:
        ConfigError: transformers has no such model; ``tokenizer`` holds no tokenizer files.
    """
    directory, step = choose_step(source, step)
    step_directory = directory / str(step)
    arrays, metadata = open_step(step_directory)
    settings = metadata.get("config", {}).get("model")
    if settings is None:
        raise CheckpointError(f"{step_directory} does not say what model it holds, so it cannot be exported")
    model = ModelConfig(**settings)
    prefix = {"params": PARAMS, "ema": AVERAGE}[weights]
    if not any(name.startswith(prefix) for name in arrays.types):
        raise CheckpointError(f"{step_directory} has no section {weights}; sections: {', '.join(arrays.sections)}")
    tensors = ExportedTensors(arrays, hf_keymap(model), prefix=prefix)
    types = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, FLOAT_TYPES[dtype] if dtype and np.dtype(leaf.dtype) in CONVERTIBLE else leaf.dtype
        )
        for name, leaf in tensors.types.items()
    }
    side_directory = _side_directory(directory, metadata, tokenizer)
    original = _original_config(side_directory, model)
    seq_len = metadata["config"].get("data", {}).get("seq_len")
    written = dtype or np.dtype(next(iter(tensors.types.values())).dtype).name
    return Export(
        source=step_directory,
        arrays=arrays,
        tensors=tensors,
        types=types,
        model=model,
        config=write_model_settings(
            model, written, original=original, max_positions=None if "max_position_embeddings" in original else seq_len
        ),
        prefix=prefix,
        side_directory=side_directory,
        identity=f"{files_identity(step_directory)} {written} {weights}",
    )


def export(planned: Export, destination: str, *, max_memory: int, progress: Progress = lambda _: None) -> Path:
    """Writes the Hugging Face directory, compares it with the source value by value, and puts it in place.

    The source's arrays are first compared with their checksums. The directory grows beside its place; an export that
    was stopped goes on when it is asked for again.

    Args:
        planned: What to export.
        destination: The directory; must not be there, or be empty.
        max_memory: Bound on the resident memory of this process, bytes.
        progress: Told bytes as they are checked, written and compared.

    Raises:
        CheckpointError: The destination is taken, or the bound is too small.
        DamagedCheckpointError: The source is not what was saved, or the files are not what was read.
    """
    place = Path(destination)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place} is there already; nothing is overwritten\n-> name another directory")
    slab_bytes = slab_bytes_within(max_memory)
    with disk_errors(place):
        return _export(planned, place, slab_bytes, progress)


def _export(planned: Export, place: Path, slab_bytes: int, progress: Progress) -> Path:
    mark = commit.read_commit_mark(planned.source)
    for name in planned.param_names:
        found = to_text(leaf_checksum(planned.arrays, name, progress, slab_bytes=slab_bytes))
        if mark is not None and mark.checksums.get(name, found) != found:
            raise DamagedCheckpointError(f"{name} of {planned.source}: its data is not what was saved")
    work = place.with_name(f"{place.name}.unfinished")
    _write_tensors(planned, work, slab_bytes, progress)
    _compare(planned, work, slab_bytes, progress)
    (work / "config.json").write_text(json.dumps(planned.config, indent=2) + "\n")
    if planned.side_directory is not None:
        copy_side_files(planned.side_directory, work)
    (work / _JOURNAL).unlink()
    if place.exists():
        place.rmdir()
    return work.rename(place)


def _write_tensors(planned: Export, work: Path, slab_bytes: int, progress: Progress) -> None:
    """Writes what the journal does not have yet."""
    work.mkdir(parents=True, exist_ok=True)
    journal = work / _JOURNAL
    header, *lines = journal.read_text().splitlines() if journal.exists() else [""]
    identity = json.dumps({"identity": planned.identity})
    if header not in ("", identity):
        raise CheckpointError(f"{work} is an unfinished export of something else\n-> finish that, or remove it")
    done = [entry for entry in map(_journal_entry, lines) if entry is not None]
    durable.replace(journal, "".join(f"{line}\n" for line in [identity, *map(json.dumps, done)]))
    stopped_after_the_last = not any(work.glob("*.safetensors*.partial")) and any(work.glob("*.safetensors"))
    if stopped_after_the_last:
        progress(planned.num_bytes)
        return
    with TensorFilesWriter(work, planned.types) as writer, journal.open("a") as file:
        known = {tuple(entry) for entry in done}
        pending: list[list] = []
        unsynced = 0

        def record() -> None:
            nonlocal unsynced
            writer.sync()
            file.write("".join(f"{json.dumps(entry)}\n" for entry in pending))
            file.flush()
            pending.clear()
            unsynced = 0

        for name, leaf in planned.types.items():
            for row, box in row_slabs(leaf, slab_bytes):
                rows = box[0].stop - row if box else 1
                if (name, row, rows) in known:
                    writer.mark_written(name, row, row + rows)
                else:
                    values = planned.tensors.read(name, box).astype(leaf.dtype, copy=False)
                    writer.write(name, row, values)
                    pending.append([name, row, rows])
                    unsynced += values.nbytes
                if unsynced >= _SYNC_BYTES:
                    record()
                progress(rows * num_bytes(leaf) // max(1, leaf.shape[0] if leaf.shape else 1))
        record()
        writer.finish()


def _journal_entry(line: str) -> list | None:
    """A line of the journal; None for one that a kill cut off."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _compare(planned: Export, work: Path, slab_bytes: int, progress: Progress) -> None:
    """Reads the files as a model would and compares every value with the source."""
    model = planned.model
    with TensorDirectory(work) as directory:
        view = MappedTensors(
            directory,
            hf_keymap(model),
            shapes=unpadded_shapes(model),
            ignored=hf_ignored(model),
            prefix=planned.prefix,
            origin=str(work),
        )
        if changed := [name for name, leaf in planned.types.items() if not _same_type(directory.types.get(name), leaf)]:
            raise CheckpointError(f"{work} is an unfinished export of something else ({changed[0]})\n-> remove it")
        for name, leaf in view.types.items():
            stored = planned.arrays.types[name]
            slab = slab_shape(stored.shape, stored.read_chunk, stored.dtype.itemsize, slab_bytes // 2)
            for box in boxes(stored.shape, slab):
                origin = [start for start, _ in box]
                wanted = planned.arrays.read(name, as_index(box)).astype(leaf.dtype, copy=False)
                if (box_checksum(view.read(name, as_index(box)), origin) != box_checksum(wanted, origin)).any():
                    raise DamagedCheckpointError(f"{name} in {work} is not what was read, at {origin}")
                progress(wanted.nbytes)


def _same_type(found: ArrayType | None, wanted: ArrayType) -> bool:
    return found is not None and array_type(found) == array_type(wanted)


def _side_directory(directory: Path, metadata: Mapping[str, Any], tokenizer: str | None) -> Path | None:
    """The first directory that has tokenizer files or a config.json of the weights."""
    if tokenizer is not None:
        if not Path(tokenizer).is_dir() or not any(side_files(tokenizer)):
            there = "holds no tokenizer files" if Path(tokenizer).is_dir() else "is no directory"
            remedy = "name a directory with tokenizer.json or the like, or leave --tokenizer out"
            raise ConfigError([Problem(key="--tokenizer", value=tokenizer, message=there, remedy=remedy)])
        return Path(tokenizer)
    candidates = [directory / SIDE_DIRECTORY]
    init_from = metadata["config"]["model"].get("init_from") or ""
    if init_from.startswith(PREFIX):
        candidates.append(Path(init_from.removeprefix(PREFIX)))
    if init_from.startswith(JAXPAR_PREFIX):
        candidates.append(Path(init_from.removeprefix(JAXPAR_PREFIX)) / SIDE_DIRECTORY)
    trained_with = metadata["config"].get("data", {}).get("tokenizer", "bytes")
    if trained_with != "bytes":
        candidates.append(Path(trained_with).parent)
    return next((path for path in candidates if path.is_dir() and any(side_files(path))), None) or next(
        (path for path in candidates if (path / "config.json").is_file()), None
    )


def _original_config(side_directory: Path | None, model: ModelConfig) -> dict[str, Any]:
    """The config.json that the weights came with, if it is of the same family; token ids and the like are kept."""
    path = side_directory / "config.json" if side_directory is not None else None
    if path is None or not path.is_file():
        return {}
    original = json.loads(path.read_text())
    return original if original.get("model_type") == model.family else {}
