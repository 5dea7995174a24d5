"""The meeting of processes before JAX starts (G3): who is missing, doubled or different is named, and nobody hangs."""

import concurrent.futures
import json
import random
import socket
import threading
import time

import pytest

from jaxpar.config import ConfigError
from jaxpar.runtime import arrival
from jaxpar.runtime.arrival import PROTOCOL, StartError, arrive, parse_address

FACTS = {"runtime.cpu_devices": 4}


@pytest.fixture
def coordinator():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"127.0.0.1:{port}"


def go(coordinator, process_id, num_processes, timeout_s=10.0, facts=FACTS, say=lambda _: None):
    """Seconds until this process was let go, or the error that it got."""
    started = time.monotonic()
    try:
        arrive(
            coordinator,
            process_id=process_id,
            num_processes=num_processes,
            facts=facts,
            timeout_s=timeout_s,
            say=say,
        )
    except StartError as error:
        return str(error)
    return time.monotonic() - started


def all_go(coordinator, calls):
    """What each call got; the calls, dicts of the arguments of ``go``, run side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(20) for future in [pool.submit(go, coordinator, **call) for call in calls]]


@pytest.mark.parametrize("num_processes", [2, 5])
def test_everyone_goes_when_everyone_is_there(coordinator, num_processes):
    order = random.Random(num_processes).sample(range(num_processes), num_processes)
    results = all_go(coordinator, [{"process_id": p, "num_processes": num_processes} for p in order])
    assert all(isinstance(result, float) for result in results), results
    # The port is free again for JAX, at once.
    socket.create_server(("127.0.0.1", int(coordinator.rpartition(":")[2]))).close()


def test_process_0_may_come_last_and_a_late_one_is_waited_for(coordinator):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        early = pool.submit(go, coordinator, 1, 3)
        time.sleep(0.5)
        first = pool.submit(go, coordinator, 0, 3)
        time.sleep(0.5)
        assert not early.done()
        assert not first.done()
        late = pool.submit(go, coordinator, 2, 3)
        assert early.result(20) >= 1.0
        assert isinstance(first.result(20), float)
        assert isinstance(late.result(20), float)


def test_missing_processes_are_named_on_every_process(coordinator):
    results = all_go(coordinator, [{"process_id": p, "num_processes": 5, "timeout_s": 0.8} for p in (0, 3)])
    for result in results:
        assert result.startswith(f"2 of 5 processes arrived at {coordinator} within 0.8 s")
        assert "missing process ids {1, 2, 4}" in result
        assert "firewall" in result


def test_a_process_that_waited_longer_than_process_0_says_the_same(coordinator):
    """Process 1 of 3 started first, so its own time is up first."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(go, coordinator, 0, 3, timeout_s=1.8)
        early = pool.submit(go, coordinator, 1, 3, timeout_s=1.1)
        assert "missing process ids {2}" in early.result(20)
        # It has left, and is missed now.
        assert "1 of 3 processes arrived" in first.result(20)
        assert "missing process ids {1, 2}" in first.result(20)


def test_without_process_0_the_others_say_where_they_looked(coordinator):
    [result] = all_go(coordinator, [{"process_id": 1, "num_processes": 2, "timeout_s": 0.5}])
    assert result.startswith(f"process 1 found no process 0 at {coordinator} within 0.5 s")
    assert "refused" in result


def test_a_host_that_does_not_exist_is_an_error_of_the_same_kind():
    [result] = all_go("no-such-host.invalid:1", [{"process_id": 1, "num_processes": 2, "timeout_s": 0.3}])
    assert result.startswith("process 1 found no process 0 at no-such-host.invalid:1")


def test_two_processes_with_the_same_number(coordinator):
    calls = [{"process_id": p, "num_processes": 4} for p in (0, 1, 1)]
    results = all_go(coordinator, calls)
    assert all("two processes came to" in result and "as process 1" in result for result in results), results


def test_a_second_process_0(coordinator):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(go, coordinator, 0, 2, timeout_s=0.8)
        time.sleep(0.3)
        second = go(coordinator, 0, 2)
        assert f"cannot listen on the port of runtime.coordinator = {coordinator}" in second
        assert "another process 0" in second
        assert "missing process ids {1}" in first.result(20)


def test_a_number_out_of_range(coordinator):
    results = all_go(coordinator, [{"process_id": 0, "num_processes": 2}, {"process_id": 2, "num_processes": 2}])
    assert all("as process 2; the others must be 1 to 1" in result for result in results), results


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_processes": 3}, "has runtime.num_processes = 3, but process 0 has 2"),
        ({"facts": {"runtime.cpu_devices": 2}}, "has runtime.cpu_devices = 2, but process 0 has 4"),
        ({"facts": {}}, "has runtime.cpu_devices = None, but process 0 has 4"),
    ],
    ids=["num_processes", "cpu_devices", "fact missing"],
)
def test_processes_that_were_started_differently(coordinator, other, said):
    calls = [{"process_id": 0, "num_processes": 2}, {"process_id": 1, "num_processes": 2} | other]
    results = all_go(coordinator, calls)
    assert all(result.startswith("process 1 (from ") and said in result for result in results), results


def hello(connection, process_id):
    message = {"protocol": PROTOCOL, "process_id": process_id, "facts": {"runtime.num_processes": 3, **FACTS}}
    connection.sendall(json.dumps(message).encode() + b"\n")


def connect(coordinator):
    host, port = parse_address(coordinator)
    for _ in range(200):
        try:
            return socket.create_connection((host, port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_a_process_that_dies_while_waiting_is_missing_and_may_come_back(coordinator):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(go, coordinator, 0, 3)
        with connect(coordinator) as dying:
            hello(dying, 1)
            dying.recv(10)
        other = pool.submit(go, coordinator, 2, 3)
        time.sleep(0.5)
        assert not first.done()
        again = pool.submit(go, coordinator, 1, 3)
        assert all(isinstance(future.result(20), float) for future in (first, other, again))


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\n", b"{}\n", b"[1]\n", b'"x"\n', bytes(range(256)) * 64, b""],
    ids=["http", "empty", "object", "list", "string", "long", "silent"],
)
def test_strangers_on_the_port_are_ignored(coordinator, noise):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(go, coordinator, 0, 2)
        with connect(coordinator) as stranger:
            stranger.sendall(noise)
            assert isinstance(go(coordinator, 1, 2), float)
            assert isinstance(first.result(20), float)


def test_another_program_on_the_coordinators_port(coordinator):
    host, port = parse_address(coordinator)
    with socket.create_server((host, port)) as other:
        other.settimeout(0.1)
        done = threading.Event()

        def answer():
            while not done.is_set():
                try:
                    connection, _ = other.accept()
                except TimeoutError:
                    continue
                connection.sendall(b"220 mail.example ESMTP\n")
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        result = go(coordinator, 1, 2, timeout_s=0.6)
        done.set()
        thread.join()
    assert "it listens, but did not answer as process 0 of a run does" in result


def test_waiting_is_said(coordinator, monkeypatch):
    monkeypatch.setattr(arrival, "_SAY_AFTER_S", 0.0)
    said = []
    assert "1 of 20 processes arrived" in go(coordinator, 0, 20, timeout_s=0.2, say=said.append)
    shown = ", ".join(str(process) for process in range(1, 17))
    assert said == [f"waiting at {coordinator} for process ids {{{shown}, ... 3 more}}"]


@pytest.mark.parametrize(
    ("text", "address"),
    [("node0:8476", ("node0", 8476)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:65535", ("::1", 65535))],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["node0", "node0:", ":80", "node0:0", "node0:65536", "node0:8 4", "node0:-1", "n:²", ""]
)
def test_what_is_not_an_address(text):
    with pytest.raises(ConfigError, match="is not host:port") as raised:
        parse_address(text)
    assert raised.value.problems[0].key == "runtime.coordinator"
