"""``jaxpar verify-checkpoint``: is every byte what was saved?"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxpar.checkpoint import commit
from jaxpar.checkpoint.copying import give_back_freed_memory
from jaxpar.checkpoint.errors import NoCheckpointError
from jaxpar.checkpoint.places import locate
from jaxpar.checkpoint.verify import Verdict, verify_step
from jaxpar.cli.sizes import readable_bytes

MAX_FAULTS = 20
"""Faults of a step that are printed; a step with one broken file can have a fault per array."""

_MAX_LINE = 240


def verify(path: str, step: int | None, as_json: bool) -> bool:
    """Check every step, or one; print what was found; return whether all is whole."""
    directory, steps = _steps(path, step)
    give_back_freed_memory()
    verdicts = []
    with bytes_progress() as progress:
        for number in steps:
            step_directory = directory / str(number)
            with contextlib.suppress(FileNotFoundError):  # a run that goes on removes old steps
                size = sum(f.stat().st_size for f in step_directory.rglob("*") if f.is_file())
                task = progress.add_task(f"step {number}", total=size)
                verdict = verify_step(step_directory, lambda n, task=task: progress.advance(task, n))
                progress.update(task, completed=size)
                if step_directory.exists():
                    verdicts.append(verdict)
    unfinished = [(number, why) for number, why in commit.scan(directory)[1] if not (directory / str(number)).exists()]
    if as_json:
        print(json.dumps({"directory": str(directory), "steps": [_as_json(verdict) for verdict in verdicts]}))
    else:
        _print(verdicts, unfinished)
    return not any(verdict.faults for verdict in verdicts)


def bytes_progress() -> Progress:
    """A bar of bytes on standard error; shows nothing where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def _steps(path: str, step: int | None) -> tuple[Path, list[int]]:
    """The checkpoints directory and the steps to check, complete or not.

    Raises:
        NoCheckpointError: There is none, or not that one.
    """
    directory, named = locate(path)
    wanted = named if step is None else step
    if named is not None and wanted != named:
        raise NoCheckpointError(f"{path} is step {named}, but step {step} is asked for")
    entries = directory.iterdir() if directory.is_dir() else ()
    there = sorted(int(entry.name) for entry in entries if entry.is_dir() and entry.name.isdecimal())
    if not there:
        raise NoCheckpointError(f"{directory} {'has no checkpoint' if directory.is_dir() else 'does not exist'}")
    if wanted is not None and wanted not in there:
        raise NoCheckpointError(f"{directory} has no step {wanted}; steps: {', '.join(map(str, there))}")
    return directory, there if wanted is None else [wanted]


def _print(verdicts: list[Verdict], unfinished: list[tuple[int, str]]) -> None:
    for verdict in verdicts:
        what = f"{verdict.num_leaves} arrays, {readable_bytes(verdict.num_bytes)}"
        state = f"DAMAGED: {len(verdict.faults)} faults" if verdict.faults else f"whole: {what}"
        print(f"step {verdict.step_directory.name}: {state}")
        for fault in verdict.faults[:MAX_FAULTS]:
            print(f"  {_one_line(fault)}")
        if len(verdict.faults) > MAX_FAULTS:
            print(f"  and {len(verdict.faults) - MAX_FAULTS} more; --json lists all")
        for note in verdict.notes:
            print(f"  {note}")
    for step, why in unfinished:
        print(f"step {step}: {why}; it is ignored by runs, and removed when one starts here")


def _one_line(fault: str) -> str:
    """What is wrong, without the long words of the storage library that may follow."""
    line = " ".join(fault.split())
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "step": int(verdict.step_directory.name),
        "whole": not verdict.faults,
        "faults": list(verdict.faults),
        "notes": list(verdict.notes),
        "arrays": verdict.num_leaves,
        "bytes": verdict.num_bytes,
    }
