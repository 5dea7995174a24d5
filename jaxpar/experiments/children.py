"""Programs that are run in processes of their own, because devices are chosen before JAX starts, and XLA can abort."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jaxpar

BAD_CONFIG = 2
"""Exit code of a child whose config turns out not to be legal on the devices that are there."""

_FAKE_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_GRACE_S = 10
"""Between asking a process to end and making it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    timed_out: bool
    seconds: float
    error: str
    """The end of its standard error."""

    @property
    def reason(self) -> str:
        """Why it failed, for people: the last line that says something."""
        if self.timed_out:
            return f"timed out after {self.seconds:.0f} s"
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "no message")
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}: {said}"
        return said.removeprefix("error: ")


def environment(*, fake_devices: bool, fast_compile: bool = False) -> dict[str, str]:
    """The environment of a child: it runs this very package.

    Args:
        fake_devices: It chooses their number itself, so a number in XLA_FLAGS is taken out.
        fast_compile: Compile several times faster, for programs whose speed nobody measures.
    """
    child = dict(os.environ)
    package = str(Path(jaxpar.__file__).parents[1])
    child["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [child.get("PYTHONPATH")])])
    flags = child.get("XLA_FLAGS", "").split()
    if fake_devices:
        child["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in flags if not flag.startswith(_FAKE_DEVICES_FLAG)]
        if fast_compile:
            flags.append("--xla_backend_optimization_level=0")
    child["XLA_FLAGS"] = " ".join(flags)
    return child


def end_with_parent() -> None:
    """In a child: ends this process at once when the one that started it is gone, even by SIGKILL."""

    def wait() -> None:
        # Straight from the descriptor: a thread that holds a buffer's lock would abort the interpreter at its end.
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    threading.Thread(target=wait, name="jaxpar-parent", daemon=True).start()


def run_child(
    arguments: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, log: Path, cwd: Path | None = None
) -> Ended:
    """Runs ``python -m ARGUMENTS`` to its end.

    A child that takes too long, or is still there when this process is interrupted, is asked to end and then made to,
    with everything that it has started.

    Args:
        arguments: Module and its arguments.
        environment: Of the child.
        timeout_s: Seconds that it may take.
        log: File for all that it prints.
        cwd: Its working directory; None: this one.
    """
    started = time.monotonic()
    timed_out = False
    with log.open("w", encoding="utf-8", errors="replace") as stream:
        # A session of its own: Ctrl-C reaches this process alone, which then decides.
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
            process.stdin.close()
    error = log.read_text(encoding="utf-8", errors="replace")[-8000:]
    return Ended(code=process.returncode, timed_out=timed_out, seconds=time.monotonic() - started, error=error)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            return
