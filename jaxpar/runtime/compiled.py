"""Where compiled programs are kept, so that a restart does not compile again; JAX's persistent compilation cache."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax

AUTO, OFF = "auto", "off"
"""Values of ``runtime.compilation_cache`` besides a directory."""

MAX_BYTES = 4 * 2**30
"""Bound on the directory of "auto"; beyond it, what was not used for longest goes."""

MIN_COMPILE_S = 0.1
"""Programs that compile faster are not kept."""


def keep_compiled_programs(setting: str, *, run_dir: str | None, num_processes: int, on_cpu: bool) -> list[str]:
    """Points JAX's compilation cache at a directory; call it before anything is compiled.

    Args:
        setting: ``runtime.compilation_cache``: "auto", "off" or a directory.
        run_dir: directory of the run, or None where there is none.
        num_processes: processes of the run. All of them must find the same entries, because on GPUs those that
            compile wait for each other's autotuning; so several processes keep them in the run's directory, which all
            of them see, and not under the home directory, which may be another on each machine.
        on_cpu: programs for the CPU hold machine code of this kind of CPU, and stay apart from those of others.

    Returns:
        What the user should be told.
    """
    if setting == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return []
    if setting != AUTO:
        _use(Path(setting).absolute(), max_bytes=-1)
        return []
    if given := jax.config.jax_compilation_cache_dir:
        return [f"compiled programs are kept in {given}, which JAX was told (JAX_COMPILATION_CACHE_DIR)"]
    if num_processes > 1 and run_dir is None:
        return []
    directory = Path(run_dir).absolute() if num_processes > 1 else user_cache_directory()
    directory /= "compiled"
    if on_cpu:
        directory /= f"cpu-{_cpu_kind()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        return [f"{directory} cannot be written: compiled programs are not kept (runtime.compilation_cache)"]
    _use(directory, max_bytes=MAX_BYTES)
    return [f"compiled programs are kept in {directory} (runtime.compilation_cache; at most {MAX_BYTES >> 30} GiB)"]


def user_cache_directory() -> Path:
    """Directory for what can be made again, by the XDG convention."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "jaxpar"


def _use(directory: Path, *, max_bytes: int) -> None:
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        # JAX then also locks the directory while it reads or writes an entry, so that several runs can share it.
        jax.config.update("jax_compilation_cache_max_size", max_bytes)
    if max_bytes >= 0:
        _remove_half_written(directory)


def _remove_half_written(directory: Path) -> None:
    """Removes entries of processes that were killed while they wrote them: JAX would read them in vain for ever.

    An entry is complete when its time of use has been written beside it (JAX 0.12.0.1).
    """
    with contextlib.suppress(OSError, TimeoutError), filelock.FileLock(directory / ".lockfile", timeout=10):
        for entry in directory.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                entry.unlink()


def _cpu_kind() -> str:
    """Short name of this machine's CPU and what it can do."""
    what = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        what += sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]


@dataclasses.dataclass
class CacheUse:
    """What the compilation cache did while ``count_cache_use`` was active."""

    found: int = 0
    """Taken from the compilation cache."""
    asked_for: int = 0
    """Programs that were to be had while the cache was in use."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing had to be compiled."""
        return 0 < self.found == self.asked_for


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheUse]:
    """Counts which programs come out of the compilation cache; complete when the block has ended."""
    use = CacheUse()

    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            use.found += 1
        elif event == "/jax/compilation_cache/compile_requests_use_cache":
            use.asked_for += 1

    jax.monitoring.register_event_listener(listen)
    try:
        yield use
    finally:
        jax.monitoring.unregister_event_listener(listen)
