"""Which step directories of a checkpoint directory are whole: the commit mark and what is done with the rest.

Orbax writes a step under a temporary name and renames it when it is complete, yet it takes an empty directory, or one
whose data files are cut short (a node that lost power, a full disk, a bad copy), for a checkpoint. So the process that
commits a step also writes ``jaxpar_files.json``: every file of the step with its size. A step counts as complete only
when that list is there and every file on it has its size. Contents are not looked at here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

COMMIT_MARK = "jaxpar_files.json"
"""File list of a step directory, written last."""

_STEP = re.compile(r"0|[1-9][0-9]*")
_REMNANT = re.compile(r"(0|[1-9][0-9]*)\.(orbax-checkpoint-tmp.*|removing)")


def write_commit_mark(step_directory: Path) -> None:
    """Declares the step complete as it lies there: lists every file with its size, atomically."""
    files = {
        path.relative_to(step_directory).as_posix(): path.stat().st_size
        for path in sorted(step_directory.rglob("*"))
        if path.is_file()
    }
    unfinished = step_directory / f"{COMMIT_MARK}.writing"
    with unfinished.open("w") as file:
        json.dump({"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(step_directory / COMMIT_MARK)


def fault(step_directory: Path) -> str | None:
    """Why the step directory is not a complete checkpoint, or None if it is one."""
    mark = step_directory / COMMIT_MARK
    if not mark.exists():
        if not any(step_directory.iterdir()):
            return "the directory is empty"
        return f"its save was not completed (no {COMMIT_MARK})"
    try:
        files = json.loads(mark.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return f"{COMMIT_MARK} is damaged"
    for name, size in files.items():
        try:
            found = (step_directory / name).stat().st_size
        except OSError:
            return f"file {name} is missing"
        if found != size:
            return f"file {name} has {found} bytes, {size} were written"
    return None


def scan(directory: Path) -> tuple[list[int], list[tuple[int, str]]]:
    """(complete steps, ascending; (step, why) of everything else that looks like a step) of a checkpoint directory."""
    complete, skipped = [], []
    for entry in directory.iterdir() if directory.is_dir() else ():
        if not entry.is_dir():
            continue
        if _STEP.fullmatch(entry.name):
            why = fault(entry)
            if why is None:
                complete.append(int(entry.name))
            else:
                skipped.append((int(entry.name), why))
        elif remnant := _REMNANT.fullmatch(entry.name):
            what = "its removal" if remnant[2] == "removing" else "its save"
            skipped.append((int(remnant[1]), f"{what} was interrupted ({entry.name})"))
    return sorted(complete), sorted(skipped)


def remove_remnants(directory: Path) -> None:
    """Removes what interrupted saves and removals left behind. Only for the one process that writes here."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.is_dir() and _REMNANT.fullmatch(entry.name):
            shutil.rmtree(entry)


def remove_old(directory: Path, *, keep: int, saved: int) -> None:
    """Removes complete steps beyond the ``keep`` newest and damaged steps older than those; never the one just saved.

    A damaged step does not count as one that is kept.
    """
    complete, _ = scan(directory)
    oldest_kept = complete[-keep:][0]
    for entry in list(directory.iterdir()):
        if (
            entry.is_dir()
            and _STEP.fullmatch(entry.name)
            and int(entry.name) < oldest_kept
            and int(entry.name) != saved
        ):
            removing = entry.with_name(
                f"{entry.name}.removing"
            )  # renamed first: never half a checkpoint under its name
            entry.rename(removing)
            shutil.rmtree(removing)
