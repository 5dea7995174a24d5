"""Starts JAX for a run: what must be set before its backend exists, and the meeting of several processes."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import jax

# JAX 0.12 has no public way to use its coordination service, nor to ask whether its backend exists already, after which
# nothing here has an effect.
from jax._src import distributed
from jax._src.xla_bridge import backends_are_initialized
from jax.experimental import multihost_utils

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import RuntimeConfig
from jaxpar.runtime.arrival import Say, StartError, arrive, wait_for_service
from jaxpar.runtime.compiled import keep_compiled_programs

CPU_FLAGS = {
    # XLA:CPU aborts the process when the devices of a collective do not all arrive in time (20 s until it warns, 40 s
    # more until it aborts). Fake devices share few cores and may need longer; a real deadlock must still end.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 60,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    # The same across processes (gloo), where the outcome is an error.
    "--xla_cpu_collective_timeout_seconds": 600,
}
"""XLA flags of runs on fake CPU devices; all exist in jaxlib 0.11.2 and 0.12 (an unknown one aborts the process)."""

_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_NVIDIA_DEVICE = Path("/dev/nvidiactl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes and devices of a run, as JAX sees them."""

    process_id: int
    """Number of this process."""
    num_processes: int
    """How many there are."""
    local_devices: int
    """Number of devices of each process."""
    global_devices: int
    """Number of devices of all processes."""
    platform: str
    """Kind of backend: "cpu", "gpu"."""
    device_kind: str
    """The device's own name, e.g. "NVIDIA H100 80GB HBM3"."""
    notes: tuple[str, ...] = ()
    """What the user should know about how JAX was started."""

    def __str__(self) -> str:
        kind = self.device_kind if self.platform == self.device_kind else f"{self.platform}: {self.device_kind}"
        noun = "process" if self.num_processes == 1 else "processes"
        return f"{self.num_processes} {noun} x {self.local_devices} = {self.global_devices} devices ({kind})"


def start(runtime: RuntimeConfig, *, run_dir: str | None = None, say: Say = lambda _: None) -> Processes:
    """Starts JAX's backend as ``runtime`` asks; call it before any other JAX operation.

    In a process whose backend is already up (a notebook, a test) it only checks that the devices are those asked for.

    Args:
        runtime: the config section.
        run_dir: where several processes keep compiled programs, see ``keep_compiled_programs``.
        say: is told about waiting for other processes.

    Raises:
        ConfigError: the section contradicts itself.
        StartError: processes are missing, or the devices are not those that were asked for.
    """
    _check_ids(runtime)
    if backends_are_initialized():
        return _count(runtime, notes=[])
    notes = _set_cpu_devices(runtime.cpu_devices) if runtime.cpu_devices else _set_gpu_memory(runtime.memory_fraction)
    if runtime.num_processes > 1:
        _join(runtime, say)
    processes = _count(runtime, notes)
    cache_notes = keep_compiled_programs(
        runtime.compilation_cache,
        run_dir=run_dir,
        num_processes=runtime.num_processes,
        on_cpu=processes.platform == "cpu",
    )
    return dataclasses.replace(processes, notes=(*processes.notes, *cache_notes))


def meet(name: str) -> None:
    """Waits until every process is here; does nothing in a run of one process.

    Call it between compiling a program and running it for the first time. On the CPU, gloo connects each group of
    devices when a collective first uses it, and fails if a process of the group comes more than 30 s late, which
    compiling on a busy machine easily is.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def stop(*, success: bool, exit_code: int = 1) -> None:
    """Takes leave of the other processes; returns at once in a run of one process.

    After success all processes leave together, because JAX aborts those that are still working when process 0 goes.
    After a failure this process ends with ``exit_code`` and does not return: JAX's own exit would wait up to five
    minutes for peers that are stuck in a collective with us. It tells them first, and they end within seconds;
    process 0 leaves after them.
    """
    if not jax.distributed.is_initialized():
        return
    if not success:
        _tell_of_failure()
        _leave(exit_code)
    try:
        # JAX's own barrier would take 100 s to notice a process that has failed; a collective with it fails at once.
        meet("end of the run")
    except jax.errors.JaxRuntimeError as error:
        sys.stderr.write(f"error: another process of this run has failed: {error}\n")
        _leave(exit_code)
    atexit.unregister(_leave_unannounced)
    _leaving.set()
    _watcher.join()
    jax.distributed.shutdown()


def _check_ids(runtime: RuntimeConfig) -> None:
    problems = []
    if runtime.process_id >= runtime.num_processes:
        remedy = f"number the processes 0 to {runtime.num_processes - 1}, or raise runtime.num_processes"
        message = f"there are {runtime.num_processes} processes"
        problems.append(Problem(key="runtime.process_id", value=runtime.process_id, message=message, remedy=remedy))
    if runtime.num_processes > 1 and runtime.coordinator is None:
        message = f"{runtime.num_processes} processes need a place to meet"
        remedy = 'give host:port of process 0, such as "node0:8476"'
        problems.append(Problem(key="runtime.coordinator", value=None, message=message, remedy=remedy))
    if problems:
        raise ConfigError(problems)


def _set_cpu_devices(num_devices: int) -> list[str]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    given = os.environ.get("XLA_FLAGS", "")
    if given and not given.lstrip().startswith("-"):
        return [f"XLA_FLAGS names a file ({given}); the longer time limits for fake devices are not set"]
    names = {flag.partition("=")[0] for flag in given.split()}
    ours = [f"{name}={value}" for name, value in CPU_FLAGS.items() if name not in names]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *ours])
    kept = sorted(names & CPU_FLAGS.keys())
    return [f"XLA_FLAGS in the environment keeps its own {', '.join(kept)}"] if kept else []


def _set_gpu_memory(fraction: float) -> list[str]:
    """Sets how much of each GPU JAX reserves, unless the environment already says so."""
    given = [name for name in _MEMORY_VARIABLES if os.environ.get(name)]
    if len(given) > 1:
        raise StartError(f"{' and '.join(given)} are both set in the environment; remove the latter, it is deprecated")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return ["XLA_PYTHON_CLIENT_PREALLOCATE in the environment: JAX takes GPU memory as it is needed"]
    if given:
        value = os.environ[given[0]]
        return [f"{given[0]}={value} in the environment is used instead of runtime.memory_fraction = {fraction}"]
    os.environ[_MEMORY_VARIABLES[0]] = str(fraction)
    return [f"JAX reserves {fraction:.0%} of each GPU's memory (runtime.memory_fraction)"]


def _join(runtime: RuntimeConfig, say: Say) -> None:
    """Meets the other processes, then connects JAX's runtime with theirs."""
    facts = {"runtime.cpu_devices": runtime.cpu_devices, "the JAX version": jax.__version__}
    arrive(
        runtime.coordinator,
        process_id=runtime.process_id,
        num_processes=runtime.num_processes,
        facts=facts,
        timeout_s=runtime.start_timeout_s,
        say=say,
    )
    if runtime.process_id != 0:
        wait_for_service(runtime.coordinator)
    # JAX's preemption service would swallow SIGTERM in native code from here on; jaxpar.runtime.interrupt handles it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        runtime.coordinator,
        num_processes=runtime.num_processes,
        process_id=runtime.process_id,
        initialization_timeout=runtime.start_timeout_s,
        # Under SLURM, JAX would otherwise guess one device per process and leave the other GPUs idle.
        cluster_detection_method="deactivate",
    )
    _watcher.start()
    # Runs before JAX's own exit handler (last in, first out).
    atexit.register(_leave_unannounced, runtime.process_id, runtime.num_processes)


def _leave_unannounced(process_id: int, num_processes: int) -> NoReturn:
    """For an exit without ``stop``, as after an exception that nobody caught."""
    sys.stderr.write(f"error: process {process_id} of {num_processes} ends without the others\n")
    _tell_of_failure()
    _leave(1)


_FAILED = "jaxpar/failed"
"""Key in JAX's coordination service under which a process that fails leaves its number."""

_GRACE_S = 5
"""Seconds in which a process may notice by itself, and say more, before it ends because another has failed."""


def _tell_of_failure() -> None:
    """Tells the other processes that this one ends; process 0 returns when they have had the time to end too."""
    _leaving.set()
    # JaxRuntimeError: process 0, where the service runs, is gone already.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        distributed.global_state.client.key_value_set(_FAILED, str(jax.process_index()), allow_overwrite=True)
    if jax.process_index() == 0:
        # The coordination service goes with this process, and JAX aborts those that still use it.
        time.sleep(_GRACE_S + 2)


def failed_process() -> str | None:
    """Number of a process of this run that has told that it fails, or None."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has, or process 0 is gone
        return distributed.global_state.client.key_value_try_get(_FAILED)
    return None


def _end_when_another_fails() -> None:
    """Ends this process when another one has said that it fails, because its own collectives need not notice.

    On the CPU (gloo, JAX 0.12), of several devices in a process only those that talk to the lost process get an error;
    the others wait for them. JAX's heartbeat would end the process after 100 s, with SIGABRT.
    """
    client = distributed.global_state.client
    # Asks instead of waiting in native code: a thread that is there when Python ends aborts the process.
    while not _leaving.wait(1):
        try:
            failed = client.key_value_try_get(_FAILED)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the service is gone, and with it the run
        if not _leaving.wait(_GRACE_S):
            os.write(2, f"error: process {failed} of this run has failed; its own output says why\n".encode())
            os._exit(1)


_leaving = threading.Event()
_watcher = threading.Thread(target=_end_when_another_fails, name="jaxpar-failures", daemon=True)


def _leave(exit_code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    logging.shutdown()
    os._exit(exit_code)


def _count(runtime: RuntimeConfig, notes: list[str]) -> Processes:
    """Starts the backend, if it is not up yet, and checks what it found against what was asked for."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise StartError(f"JAX could not start its backend: {error}") from error
    device = devices[0]
    if device.platform == "cpu":
        _check_cpu(runtime.cpu_devices)
        if not runtime.cpu_devices:
            notes = [f"JAX found no accelerator: training on {jax.local_device_count()} CPU device(s)"]
    elif runtime.cpu_devices:
        raise StartError(_started_otherwise(runtime.cpu_devices))
    if runtime.num_processes > 1 and jax.process_count() != runtime.num_processes:
        raise StartError(
            f"JAX runs with {jax.process_count()} processes, but runtime.num_processes = {runtime.num_processes}; "
            "start each process anew, and call jaxpar before any other JAX code"
        )
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        raise StartError(f"the processes have different numbers of devices: {dict(sorted(counts.items()))}")
    return Processes(
        process_id=jax.process_index(),
        num_processes=jax.process_count(),
        local_devices=jax.local_device_count(),
        global_devices=len(devices),
        platform=device.platform,
        device_kind=device.device_kind,
        notes=tuple(notes),
    )


def _check_cpu(cpu_devices: int) -> None:
    """Refuses another number of CPU devices than asked for, and a CPU that nobody asked for where there is a GPU."""
    if cpu_devices and jax.local_device_count() != cpu_devices:
        raise StartError(_started_otherwise(cpu_devices))
    asked_for = cpu_devices or "cpu" in (jax.config.jax_platforms or "")
    if _NVIDIA_DEVICE.exists() and not asked_for:
        raise StartError(
            "this machine has an NVIDIA GPU, but JAX finds only the CPU: install the GPU libraries "
            "(pip install 'jaxpar[cuda12]'), or ask for the CPU with runtime.cpu_devices = 1"
        )


def _started_otherwise(cpu_devices: int) -> str:
    return (
        f"runtime.cpu_devices = {cpu_devices}, but JAX was already started in this process with "
        f"{jax.local_device_count()} {jax.default_backend()} device(s), which cannot be changed later; start a new "
        "process, or call jaxpar before any other JAX code"
    )
