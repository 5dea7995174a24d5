"""Saves training state with Orbax and restores it; the only module that imports Orbax (v1 API, still moving, pinned).

On disk a checkpoint is ``DIRECTORY/STEP/``: one Orbax tree per section of the state (``params``, ``optimizer``, ...),
so that each can be read alone, and a JSON dict of metadata. The layout does not know the mesh: arrays lie in their
natural shape (layers first, no stage dim, no vocabulary padding), uncompressed and in chunks finer than the shards that
wrote them (``chunks.saving_chunk_bytes``), so that a reader with other shards reads little more than it needs.

With several processes every method of ``Store`` that is not a plain query is collective: all processes call it, in the
same order, on one shared file system.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.agreement import damage_for_all
from jaxpar.checkpoint.checksum import array_checksums, to_text
from jaxpar.checkpoint.chunks import saving_chunk_bytes
from jaxpar.checkpoint.commit import Keep
from jaxpar.checkpoint.contents import (
    UNPADDED,
    StoredShapes,
    arrays_to_store,
    metadata_to_store,
    misfits,
    newer_format,
    refuse_newer,
    sections_by_path,
)
from jaxpar.checkpoint.errors import CheckpointError, DamagedCheckpointError
from jaxpar.checkpoint.loading import load_arrays
from jaxpar.checkpoint.paths import leaves_by_path, nested, path_string

_REPLICA_SLICE_BYTES = 2**20

# Orbax 0.12.8 warns about chunks below 1 MiB, once per leaf and save; ours are as small as they are on purpose.
logging.getLogger("absl").addFilter(lambda record: "target_byte_size too small" not in record.getMessage())

_LOG = logging.getLogger(__name__)

NO_METRICS: Mapping[str, float] = MappingProxyType({})


class Store:
    """A directory of checkpoints, one per step.

    A context manager; leaving it finishes the save in progress. One run writes to a directory at a time; any number of
    others may read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        warn: Callable[[str], None] = _LOG.warning,
    ):
        """Opens a directory; it need not exist yet, and nothing is written before the first save.

        Args:
            directory: Path on a file system that all processes share.
            keep: Which complete steps a save leaves, or how many of the newest; None keeps all.
            warn: Is told of old steps that could not be removed.
        """
        if "://" in os.fspath(directory):
            raise CheckpointError(
                f"{os.fspath(directory)}: object stores are not supported yet; give a file system path"
            )
        self.directory = Path(directory).absolute()
        self._keep = keep if isinstance(keep, Keep) else Keep(latest=keep)
        if self._keep.latest is not None and self._keep.latest < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; None keeps all")
        self._saving: int | None = None
        self._saved: concurrent.futures.Future[str | None] | None = None
        self._warn = warn
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._tidy = False

    def tidy(self) -> list[str]:
        """Removes what interrupted saves left and sets damaged steps aside; returns what was done, a line each.

        Only for the run that writes here, before it restores. Not collective: process 0 does it.
        """
        done = commit.tidy(self.directory) if jax.process_index() == 0 else []
        self._tidy = True
        return done

    def set_aside(self, step: int) -> None:
        """Renames a complete step that turned out to be damaged, so that it can be saved again. Process 0 does it."""
        if jax.process_index() == 0 and (self.directory / str(step)).exists():
            commit.set_aside(self.directory / str(step))

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
        *,
        stored_shapes: StoredShapes = UNPADDED,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """Starts to save; returns when the arrays may be changed or donated, while writing goes on in the background.

        Waits for the save before it, whose error, if any, is raised here.

        Args:
            step: Number of the checkpoint; optimizer steps done.
            state: Sections by name, each a pytree of ``jax.Array`` (scalars too).
            metadata: What JSON can hold, for ``metadata(step)``: data position, seeds, resolved config, ...
            stored_shapes: Shape on disk by leaf (``"params/embedding"``), for leaves padded in memory; what lies
                outside is not saved.
            metrics: Finite numbers by name, for ``Keep.best``.

        Raises:
            CheckpointError: This or the previous save failed; names the last good checkpoint. Or the step is already
                complete in this directory.
            ValueError: State or metadata cannot be stored; names the leaf or key.
        """
        self.wait()
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step = {step!r}: the number of a checkpoint is an int of at least 0")
        arrays = arrays_to_store(state, stored_shapes)
        named = _named(arrays)
        custom_metadata = metadata_to_store(step, metadata)
        if step in self.steps():
            raise CheckpointError(f"{self.directory} already holds a complete checkpoint of step {step}")
        try:
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                if not self._tidy:
                    commit.tidy(self.directory)
            self._tidy = True
            with _saving_context():
                response = ocp.save_checkpointables_async(
                    self.directory / str(step), arrays, overwrite=True, custom_metadata=custom_metadata
                )
            checksums = array_checksums(named, UNPADDED)  # last: devices compute them after this has returned
        except Exception as error:  # Orbax raises many kinds; whatever it was, this checkpoint does not exist
            raise self._save_failed(step, error) from error
        self._saving = step
        self._saved = self._thread.submit(self._finish, step, response, list(named), checksums, dict(metrics))

    def check(self) -> None:
        """Raises the error of the save in the background, if it has failed on this process by now. Does not wait."""
        if self._saved is not None and self._saved.done() and self._saved.exception() is not None:
            self.wait()

    def wait(self) -> None:
        """Waits for the save in progress, if any.

        Raises:
            CheckpointError: It failed on this process; names the last good checkpoint. Other processes may still wait
                for this one, so the run ends.
        """
        if self._saved is None:
            return
        saved, step = self._saved, self._saving
        error = saved.exception()
        self._saved = self._saving = None
        if error is not None:
            self._tidy = False  # what the failed save left may be what fills the disk
            # Raised at once, not after agreeing with the other processes: those may wait for this one inside Orbax.
            raise self._save_failed(step, error) from error
        if warning := saved.result():
            self._warn(warning)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} of {self.directory}")  # process 0 commits last

    def close(self) -> None:
        """Finishes the save in progress; raises like ``wait``."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        """Returns the store itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Closes; an error that is already on its way keeps precedence, and a failed save is noted on it.

        A KeyboardInterrupt does not wait for the save in progress: its step stays incomplete, and is passed over later.
        """
        if kind is KeyboardInterrupt:
            self._thread.shutdown(wait=False)
            return
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))

    def steps(self) -> list[int]:
        """Complete steps, ascending. Does not include a save in progress."""
        return self._scan()[0]

    def skipped(self) -> list[tuple[int, str]]:
        """(step, why) of unfinished and damaged steps, which are ignored; a later save at their step replaces them."""
        return self._scan()[1]

    def _scan(self) -> tuple[list[int], list[tuple[int, str]]]:
        """``commit.scan`` without the step that is being saved; one whose save has ended, well or not, counts."""
        complete, skipped = commit.scan(self.directory)
        if self._saved is None or self._saved.done():
            return complete, skipped
        return [s for s in complete if s != self._saving], [(s, why) for s, why in skipped if s != self._saving]

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata of a step, with ``step`` and ``format_version`` added; reads no arrays.

        Raises:
            CheckpointError: There is no such complete step, or a newer jaxpar wrote it.
            DamagedCheckpointError: The metadata is damaged.
        """
        return dict(self._stored(step).custom_metadata)

    def leaves(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape on disk and dtype of every leaf (``"params/layers/q"``); reads no arrays, needs no devices.

        Raises:
            CheckpointError: As ``metadata``, or a section's tree is damaged.
        """
        leaves = {}
        for section, tree in self._stored(step).metadata.items():
            if tree is None:  # Orbax logs the storage error and goes on
                raise self._unreadable(step, f"the tree of section {section} is damaged")
            for path, leaf in leaves_by_path(tree, section).items():
                leaves[path_string(section, path)] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaves

    def restore(
        self,
        step: int,
        abstract_state: Mapping[str, Any],
        *,
        stored_shapes: StoredShapes = UNPADDED,
        ignore: Collection[str] = (),
        verify: bool = True,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Reads a state onto the target shardings, each device only what it holds.

        Args:
            step: A complete step.
            abstract_state: Sections by name, each a pytree of ``jax.ShapeDtypeStruct`` with sharding.
            stored_shapes: Shape on disk by leaf, for leaves padded in memory; the rest is filled with zeros.
            ignore: Sections that are in the checkpoint and stay there, such as ``{"optimizer"}`` to read params only.
            verify: Whether the checksums of the arrays, computed on the devices, are compared with the saved ones.
                Steps of format version 1 have none.
            cast: Whether a leaf of another float type is converted to its target's; otherwise that is an error.

        Returns:
            ``abstract_state`` with arrays in place of the leaves, of exactly that shape, dtype and sharding.

        Raises:
            CheckpointError: One message, before any data is read, with every missing, unexpected, wrong-shape and
                wrong-dtype leaf, every missing section, every target without sharding.
            DamagedCheckpointError: The data cannot be read, or is not what was saved; names the leaves. Raised by all
                processes, whichever met it.
        """
        self.wait()
        with damage_for_all():
            stored = self.leaves(step)
            mark = commit.read_commit_mark(self.directory / str(step))
            if mark is None:
                raise self._unreadable(step, f"{commit.COMMIT_MARK} is damaged")
        sections = sections_by_path(abstract_state)
        targets = {path_string(s, path): leaf for s, leaves in sections.items() for path, leaf in leaves.items()}
        if problems := misfits(targets, stored, stored_shapes, ignore, cast=cast):
            raise CheckpointError(
                f"step {step} of {self.directory} does not fit this run; nothing was read:\n  "
                + "\n  ".join(problems)
                + "\n-> use the model, optimizer and precision settings that wrote it (they are in its metadata)"
            )
        as_stored = {name: _with_dtype(leaf, stored[name].dtype) for name, leaf in targets.items()}
        with damage_for_all():
            named = self._load(step, as_stored)
        if verify and mark.checksums and named:
            self._compare_checksums(step, named, stored_shapes, mark.checksums)
        state = {}
        for section, tree in abstract_state.items():
            arrays = [_cast(named[path_string(section, path)], leaf) for path, leaf in sections[section].items()]
            state[section] = jax.tree.unflatten(jax.tree.structure(tree), arrays)
        return state

    def _compare_checksums(
        self, step: int, arrays: Mapping[str, jax.Array], stored_shapes: StoredShapes, saved: Mapping[str, str]
    ) -> None:
        found = np.asarray(array_checksums(arrays, stored_shapes))
        changed = [name for name, sums in zip(arrays, found, strict=True) if to_text(sums) != saved.get(name)]
        if changed:
            raise self._unreadable(step, f"checksums differ: the data of {', '.join(changed)} is not what was saved")

    def _finish(
        self,
        step: int,
        response: ocp.AsyncResponse[None],
        names: Sequence[str],
        checksums: jax.Array,
        metrics: Mapping[str, float],
    ) -> str | None:
        """Runs in the background: the last of a save, and the removal of old steps; why these are still there."""
        response.result()
        if jax.process_index() != 0:
            return None
        texts = dict(zip(names, map(to_text, np.asarray(checksums)), strict=True))
        commit.write_commit_mark(self.directory / str(step), checksums=texts, metrics=metrics)
        try:
            if self._keep.latest is not None:
                commit.remove_old(self.directory, self._keep, saved=step)
        except OSError as error:  # no reason to end a run whose newest step is safe; the next save tries again
            return f"step {step} is saved in {self.directory}, but older checkpoints could not be removed: {error}"
        return None

    def _save_failed(self, step: int | None, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        latest = self.latest()
        last_good = (
            "there is no complete checkpoint" if latest is None else f"the last good checkpoint is step {latest}"
        )
        reason = f"{type(error).__name__}: {error}"
        return CheckpointError(f"saving step {step} to {self.directory} failed ({reason}); {last_good}")

    def _stored(self, step: int) -> ocp.CheckpointMetadata[dict[str, Any]]:
        """Orbax's view of a complete step whose format we can read."""
        complete, others = self._scan()
        if step not in complete:
            skipped = dict(others)
            why = skipped.get(step, "it does not exist")
            there = f"complete steps: {', '.join(map(str, complete))}" if complete else "it has no complete step"
            kind = DamagedCheckpointError if step in skipped else CheckpointError
            raise kind(f"step {step} of {self.directory} cannot be read: {why}; {there}")
        step_directory = self.directory / str(step)
        stored = ocp.checkpointables_metadata(step_directory)
        metadata = stored.custom_metadata or {}
        if damage := next(commit.content_faults(step_directory, data=False), None):
            raise self._unreadable(step, "; ".join([damage, *newer_format(metadata)]))
        refuse_newer(metadata, f"step {step} of {self.directory}")
        if not isinstance(metadata.get("format_version"), int):
            raise CheckpointError(f"step {step} of {self.directory} was not written by jaxpar (no format_version)")
        return stored

    def _load(self, step: int, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads leaves that are known to match."""
        if not targets:
            return {}
        try:
            return load_arrays(self.directory / str(step), targets)
        except (DamagedCheckpointError, OSError) as error:
            raise self._unreadable(step, str(error)) from error

    def _unreadable(self, step: int, reason: str) -> DamagedCheckpointError:
        others = ", ".join(str(other) for other in self.steps() if other != step) or "there is none"
        return DamagedCheckpointError(
            f"step {step} of {self.directory} cannot be read: {reason}\n-> resume from another step: {others}"
        )


def _named(sections: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Leaves by name of nested sections."""
    return {
        path_string(section, path): leaf
        for section, tree in sections.items()
        for path, leaf in leaves_by_path(tree, section).items()
    }


def _with_dtype(leaf: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _cast(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    return array if array.dtype == target.dtype else array.astype(target.dtype)


def write_skeleton(directory: Path, num_dims: Mapping[str, int], metadata: Mapping[str, Any]) -> None:
    """Writes a step whose every array has one element: all that Orbax puts around arrays, for others to fill.

    Args:
        directory: The step directory; must not exist.
        num_dims: Number of dims of every array, by leaf name.
        metadata: Custom metadata, with ``step`` and ``format_version`` in it.
    """
    sections: dict[str, dict[tuple[str, ...], np.ndarray]] = {}
    for name, dims in num_dims.items():
        section, *path = name.split("/")
        sections.setdefault(section, {})[tuple(path)] = jnp.zeros((1,) * dims)
    trees = {section: nested(leaves) for section, leaves in sections.items()}
    ocp.save_checkpointables(directory, trees, custom_metadata=dict(metadata))


def _saving_context() -> ocp.Context:
    """Orbax options of every save."""
    context = ocp.Context()
    # Where the directory cannot be made, Orbax's threads would wait for it for 5 minutes, and the process for them.
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.use_compression = False  # trained weights hardly compress, and chunks stay cheap to slice
    # Replicas share the writing of a replicated array; for small ones that only costs a compiled slice per shape.
    context.array.saving.min_slice_bytes_for_replica_parallel = _REPLICA_SLICE_BYTES
    storage_options = type(context.array.saving.storage_options)

    def finer_than_shards(_: Any, leaf: jax.Array) -> Any:
        shard = leaf.sharding.shard_shape(leaf.shape)
        chunk_bytes, cut_layers = saving_chunk_bytes(leaf.shape, shard, leaf.dtype.itemsize)
        # Orbax 0.12.8 splits a shard axis down to single indices, then halves the dims that the mesh cuts, largest
        # first, until a chunk is small enough.
        return storage_options(chunk_byte_size=chunk_bytes, shard_axes=(0,) if cut_layers else ())

    context.array.saving.scoped_storage_options_creator = finer_than_shards
    return context
