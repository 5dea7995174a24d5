"""Ctrl-C and SIGTERM, and the lock on a run directory, in real processes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxpar.config import ConfigError
from jaxpar.runtime.interrupt import EndOnSigterm, Interrupts, StopReason
from jaxpar.runtime.lock import RunLock


@pytest.fixture(autouse=True)
def own_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_ctrl_c_asks_and_the_second_one_stops():
    said = []
    with Interrupts(say=said.append) as interrupts:
        assert interrupts.reason is StopReason.NONE
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        assert interrupts.reason is StopReason.INTERRUPTED
        assert said == ["finishing this step; press Ctrl-C again to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(said) == 1


IN_NATIVE_CODE = """
import hashlib, sys
from jaxpar.runtime.interrupt import EndOnSigterm, Interrupts
with EndOnSigterm(75, "gone"):
    if sys.argv[1] == "inside":
        with Interrupts() as interrupts:
            print("ready", flush=True)
            while not interrupts.preempted:
                pass
        sys.exit(3)
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in which no Python handler runs
"""


@pytest.mark.parametrize(
    ("where", "code", "said"), [("outside", 75, "gone\n"), ("inside", 3, "SIGTERM: finishing this step, then saving\n")]
)
def test_sigterm_ends_at_once_where_no_step_runs(where, code, said):
    process = subprocess.Popen(
        [sys.executable, "-c", IN_NATIVE_CODE, where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == code
        assert process.stderr.read() == said
    finally:
        process.kill()
        process.communicate()


def test_what_sigterm_did_before_comes_back():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with EndOnSigterm(75, "gone"):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.set_wakeup_fd(-1) == -1
    signal.raise_signal(signal.SIGTERM)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(EndOnSigterm(75, "gone").__enter__()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert len(ended) == 1


def test_sigterm_asks_once_and_counts_more_than_ctrl_c():
    said = []
    with Interrupts(say=said.append) as interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert interrupts.preempted
        assert interrupts.reason is StopReason.PREEMPTED
    assert len(said) == 2


def test_handlers_come_back():
    def mine(number, frame):
        pass

    signal.signal(signal.SIGINT, mine)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not mine
    assert signal.getsignal(signal.SIGINT) is mine
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_stream_that_is_busy_does_not_lose_the_request():
    def busy(text):
        raise RuntimeError("reentrant call")

    with Interrupts(say=busy) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def body():
        with Interrupts() as interrupts:
            seen.append((signal.getsignal(signal.SIGINT), interrupts.reason))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(before, StopReason.NONE)]


HOLDER = """
import sys, time
from jaxpar.runtime.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_told_who_has_the_directory_until_that_one_is_gone(tmp_path, holder):
    with pytest.raises(ConfigError) as raised, RunLock(tmp_path):
        pass
    [problem] = raised.value.problems
    assert (problem.key, problem.value) == ("run.dir", str(tmp_path))
    assert f"process {holder.pid} on {os.uname().nodename} since 2" in problem.message
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_can_be_taken_again_after_it_was_left(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
            pass


def test_a_holder_that_has_not_written_its_name_yet(tmp_path):
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="a process that is just starting"), RunLock(tmp_path):
        pass
    os.close(descriptor)


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said = []
    with RunLock(tmp_path, warn=said.append):
        assert said == [
            f"{tmp_path} cannot be locked (No locks available): nothing keeps a second run out of it",
        ]
