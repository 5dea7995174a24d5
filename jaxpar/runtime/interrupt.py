"""Ctrl-C and SIGTERM: finish the step, save, and leave; and how several processes agree on the step."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class StopReason(enum.IntEnum):
    """Why a run should end before its last step; the larger one wins where processes differ."""

    NONE = 0
    INTERRUPTED = 1
    """Ctrl-C (SIGINT)."""
    PREEMPTED = 2
    """SIGTERM: the scheduler wants the machine back."""


class Interrupts:
    """While entered, Ctrl-C and SIGTERM ask the training loop to stop after its step instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt wherever the program is. The handlers that were there before are put back
    on leaving. Signals can be handled in the main thread only; entered elsewhere, this does nothing.
    """

    def __init__(self, say: Callable[[str], None] | None = None):
        """``say`` shows the user what a signal did; standard error when None."""
        self._say = say or _write_to_stderr
        self._before: dict[int, object] = {}
        self.requested = False
        """Whether Ctrl-C was pressed."""
        self.preempted = False
        """Whether SIGTERM came."""

    @property
    def reason(self) -> StopReason:
        if self.preempted:
            return StopReason.PREEMPTED
        return StopReason.INTERRUPTED if self.requested else StopReason.NONE

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._preempt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was set by native code, and Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._tell("finishing this step; press Ctrl-C again to stop at once")

    def _preempt(self, _number: int, _frame: FrameType | None) -> None:
        if not self.preempted:
            self.preempted = True
            self._tell("SIGTERM: finishing this step, then saving")

    def _tell(self, text: str) -> None:
        # RuntimeError: the signal came while the main thread was writing to the same stream.
        with contextlib.suppress(RuntimeError, OSError):
            self._say(text)


class EndOnSigterm:
    """While entered, SIGTERM ends the process at once with an exit code of its own, wherever the program is.

    A run before its first step has nothing to save, and may be minutes inside the compiler, where no Python handler
    runs; so a thread waits for the signal. ``Interrupts``, entered inside, takes SIGTERM over. Signals can be handled
    in the main thread only; entered elsewhere, this does nothing.
    """

    def __init__(self, exit_code: int, message: str):
        """``message`` is written to standard error."""
        self._exit_code, self._message = exit_code, message
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.signal(signal.SIGTERM, self._handle)
        wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, args=(reader,), name="jaxpar-sigterm", daemon=True).start()
        self._stack.callback(os.close, writer)  # ends the thread
        self._stack.callback(signal.set_wakeup_fd, wakeup_before)
        self._stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL if before is None else before)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wait(self, reader: int) -> None:
        """Reads the numbers of signals as they arrive, in C, whatever the main thread does."""
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self._handle:
                self._end()
        os.close(reader)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            _write_to_stderr(self._message)
        os._exit(self._exit_code)


def _write_to_stderr(text: str) -> None:
    os.write(2, f"{text}\n".encode())
