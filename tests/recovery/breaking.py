"""``python -m tests.recovery.breaking KIND STEP ARGUMENTS...``: the jaxpar command, whose disk breaks just before a
step is saved.
"""

import errno
import itertools
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxpar.checkpoint.arrays import StepArrays
from jaxpar.checkpoint.store import Store
from jaxpar.cli.main import main

_SMALL_FILE = 2**13


def fill_disk(_: Path) -> None:
    """No file can grow beyond 8 KiB, as when a disk is full but for a few blocks: metrics go on for a while."""
    _limit_files(_SMALL_FILE)


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def make_read_only(checkpoints: Path) -> None:
    """As a file system that was mounted anew after an error; permissions would not stop the superuser."""
    mkdir = os.mkdir

    def refuse(path, *args, **options):
        if str(path).startswith(str(checkpoints)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **options)

    os.mkdir = refuse


def put_a_file_there(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.touch()


BREAKS = {
    "full": fill_disk,
    "read-only": make_read_only,
    "a file": put_a_file_there,
}


def breaking_save(kind: str, step: int) -> Callable[..., None]:
    """``Store.save``, before which the disk breaks at ``step``."""
    save = Store.save

    def save_or_break(self: Store, number: int, *args, **options) -> None:
        self.wait()
        if number == step:
            BREAKS[kind](self.directory)
        save(self, number, *args, **options)

    return save_or_break


def breaking_check(step: int) -> Callable[[Store], None]:
    """``Store.check``, after which the disk is full, at ``step``, when no save is in progress."""
    check, calls = Store.check, itertools.count(1)

    def check_and_break(self: Store) -> None:
        if next(calls) == step:
            while self._saved is not None and not self._saved.done():
                time.sleep(0.01)
            check(self)
            _limit_files(0)

    return check_and_break


class _Refused:
    """A read that has failed, as tensorstore says it."""

    def result(self) -> None:
        raise ValueError(f"UNKNOWN: Error reading local file: {os.strerror(errno.EIO)}")


def refusing_read(step: int) -> Callable[..., object]:
    """``StepArrays.start_read``, to which the data of one step is unreadable."""
    start_read = StepArrays.start_read

    def read_or_refuse(self: StepArrays, *args, **options) -> object:
        return _Refused() if self.directory.name == str(step) else start_read(self, *args, **options)

    return read_or_refuse


if __name__ == "__main__":
    kind, step = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    if kind == "unreadable":
        StepArrays.start_read = refusing_read(step)
    elif kind == "full for metrics":
        Store.check = breaking_check(step)
    else:
        Store.save = breaking_save(kind, step)
    main()
