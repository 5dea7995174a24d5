"""Several real processes (G2, G3, G5, G7): they start, agree, and end together, or all fail fast with a reason."""

import os
import socket
import subprocess
import sys
import time

import pytest

RUN = """
import os, sys, time
import jax
from jaxpar.config.schema import RuntimeConfig
from jaxpar.runtime.interrupt import StopReason
from jaxpar.runtime.self_test import self_test
from jaxpar.runtime.start import meet, start, stop
from jaxpar.runtime.vote import Ballot, StopVote

process_id, coordinator, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
processes = start(
    RuntimeConfig(cpu_devices=2, num_processes=2, process_id=process_id, coordinator=coordinator, start_timeout_s=30)
)
explicit = (jax.sharding.AxisType.Explicit,) * 2
mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=explicit, devices=jax.devices())
self_test(mesh)
print(processes)
# Under SLURM, JAX left to itself gives each process the one GPU of its number.
print("visible:", jax.config.values["jax_cuda_visible_devices"])
vote = StopVote(mesh)
reasons = [StopReason.NONE, StopReason.PREEMPTED if process_id else StopReason.INTERRUPTED, StopReason.NONE]
print("votes:", [Ballot.of(vote.cast(Ballot(reason))).reason.name for reason in reasons])
print("saves:", [Ballot.of(vote.cast(Ballot(StopReason.NONE, save=process_id == i))).save for i in range(3)])
meet("here")
if process_id == 1 and mode == "late":
    time.sleep(1.5)
if process_id == 1 and mode == "fail":
    time.sleep(0.5)
    raise ValueError("something broke")
stop(success=True)
print("left together")
"""

ALONE = """
import sys
from jaxpar.config.schema import RuntimeConfig
from jaxpar.runtime.start import start
start(RuntimeConfig(num_processes=2, process_id=int(sys.argv[1]), coordinator=sys.argv[2], start_timeout_s=1))
"""

FAKE_DEVICES = """
import os, sys, time
import jax, numpy as np
from jaxpar.config.schema import RuntimeConfig
from jaxpar.runtime.self_test import self_test
from jaxpar.runtime.start import start
processes = start(RuntimeConfig(cpu_devices=3, compilation_cache=sys.argv[1]))
self_test(jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()))
print(processes)
print(processes.notes)
print(os.environ["XLA_FLAGS"])
print(jax.config.jax_compilation_cache_dir)
"""


def launch(program, *arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes, limit_s=60):
    """(exit code, stdout, stderr) of each; none is left running."""
    deadline = time.monotonic() + limit_s
    try:
        ended = [(process, process.communicate(timeout=max(1, deadline - time.monotonic()))) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in ended]


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def coordinator():
    return free_address()


@pytest.fixture
def other_coordinator(coordinator):
    while (address := free_address()) == coordinator:
        pass
    return address


def slurm(process_id):
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process_id),
        "SLURM_LOCALID": str(process_id),
    }


def test_two_processes_start_agree_and_leave_together(coordinator):
    """Process 0 is done first, and must not end the other by going; nor does SLURM take devices away."""
    ended = finish([launch(RUN, p, coordinator, "late", **slurm(p)) for p in (0, 1)])
    for code, out, err in ended:
        assert code == 0, err
        assert "2 processes x 2 = 4 devices (cpu)\n" in out
        assert "visible: all\n" in out
        assert "votes: ['NONE', 'PREEMPTED', 'NONE']\n" in out
        assert "saves: [True, True, False]\n" in out
        assert out.endswith("left together\n")


def test_a_process_that_fails_takes_the_others_with_it_at_once(coordinator):
    """Process 1 raises and nobody calls stop(). JAX's exit handlers would keep both here for minutes."""
    ended = finish([launch(RUN, p, coordinator, "fail") for p in (0, 1)], limit_s=45)
    assert [code for code, _, _ in ended] == [1, 1], ended
    assert "error: another process of this run has failed" in ended[0][2]
    assert "ValueError: something broke" in ended[1][2]
    assert "error: process 1 of 2 ends without the others" in ended[1][2]
    assert not any("left together" in out for _, out, _ in ended)


def test_a_process_alone_says_who_is_missing_and_is_not_aborted(coordinator, other_coordinator):
    """JAX by itself ends with SIGABRT here and blames another task."""
    ended = finish([launch(ALONE, 0, coordinator), launch(ALONE, 1, other_coordinator)])
    assert [code for code, _, _ in ended] == [1, 1], ended
    arrived = f"StartError: 1 of 2 processes arrived at {coordinator} within 1 s; missing process ids {{1}}"
    assert arrived in ended[0][2]
    assert f"StartError: process 1 found no process 0 at {other_coordinator} within 1 s" in ended[1][2]


def test_fake_devices_wait_longer_than_xla_does_unless_the_user_says_otherwise(tmp_path):
    theirs = "--xla_cpu_collective_call_terminate_timeout_seconds=45 --xla_force_host_platform_device_count=5"
    [(code, out, err)] = finish([launch(FAKE_DEVICES, tmp_path / "cache", XLA_FLAGS=theirs)])
    assert code == 0, err
    counts, notes, flags, cache = out.splitlines()
    assert counts == "1 process x 3 = 3 devices (cpu)"
    assert "keeps its own --xla_cpu_collective_call_terminate_timeout_seconds" in notes
    assert flags.startswith(theirs)
    assert flags.count("terminate_timeout") == 1
    assert "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60 --xla_cpu_collective_timeout_seconds=600" in flags
    assert cache == str(tmp_path / "cache")
