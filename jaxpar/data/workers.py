"""Jobs over several processes that end with the one that started them, however it ends."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Report = Callable[[Any], None]
"""Sends something to the process that waits for the results."""

# Not fork: the parent may have threads, and a forked child would hold copies of their locks.
_PROCESSES = multiprocessing.get_context("spawn")


class WorkerDied(RuntimeError):
    """A worker process ended without a word, as one does that the kernel kills for want of memory."""


def run_jobs(
    function: Callable[[Any, Report], Any], jobs: Sequence[Any], *, num_workers: int, report: Report
) -> Iterator[tuple[int, Any]]:
    """Yields (number of the job, its result) in the order in which jobs end; each is run once.

    The first exception of a job is raised here, and ends the workers. So does leaving the generator. Workers are not
    concurrent.futures': those wait for ever when their parent is killed.

    Args:
      function: called with a job and a report; it, jobs and results must be picklable.
      jobs: begun in this order.
      num_workers: processes; 1 runs the jobs in this one.
      report: is told, in this process, what jobs report.

    Raises:
      WorkerDied: a worker ended by itself.
    """
    if min(num_workers, len(jobs)) <= 1:
        yield from ((number, function(job, report)) for number, job in enumerate(jobs))
        return
    waiting = iter(enumerate(jobs))
    with contextlib.ExitStack() as stack:
        workers = {}
        for number, job in itertools.islice(waiting, num_workers):
            connection, process = _start(function, stack)
            workers[connection] = process
            connection.send((number, job))
        while workers:
            for connection in multiprocessing.connection.wait(list(workers)):
                kind, value = _receive(connection, workers[connection])
                if kind == "report":
                    report(value)
                elif kind == "failed":
                    raise value
                else:
                    yield value
                    if (job := next(waiting, None)) is not None:
                        connection.send(job)
                    else:
                        del workers[connection]


def _start(
    function: Callable, stack: contextlib.ExitStack
) -> tuple[multiprocessing.connection.Connection, multiprocessing.process.BaseProcess]:
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_work, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join)
    stack.callback(process.terminate)
    stack.callback(ours.close)
    return ours, process


def _receive(
    connection: multiprocessing.connection.Connection, process: multiprocessing.process.BaseProcess
) -> tuple[str, Any]:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise WorkerDied(f"worker process {process.pid} ended by itself ({how})") from None


def _work(connection: multiprocessing.connection.Connection, function: Callable) -> None:
    """Runs jobs until the parent closes the connection."""
    # Ctrl-C goes to every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            number, job = connection.recv()
            try:
                result = function(job, lambda value: connection.send(("report", value)))
            except BrokenPipeError:
                raise
            except Exception as error:
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                connection.send(("failed", error))
            else:
                connection.send(("done", (number, result)))


def _end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
