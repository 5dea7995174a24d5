"""What a run says in words: to standard error and to RUN/log.txt."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Self, TextIO


class Terminal:
    """Writes lines to a stream that may go away (a closed ssh session, ``| head``) without ending the run."""

    def __init__(self, stream: TextIO | None = None):
        """``stream`` None means whatever ``sys.stderr`` is at each line, so that a live display can stand in for it."""
        self._stream = stream
        self._gone = False

    def line(self, text: str) -> None:
        stream = self._stream or sys.stderr
        if self._gone or stream is None:
            return
        try:
            stream.write(text + "\n")
            stream.flush()
        except OSError:
            self._gone = True


class RunLog:
    """Messages of a run. Process 0 speaks for all; an error is told by every process, with its number."""

    def __init__(self, *, process_id: int = 0, stream: TextIO | None = None):
        self._process_id = process_id
        self._terminal = Terminal(stream)
        self._file: TextIO | None = None
        self._early: list[str] = []
        self._lost = False

    def open(self, path: Path) -> None:
        """Also writes to ``path`` from now on, beginning with what was said before the run directory existed."""
        if self._process_id != 0:
            return
        self._file = path.open("a", encoding="utf-8")
        for line in self._early:
            self._file.write(line)
        self._early.clear()
        self._file.flush()

    def say(self, text: str) -> None:
        """Tells the user something, once for all processes."""
        if self._process_id == 0:
            self._tell(text)

    def warn(self, text: str) -> None:
        """Tells the user about something that is probably not meant, once for all processes."""
        self.say(f"warning: {text}")

    def error(self, text: str) -> None:
        """Tells why this process ends."""
        self._tell(f"error: {text}" if self._process_id == 0 else f"error on process {self._process_id}: {text}")

    def _tell(self, text: str) -> None:
        self._terminal.line(text)
        if self._process_id != 0:
            return
        stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        if self._file is None:
            if not self._lost:
                self._early.append(stamped)
            return
        try:
            self._file.write(stamped)
            self._file.flush()
        except OSError as error:  # a full disk; what is told may be just that, and must not be lost over it
            self._lost = True
            self._terminal.line(f"warning: {self._file.name} is no longer written: {error.strerror or error}")
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is still in its buffer
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
