"""What a person sees of a run: on a terminal, in a pipe, and on a terminal that goes away."""

import io
import os
import pty
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.events import NullProgress, RunLog, StepReport, open_progress
from jaxpar.events.progress import PlainProgress, RemainingTime, format_duration


def report(step, **others):
    numbers = {"loss": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_s": 12345.6, "step_s": 2.0, "data_wait_s": 0.1}
    return StepReport(step=step, **(numbers | others))


def plain_lines(steps, *, log_every, first_step=1, last_step=100, **others):
    stream = io.StringIO()
    with open_progress(
        title="x", first_step=first_step, last_step=last_step, log_every=log_every, stream=stream
    ) as progress:
        for step in steps:
            progress.step(report(step, **others))
    return stream.getvalue().splitlines()


def test_a_plain_line_has_everything():
    [line, _] = plain_lines([1, 2], log_every=1)
    assert line == (
        "step 1/100  loss 2.5000  grad norm 1.25  lr 3.00e-04  12,346 tokens/s  MFU n/a  data wait 5.0%  ETA -"
    )


def test_what_the_device_reports_is_shown():
    memory = {"memory_peak_bytes": 3 * 2**30, "memory_limit_bytes": 80 * 2**30}
    [line] = plain_lines([100], log_every=1, tflops=412.0, mfu=0.417, **memory)
    assert "412 TFLOP/s  MFU 41.7%  data wait 5.0%  memory 3.0/80.0 GiB" in line


def test_a_slow_device_is_shown_in_gflops():
    [line] = plain_lines([100], log_every=1, tflops=0.00115)
    assert "  1.15 GFLOP/s  " in line


def test_lines_come_every_log_every_steps_and_at_both_ends():
    lines = plain_lines(range(41, 98), log_every=10, first_step=41, last_step=97)
    assert [int(re.match(r"step (\d+)/97 ", line)[1]) for line in lines] == [41, 50, 60, 70, 80, 90, 97]


def test_plain_output_has_no_control_characters_even_if_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with open_progress(title="x", first_step=1, last_step=2, log_every=1, stream=stream) as progress:
        progress.phase("compiling the training step")
        progress.step(report(1))
        progress.evaluation(1, 5.5452, 4096)
    assert stream.getvalue().replace("\n", "").isprintable()
    assert "compiling the training step\n" in stream.getvalue()
    assert "step 1/2  validation loss 5.5452 over 4,096 tokens\n" in stream.getvalue()


def test_other_processes_show_nothing():
    stream = io.StringIO()
    with open_progress(title="x", first_step=1, last_step=2, log_every=1, process_id=1, stream=stream) as progress:
        assert isinstance(progress, NullProgress)
        progress.phase("compiling")
        progress.step(report(1))
        progress.evaluation(1, 5.5, 4096)
    assert stream.getvalue() == ""


def on_a_terminal(body):
    """Runs ``body(stream)`` with a stream that is a terminal, and returns what was written to it."""
    ours, theirs = pty.openpty()
    written = []

    def read():
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                return
            written.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as stream:
        body(stream)
    reader.join(timeout=10)
    os.close(ours)
    return b"".join(written).decode()


def test_a_terminal_gets_a_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")

    def body(stream):
        with open_progress(title="quickstart", first_step=1, last_step=40, log_every=10, stream=stream) as progress:
            progress.phase("compiling the training step")
            print("said by the program")
            progress.evaluation(0, 5.545, 4096)
            for step in range(1, 13):
                progress.step(report(step, mfu=0.417))

    shown = on_a_terminal(body)
    assert "\x1b[" in shown
    assert "said by the program" in shown
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.rpartition("quickstart")[2])
    assert "step 12/40" in last
    assert "ETA 0:00:56" in last
    assert "loss 2.5000   grad norm 1.25   lr 3.00e-04   validation loss 5.5450 (step 0)" in last
    assert "12,346 tokens/s   MFU 41.7%   data wait 5.0%   step 2 s" in last


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    def body(stream):
        progress = open_progress(title="x", first_step=1, last_step=2, log_every=1, stream=stream)
        assert isinstance(progress, PlainProgress)

    on_a_terminal(body)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w", buffering=1, closefd=False) as stream:
        progress = open_progress(title="x", first_step=1, last_step=9, log_every=1, stream=stream)
        log = RunLog(stream=stream)
        log.open(tmp_path / "log.txt")
        for step in range(1, 4):
            progress.step(report(step))
            log.say(f"step {step}")
        log.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writable)  # so that closing the stream has somewhere to flush to
    os.close(writable)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3


@given(step_s=st.floats(0.001, 100), compile_s=st.floats(0, 1000), steps=st.integers(2, 50), left=st.integers(0, 1000))
def test_steady_steps_give_the_exact_remaining_time(step_s, compile_s, steps, left):
    """The first step, which compiles, is not counted."""
    remaining = RemainingTime(steps + left)
    assert remaining.seconds() is None
    for step in range(1, steps + 1):
        remaining.update(report(step, step_s=step_s + (compile_s if step == 1 else 0)))
    assert remaining.seconds() == pytest.approx(left * step_s)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (90000, "1d 1:00:00")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_full_disk_does_not_silence_the_terminal(tmp_path, capsys):
    """Nor does it raise in the middle of telling about another error."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with RunLog() as log:
        log.open(tmp_path / "log.txt")
        log.error("bad")
        log.say("worse")
    warning = f"warning: {tmp_path}/log.txt is no longer written: No space left on device"
    assert capsys.readouterr().err.splitlines() == ["error: bad", warning, "worse"]


def test_the_log_keeps_what_was_said_before_it_had_a_file(tmp_path, capsys):
    log = RunLog()
    log.say("before")
    log.open(tmp_path / "log.txt")
    log.warn("odd")
    log.error("bad")
    log.close()
    with RunLog() as again:
        again.open(tmp_path / "log.txt")
        again.say("resumed")
    assert capsys.readouterr().err == "before\nwarning: odd\nerror: bad\nresumed\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "before",
        "warning: odd",
        "error: bad",
        "resumed",
    ]


def test_other_processes_only_tell_why_they_end(tmp_path, capsys):
    with RunLog(process_id=3) as log:
        log.open(tmp_path / "log.txt")
        log.say("hello")
        log.warn("odd")
        log.error("bad")
    assert capsys.readouterr().err == "error on process 3: bad\n"
    assert not (tmp_path / "log.txt").exists()


def test_the_log_follows_a_replaced_standard_error(monkeypatch):
    """A live display puts itself in the place of ``sys.stderr`` while it is up."""
    log, stand_in = RunLog(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    log.say("hello")
    assert stand_in.getvalue() == "hello\n"
