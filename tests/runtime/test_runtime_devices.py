"""What needs a backend: the check of the devices, the start-up all-reduce, device memory, and the vote."""

import math
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar.config import ConfigError
from jaxpar.config.schema import RuntimeConfig
from jaxpar.runtime import memory, self_test, start
from jaxpar.runtime.arrival import StartError
from jaxpar.runtime.interrupt import StopReason
from jaxpar.runtime.vote import Ballot, StopVote

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


@pytest.fixture(scope="module", autouse=True)
def processes():
    return start.start(RuntimeConfig(cpu_devices=8))


def make_mesh(*sizes):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * 6, devices=devices)


def test_a_backend_that_is_up_already_is_checked_and_used(processes):
    assert (processes.process_id, processes.num_processes) == (0, 1)
    assert (processes.local_devices, processes.global_devices, processes.platform) == (8, 8, "cpu")
    assert str(processes) == "1 process x 8 = 8 devices (cpu)"


def test_another_number_of_devices_than_jax_was_started_with_is_refused():
    with pytest.raises(StartError, match=r"runtime\.cpu_devices = 4, but JAX was already started .* 8 cpu device"):
        start.start(RuntimeConfig(cpu_devices=4))


def test_more_processes_than_jax_was_started_with_are_refused():
    runtime = RuntimeConfig(cpu_devices=8, num_processes=2, coordinator="localhost:1")
    with pytest.raises(StartError, match=r"runs with 1 processes, but runtime\.num_processes = 2"):
        start.start(runtime)


def test_a_process_id_without_its_processes_and_processes_without_a_place_to_meet():
    with pytest.raises(ConfigError) as raised:
        start.start(RuntimeConfig(cpu_devices=8, num_processes=2, process_id=2))
    assert [problem.key for problem in raised.value.problems] == ["runtime.process_id", "runtime.coordinator"]
    assert "0 to 1" in raised.value.problems[0].remedy


def test_a_cpu_that_nobody_asked_for_is_refused_where_there_is_a_gpu(tmp_path, monkeypatch):
    asked_for = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        monkeypatch.setattr(start, "_NVIDIA_DEVICE", tmp_path / "no")
        [note] = start.start(RuntimeConfig()).notes
        assert note == "JAX found no accelerator: training on 8 CPU device(s)"
        monkeypatch.setattr(start, "_NVIDIA_DEVICE", tmp_path)
        with pytest.raises(StartError, match=r"NVIDIA GPU, but JAX finds only the CPU: .*jaxpar\[cuda12\]"):
            start.start(RuntimeConfig())
    finally:
        jax.config.update("jax_platforms", asked_for)
    start.start(RuntimeConfig(cpu_devices=8))


def test_a_failed_process_of_several_goes_at_once_and_a_process_alone_returns(monkeypatch):
    class Gone(BaseException):
        pass

    def leave(code):
        raise Gone(code)

    monkeypatch.setattr(start.os, "_exit", leave)
    start.stop(success=False, exit_code=9)
    start.stop(success=True)
    told = {}
    monkeypatch.setattr(start, "_leaving", threading.Event())

    class Client:
        def key_value_set(self, key, value, *, allow_overwrite):
            told[key] = value

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(start.distributed.global_state, "client", Client())
    with pytest.raises(Gone) as gone:
        start.stop(success=False, exit_code=9)
    assert gone.value.args == (9,)
    assert list(told.values()) == ["0"], "the other processes were not told"


@pytest.mark.parametrize(
    ("environment", "fraction", "note"),
    [
        ({}, "0.8", "JAX reserves 80% of each GPU's memory (runtime.memory_fraction)"),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, ".5", "XLA_CLIENT_MEM_FRACTION=.5 in the environment is used instead"),
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"},
            None,
            "XLA_PYTHON_CLIENT_MEM_FRACTION=.5 in the environment is used",
        ),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None, "JAX takes GPU memory as it is needed"),
    ],
    ids=["config", "environment", "deprecated name", "no preallocation"],
)
def test_gpu_memory_is_set_unless_the_environment_says_so(monkeypatch, environment, fraction, note):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start.os, "environ", dict(start.os.environ))
    [said] = start._set_gpu_memory(0.8)
    assert note in said
    assert start.os.environ.get("XLA_CLIENT_MEM_FRACTION") == fraction


def test_two_names_for_the_memory_fraction_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".5")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".6")
    with pytest.raises(StartError, match="remove the latter"):
        start._set_gpu_memory(0.8)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (1, 8, 1, 1, 1, 1), (1, 2, 2, 1, 1, 2)])
def test_the_all_reduce_of_a_healthy_mesh_passes(sizes):
    assert self_test.self_test(make_mesh(*sizes)) > 0


@pytest.mark.parametrize("silent", [0, 5])
def test_a_device_that_takes_no_part_is_found(monkeypatch, silent):
    """Its number is missing from the sums of its groups."""
    mesh, psum = make_mesh(1, 2, 2, 1, 1, 2), jax.lax.psum

    def without_one(number, axes):
        return psum(jax.numpy.where(number == silent + 1, 0, number), axes)

    monkeypatch.setattr(jax.lax, "psum", without_one)
    with pytest.raises(RuntimeError, match=rf"over all 8 devices is wrong: .* has {36 - silent - 1} instead of 36"):
        self_test.self_test(mesh)


def test_a_group_along_one_axis_that_is_wrong_is_named(monkeypatch):
    mesh, psum = make_mesh(1, 2, 2, 1, 1, 2), jax.lax.psum
    monkeypatch.setattr(jax.lax, "psum", lambda number, axes: psum(number, axes) + (axes == ("fsdp",)))
    with pytest.raises(RuntimeError, match=r"over the fsdp axis \(2 devices\) is wrong") as raised:
        self_test.self_test(mesh)
    assert "has 5 instead of 4" in str(raised.value)
    assert "NCCL_SOCKET_IFNAME" in str(raised.value)


def test_an_all_reduce_that_never_ends_ends_the_process(monkeypatch, capfd):
    released, codes = threading.Event(), []
    monkeypatch.setattr(self_test.os, "_exit", lambda code: (codes.append(code), released.set()))
    monkeypatch.setattr(self_test, "_all_reduce", lambda mesh, axes: released.wait(20))
    monkeypatch.setattr(self_test, "_check_sum", lambda *_: None)
    self_test.self_test(make_mesh(1, 8, 1, 1, 1, 1), timeout_s=0.1)
    assert codes == [1]
    assert "an all-reduce over all 8 devices did not end within 0.1 s" in capfd.readouterr().err


def test_memory_is_none_where_it_is_not_reported_and_per_device_where_it_is(monkeypatch):
    assert memory.device_memory() is None

    class Device:
        def __init__(self, number):
            self.id = number

        def memory_stats(self):
            return {"peak_bytes_in_use": 100 + self.id, "bytes_limit": 1000, "bytes_in_use": 1}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0), Device(3)])
    found = memory.device_memory()
    assert {number: (m.peak_bytes, m.limit_bytes) for number, m in found.items()} == {0: (100, 1000), 3: (103, 1000)}


def test_a_process_alone_decides_without_its_devices():
    vote = StopVote(make_mesh(1, 8, 1, 1, 1, 1))
    for ballot in (Ballot(StopReason.INTERRUPTED), Ballot(StopReason.NONE, save=True), Ballot(StopReason.NONE)):
        assert Ballot.of(vote.cast(ballot)) == ballot


def test_the_largest_reason_wins():
    """The count itself, with a ballot from each device."""
    vote = StopVote(make_mesh(1, 2, 2, 1, 1, 2))
    ballots = np.zeros(8, np.int32)
    cast = Ballot(StopReason.INTERRUPTED, save=True), Ballot(StopReason.PREEMPTED), Ballot(StopReason.NONE, save=True)
    ballots[[2, 5, 6]] = [int(ballot) for ballot in cast]
    result = vote._count(jax.device_put(ballots, vote._ballots))
    assert [Ballot.of(shard.data) for shard in result.addressable_shards] == [Ballot(StopReason.PREEMPTED)] * 8
