"""Waits until all processes of a run are there, before JAX is asked to connect them.

JAX ends a process with SIGABRT when its own start-up times out, blaming "another task"; nothing in Python can catch
that. So the processes meet here first, over one plain TCP connection each to process 0, on the coordinator's port,
which JAX's own service takes over afterwards. Who is missing, who came twice and who was started differently is then
known by number, and every process ends with the same message.

The protocol is one JSON object per line. A process says who it is; process 0 answers with whom it waits for, as that
changes, and at last with "go" or with an error. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from jaxpar.config.errors import ConfigError, Problem

PROTOCOL = "jaxpar-arrival-1"
_RETRY_S = 0.2
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 10.0
_MAX_LINE = 4096

type Facts = Mapping[str, str | int]
type Say = Callable[[str], None]


class StartError(RuntimeError):
    """The processes or devices of a run could not be started; the message says why and what to check."""


def parse_address(coordinator: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6 address]:port``; raises ConfigError if it is neither."""
    host, colon, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        return host, int(port)
    problem = Problem(
        key="runtime.coordinator",
        value=coordinator,
        message="is not host:port",
        remedy='give the address of process 0 and a free port on it, such as "node0:8476"',
    )
    raise ConfigError([problem])


def arrive(coordinator: str, *, process_id: int, num_processes: int, facts: Facts, timeout_s: float, say: Say) -> None:
    """Returns once all processes have called this with the same arguments, apart from their own ``process_id``.

    Args:
        coordinator: ``host:port`` of process 0.
        process_id: number of this process.
        num_processes: how many there are.
        facts: what must be equal on all processes, by name.
        timeout_s: seconds to wait.
        say: is told whom process 0 waits for.

    Raises:
        StartError: a process is missing after ``timeout_s``, came twice, or was started differently.
        ConfigError: ``coordinator`` is not an address.
    """
    host, port = parse_address(coordinator)
    facts = {"runtime.num_processes": num_processes, **facts}
    if process_id == 0:
        with _Reception(coordinator, port, facts=facts, num_processes=num_processes) as reception:
            reception.receive_all(timeout_s, say)
    else:
        _announce(host, port, coordinator, process_id=process_id, facts=facts, timeout_s=timeout_s)


def wait_for_service(coordinator: str, *, timeout_s: float = 2) -> None:
    """Waits a little for JAX's service to take the port, because JAX's client waits a second if it comes too early."""
    address, deadline = parse_address(coordinator), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return
        time.sleep(0.02)


def _name_ids(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:16]))
    return f"{{{shown}}}" if len(ids) <= 16 else f"{{{shown}, ... {len(ids) - 16} more}}"


class _Guest:
    """One connection to process 0; ``process_id`` is known once it has said who it is."""

    def __init__(self, connection: socket.socket, origin: str):
        self.connection = connection
        self.origin = origin
        self.received = b""
        self.process_id: int | None = None

    def send(self, message: Mapping[str, object]) -> None:
        # A guest that has just left is noticed when its connection is next read.
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps({"protocol": PROTOCOL, **message}).encode() + b"\n")


class _Reception:
    """Process 0's side: a listening socket and the guests that have arrived."""

    def __init__(self, coordinator: str, port: int, *, facts: Facts, num_processes: int):
        self._coordinator, self._facts, self._num_processes = coordinator, facts, num_processes
        self._guests: dict[int, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(coordinator, port)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def receive_all(self, timeout_s: float, say: Say) -> None:
        deadline = time.monotonic() + timeout_s
        next_status, next_say = 0.0, time.monotonic() + _SAY_AFTER_S
        try:
            while len(self._guests) < self._num_processes - 1:
                now = time.monotonic()
                if now >= deadline:
                    raise StartError(self._missing(timeout_s))
                if now >= next_status:
                    self._tell({"waiting": self._missing(timeout_s)})
                    next_status = now + 1
                if now >= next_say:
                    say(f"waiting at {self._coordinator} for process ids {_name_ids(self._missing_ids())}")
                    next_say = now + _SAY_EVERY_S
                for key, _ in self._selector.select(timeout=min(0.5, deadline - now)):
                    self._accept() if key.data is None else self._read(key.data)
        except StartError as error:
            self._tell({"error": str(error)})
            raise
        # Closed first, so that whoever connects after "go" finds JAX's service and not this one.
        self._selector.unregister(self._listener)
        self._listener.close()
        self._tell({"go": True})
        self._see_off()

    def _missing_ids(self) -> list[int]:
        return [process for process in range(1, self._num_processes) if process not in self._guests]

    def _missing(self, timeout_s: float) -> str:
        return (
            f"{1 + len(self._guests)} of {self._num_processes} processes arrived at {self._coordinator} within "
            f"{timeout_s:g} s; missing process ids {_name_ids(self._missing_ids())}. Check that each of them was "
            "started and has not failed, that runtime.coordinator is the address of process 0 as the others see it, "
            "that no firewall blocks the port, and that runtime.num_processes counts only what was started "
            "(runtime.start_timeout_s is how long to wait)"
        )

    def _tell(self, message: Mapping[str, object]) -> None:
        for guest in self._guests.values():
            guest.send(message)

    def _accept(self) -> None:
        try:
            connection, origin = self._listener.accept()
        except OSError:  # it has hung up already
            return
        connection.settimeout(5)
        self._selector.register(connection, selectors.EVENT_READ, _Guest(connection, str(origin[0])))

    def _read(self, guest: _Guest) -> None:
        try:
            received = guest.connection.recv(_MAX_LINE)
        except OSError:
            received = b""
        guest.received += received
        if not received or len(guest.received) > _MAX_LINE:
            self._dismiss(guest)
        elif guest.process_id is None and guest.received.endswith(b"\n"):
            self._admit(guest)

    def _dismiss(self, guest: _Guest) -> None:
        """Forgets a connection that has closed, or that talks about something else (a port scanner, say)."""
        self._selector.unregister(guest.connection)
        guest.connection.close()
        if guest.process_id is not None:
            del self._guests[guest.process_id]

    def _admit(self, guest: _Guest) -> None:
        message = _parse(guest.received) or {}
        process_id, facts = message.get("process_id"), message.get("facts")
        if not isinstance(process_id, int) or not isinstance(facts, dict):
            self._dismiss(guest)
            return
        fault = self._fault(process_id, facts, guest.origin)
        if fault:
            guest.send({"error": fault})
            raise StartError(fault)
        guest.process_id = process_id
        self._guests[process_id] = guest

    def _fault(self, process_id: int, facts: Facts, origin: str) -> str | None:
        for name in self._facts.keys() | facts.keys():
            here, there = self._facts.get(name), facts.get(name)
            if here != there:
                return (
                    f"process {process_id} (from {origin}) has {name} = {there}, but process 0 has {here}; "
                    "start every process with the same config and installation"
                )
        if not 0 < process_id < self._num_processes:
            return (
                f"a process from {origin} came to process 0 at {self._coordinator} as process {process_id}; "
                f"the others must be 1 to {self._num_processes - 1}: give each its own runtime.process_id"
            )
        if process_id in self._guests:
            return (
                f"two processes came to {self._coordinator} as process {process_id}, from "
                f"{self._guests[process_id].origin} and {origin}; give each its own runtime.process_id"
            )
        return None

    def _see_off(self) -> None:
        """Waits until the guests have hung up, so that no connection of ours lingers on the port that JAX takes."""
        deadline = time.monotonic() + 5
        for guest in self._guests.values():
            with contextlib.suppress(OSError):
                while time.monotonic() < deadline and guest.connection.recv(_MAX_LINE):
                    pass


def _listen(coordinator: str, port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "another process 0 or another program has the port; choose another port" if taken else str(error)
        raise StartError(
            f"process 0 cannot listen on the port of runtime.coordinator = {coordinator}: {hint}"
        ) from error


def _parse(line: bytes) -> dict | None:
    """One message, or None if it is not ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("protocol") == PROTOCOL else None


def _announce(host: str, port: int, coordinator: str, *, process_id: int, facts: Facts, timeout_s: float) -> None:
    """The side of the other processes: tries until process 0 listens, says who this is, and waits for "go"."""
    deadline = time.monotonic() + timeout_s
    hello = json.dumps({"protocol": PROTOCOL, "process_id": process_id, "facts": dict(facts)}).encode() + b"\n"
    trouble = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 5)) as connection:
                connection.sendall(hello)
                _wait_for_go(connection, deadline)
            return
        except OSError as error:
            trouble = str(error)
        time.sleep(_RETRY_S)
    raise StartError(
        f"process {process_id} found no process 0 at {coordinator} within {timeout_s:g} s (last try: {trouble}); check "
        "that process 0 was started and has not failed, that runtime.coordinator is its address as seen from here, and "
        "that no firewall blocks the port"
    )


def _wait_for_go(connection: socket.socket, deadline: float) -> None:
    """Raises StartError if process 0 says so or says at the deadline that others are missing, OSError if it is gone."""
    waiting = None
    try:
        for message in _messages(connection, deadline):
            if "error" in message:
                raise StartError(message["error"])
            if "go" in message:
                return
            waiting = message["waiting"]
    except TimeoutError:
        if waiting:
            raise StartError(waiting) from None
        raise
    raise ConnectionError("it listens, but did not answer as process 0 of a run does")


def _messages(connection: socket.socket, deadline: float) -> Iterable[dict]:
    """Messages of process 0 until it hangs up or says something that is not ours."""
    received = b""
    while True:
        # Half a second more than process 0 waits, whose message says more than ours could.
        connection.settimeout(max(0.1, deadline + 0.5 - time.monotonic()))
        chunk = connection.recv(_MAX_LINE)
        if not chunk:
            return
        received += chunk
        *lines, received = received.split(b"\n")
        for line in lines:
            message = _parse(line)
            if message is None:
                return
            yield message
