"""Which step directories of a checkpoint directory are whole: the commit mark, and what is done with the rest.

Orbax writes a step under a temporary name and renames it when it is complete, yet it takes an empty directory, or one
whose data files are cut short (a node that lost power, a full disk, a bad copy), for a checkpoint. So the process that
commits a step also writes ``jaxpar_files.json``: every file of the step with its size and, where that is cheap, its
CRC-32; and a checksum of every array. A step counts as complete only when that list is there and every file on it has
its size. What the files hold is looked at when a step is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import durable
from jaxpar.config.checkpoints import METADATA_FILE

COMMIT_MARK = "jaxpar_files.json"
"""File list of a step directory, written last."""

STEP_FILES = (COMMIT_MARK, METADATA_FILE)
"""A directory named by a number that has one of these is a step."""

CRC_BYTES = 2**30
"""Files of a step that are read again for their CRC, smallest first, until this many bytes. Data files beyond are
covered by the checksums of the arrays in them."""

_SYNC_BYTES = 2**20

_STEP = re.compile(r"0|[1-9][0-9]*")
_REMNANT = re.compile(r"(0|[1-9][0-9]*)\.(orbax-checkpoint-tmp.*|removing)")
_ASIDE = re.compile(r"(0|[1-9][0-9]*)\.(damaged|incomplete)(-[0-9]+)?")
_COPY = re.compile(r"(0|[1-9][0-9]*)\.unfinished")
_DATA_FILE = re.compile(r".*/d/[^/]+")


@dataclasses.dataclass(frozen=True)
class Mark:
    """What the commit mark says about a step."""

    files: Mapping[str, int]
    """Bytes of every file, by path inside the step directory."""
    crcs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """CRC-32 of files, 8 hexadecimal digits. Steps of format version 1 have none."""
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Checksum of every array by leaf name, as ``checksum.to_text`` writes it. Steps of format version 1 have none."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics at the step, such as ``eval_loss``; decide which checkpoints are the best."""
    step: int | None = None
    """Step that was saved here; a copy under another number shows. None in format version 1."""


def write_commit_mark(
    step_directory: Path, *, checksums: Mapping[str, str] | None = None, metrics: Mapping[str, float] | None = None
) -> None:
    """Declares the step complete as it lies there, atomically."""
    paths = sorted((p for p in step_directory.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p))
    files, crcs, read = {}, {}, 0
    for path in paths:
        name, size = path.relative_to(step_directory).as_posix(), path.stat().st_size
        if name.startswith(COMMIT_MARK):  # one that was being written when a process was killed
            continue
        files[name] = size
        read += size
        if read <= CRC_BYTES:
            crcs[name] = file_crc(path)
        if size <= _SYNC_BYTES:  # tensorstore syncs the data files that it writes; Orbax not its own
            durable.sync(path)
    mark = Mark(files, crcs, dict(checksums or {}), dict(metrics or {}), int(step_directory.name))
    content = dataclasses.asdict(mark)
    durable.replace(step_directory / COMMIT_MARK, json.dumps({**content, "crc": _crc_of(content)}))
    for directory in (step_directory, step_directory.parent):  # older steps may be removed after this
        durable.sync(directory)


def read_commit_mark(step_directory: Path) -> Mark | None:
    """The mark of a step directory; None if there is none or it is damaged."""
    try:
        content = json.loads((step_directory / COMMIT_MARK).read_text())
        crc = content.pop("crc", None)
        if crc is None and content.keys() != {"files"}:  # format version 1 had nothing else
            return None
        if crc is not None and crc != _crc_of(content):
            return None
        known = {field.name for field in dataclasses.fields(Mark)}
        return Mark(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_metadata(step_directory: Path) -> dict[str, Any]:
    """What the trainer saved with a step as JSON; empty where there is nothing readable."""
    try:
        return json.loads((step_directory / METADATA_FILE).read_text())["custom_metadata"] or {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def fault(step_directory: Path) -> str | None:
    """Why the step directory is not a complete checkpoint, or None if it is one. Reads nothing but the mark."""
    return next(step_faults(step_directory), None)


def step_faults(step_directory: Path) -> Iterator[str]:
    """Everything that ``fault`` gives the first of."""
    if not (step_directory / COMMIT_MARK).exists():
        empty = not any(step_directory.iterdir())
        yield "the directory is empty" if empty else f"its save was not completed (no {COMMIT_MARK})"
        return
    mark = read_commit_mark(step_directory)
    if mark is None:
        yield f"{COMMIT_MARK} is damaged"
        return
    if mark.step is not None and str(mark.step) != step_directory.name:
        yield f"it is a copy of step {mark.step}"
    yield from _size_faults(step_directory, mark)


def _size_faults(step_directory: Path, mark: Mark) -> Iterator[str]:
    for name, size in mark.files.items():
        try:
            found = (step_directory / name).stat().st_size
        except OSError:
            yield f"file {name} is missing"
            continue
        if found != size:
            yield f"file {name} has {found} bytes, {size} were written"


def content_faults(step_directory: Path, *, data: bool) -> Iterator[str]:
    """Files that do not hold what was written, by their CRC.

    Args:
        step_directory: A complete step.
        data: Whether data files are read too, or only the small ones that describe them.
    """
    mark = read_commit_mark(step_directory)
    for name, crc in mark.crcs.items() if mark else ():
        if _DATA_FILE.fullmatch(name) and not data:
            continue
        path = step_directory / name
        try:
            # What step_faults says is not said again.
            found = file_crc(path) if path.stat().st_size == mark.files[name] else crc
        except FileNotFoundError:
            continue
        except OSError as error:
            yield f"file {name} cannot be read: {error.strerror or error}"
            continue
        if found != crc:
            yield f"file {name} is damaged: CRC-32 {found}, {crc} was written"


def missing_leaves(step_directory: Path, listed: Collection[str]) -> list[str]:
    """A line for each leaf that was saved with a step and is not among those that its trees list now."""
    mark = read_commit_mark(step_directory)
    saved = mark.checksums if mark is not None else ()
    return [f"{name} is gone: the tree does not list it" for name in saved if name not in listed]


def file_crc(path: Path) -> str:
    """CRC-32 of a file, 8 hexadecimal digits; reads it in pieces."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(2**20):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def _crc_of(content: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def scan(directory: Path) -> tuple[list[int], list[tuple[int, str]]]:
    """(complete steps, ascending; (step, why) of everything else that looks like a step) of a checkpoint directory."""
    complete, skipped = [], []
    for entry in directory.iterdir() if directory.is_dir() else ():
        if not entry.is_dir():
            continue
        if _STEP.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):
                why = fault(entry)
                if why is None:
                    complete.append(int(entry.name))
                elif entry.exists():  # otherwise the run that writes here has just removed it
                    skipped.append((int(entry.name), why))
        elif remnant := _REMNANT.fullmatch(entry.name):
            what = "its removal" if remnant[2] == "removing" else "its save"
            skipped.append((int(remnant[1]), f"{what} was interrupted ({entry.name}), or is going on"))
    return sorted(complete), sorted(skipped)


def tidy(directory: Path) -> list[str]:
    """Clears the way for new saves; only for the one process that writes here.

    What interrupted saves and removals left is removed. A step that is not complete is set aside under another name:
    what it holds may be wanted, and a later save at its number must not meet it.

    Returns:
        What was done, a line each.
    """
    done = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not entry.is_dir():
            continue
        if _REMNANT.fullmatch(entry.name):
            try:
                shutil.rmtree(entry)
                done.append(f"removed {entry.name}")
            except OSError as error:  # it is in nobody's way
                done.append(f"{entry.name} could not be removed: {error}")
        elif _STEP.fullmatch(entry.name) and fault(entry) is not None:
            done.append(f"step {entry.name} is set aside as {set_aside(entry).name}")
    return done


def left_aside(directory: Path) -> list[str]:
    """What lies beside the steps and is none: interrupted copies, and steps that were set aside; a line each."""
    found = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not entry.is_dir():
            continue
        if copy := _COPY.fullmatch(entry.name):
            found.append(
                f"{entry.name}: a copy of step {copy[1]} that was interrupted; the same command goes on with it"
            )
        elif aside := _ASIDE.fullmatch(entry.name):
            found.append(f"{entry.name}: step {aside[1]} was {aside[2]} and set aside by a run that started here")
    return found


def unfinished_copies(directory: Path) -> list[int]:
    """Steps whose copy to this directory was interrupted."""
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(copy[1]) for copy in map(_COPY.fullmatch, names) if copy)


def damaged_steps(directory: Path) -> list[str]:
    """Names of what was a complete step and is one no more, set aside or not; saves that never ended do not count."""
    return sorted(
        entry.name
        for entry in (directory.iterdir() if directory.is_dir() else ())
        if entry.is_dir()
        and (
            (_STEP.fullmatch(entry.name) and (entry / COMMIT_MARK).exists() and fault(entry) is not None)
            or ((aside := _ASIDE.fullmatch(entry.name)) and aside[2] == "damaged")
        )
    )


def set_aside(step_directory: Path) -> Path:
    """Renames a step, so that it is no longer taken for a checkpoint; returns its new path.

    ``STEP.damaged`` was complete once, ``STEP.incomplete`` never.
    """
    what = "damaged" if (step_directory / COMMIT_MARK).exists() else "incomplete"
    number = 0
    while True:
        aside = step_directory.with_name(f"{step_directory.name}.{what}{f'-{number}' if number else ''}")
        if not aside.exists():
            return step_directory.rename(aside)
        number += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which complete steps a save leaves; the one just saved always stays."""

    latest: int | None = None
    """This many newest; None keeps all."""
    every: int | None = None
    """Also every step that this divides, for good."""
    best: int = 0
    """Also this many with the smallest ``metric``."""
    metric: str = "eval_loss"
    """Metric of ``best``; steps saved without it are not among the best."""

    def kept(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Steps that stay, of complete steps with their metrics."""
        if self.latest is None:
            return set(steps)
        ranked = sorted((metrics[self.metric], step) for step, metrics in steps.items() if self.metric in metrics)
        return {
            *sorted(steps)[-self.latest :],
            *(step for step in steps if self.every and step % self.every == 0),
            *(step for _, step in ranked[: self.best]),
        }


def remove_old(directory: Path, keep: Keep, *, saved: int) -> None:
    """Removes complete steps that are not kept, and damaged ones older than the newest that are; never ``saved``.

    A damaged step does not count as one that is kept. What an earlier removal left goes too.

    Raises:
        OSError: Something could not be removed; everything else was.
    """
    errors = []
    for entry in _not_kept(directory, keep, saved):
        removing = entry.with_name(f"{entry.name.partition('.')[0]}.removing")
        try:
            entry.rename(removing)  # first: never half a checkpoint under its name
            shutil.rmtree(removing)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _not_kept(directory: Path, keep: Keep, saved: int) -> Iterator[Path]:
    """Directories that ``remove_old`` removes."""
    complete, _ = scan(directory)
    marks = {step: read_commit_mark(directory / str(step)) for step in complete}
    kept = keep.kept({step: mark.metrics if mark else {} for step, mark in marks.items()}) | {saved}
    oldest_of_newest = complete[-keep.latest :][0] if keep.latest else 0
    for entry in list(directory.iterdir()):
        if not entry.is_dir():
            continue
        if _STEP.fullmatch(entry.name):
            step = int(entry.name)
            if step not in kept and (step < oldest_of_newest or step in marks):
                yield entry
        elif aside := _ASIDE.fullmatch(entry.name):
            if int(aside[1]) < oldest_of_newest:
                yield entry
        elif (remnant := _REMNANT.fullmatch(entry.name)) and remnant[2] == "removing":
            yield entry
