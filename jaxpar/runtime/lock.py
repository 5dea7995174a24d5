"""Keeps a second run out of a run directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jaxpar.config.errors import ConfigError, Problem

# A file system without locks (some network mounts) answers with one of these.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class RunLock:
    """An exclusive lock on a run directory, held from entering to leaving; the kernel drops it if the process dies.

    The file ``.lock`` stays behind: removing it would let two runs each lock a file of that name.
    """

    def __init__(self, directory: str | os.PathLike[str], *, warn: Callable[[str], None] = lambda _: None):
        """``directory`` exists; ``warn`` is told if its file system cannot lock."""
        self._path = Path(directory) / ".lock"
        self._warn = warn
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Raises ConfigError, naming the process that has it, if another run holds the lock."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise ConfigError([self._in_use(holder)]) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            self._warn(f"{self._path.parent} cannot be locked ({error.strerror}): nothing keeps a second run out of it")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _in_use(self, holder: str) -> Problem:
        return Problem(
            key="run.dir",
            value=str(self._path.parent),
            message=f"another run is using it: {holder}",
            remedy="wait for that run or stop it, or choose another run.dir",
        )


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has the lock, but has not written its name yet
        return "a process that is just starting"
