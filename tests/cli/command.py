"""The ``jaxpar`` command, in this process and in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from jaxpar.cli.main import main

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
"""Longest wait for anything here: a loaded machine is slow, and only what hangs takes longer."""

NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


class Command:
    """Calls ``main`` in this process, whose fake devices and compiled programs it shares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["jaxpar", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = self._capsys.readouterr()
        return Result(leaving.value.code or 0, out, err)


def start(
    *arguments: str,
    cwd: Path,
    program: tuple[str, ...] = ("-m", "jaxpar"),
    environment: Mapping[str, str] = NOTHING_MORE,
) -> subprocess.Popen:
    """Starts ``python -m jaxpar`` (or ``program``) in ``cwd``; its output goes to pipes."""
    environment = {
        **os.environ,
        **environment,
        "PYTHONPATH": str(ROOT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Compiles several times faster; nothing here depends on how fast a step is.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> Result:
    """Waits for a process to end by itself."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(process.returncode, out, err)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen) -> Iterator[None]:
    """Leaves no process behind, whatever the test does."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Waits for something that ``process`` is to do; fails with its output if it ends or hangs instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"exit code {process.returncode}: {process.communicate()[1][-3000:]}")
        time.sleep(0.02)
