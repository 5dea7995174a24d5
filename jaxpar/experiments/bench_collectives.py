"""Starts the processes of a benchmark of collectives, measures, and says where it was done."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence

import jax

from jaxpar.config import Config, ConfigError
from jaxpar.config.schema import AXES
from jaxpar.experiments.collectives import count_hosts, measure
from jaxpar.experiments.links import Measured, Measurement
from jaxpar.mesh import make_mesh
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.rules import MESH_RULES, find_problems
from jaxpar.runtime.self_test import self_test
from jaxpar.runtime.start import Processes, meet, start, stop


def bench(
    config: Config, *, sizes: Sequence[int], iterations: int, ops: Sequence[str], say: Callable[[str], None]
) -> Measured:
    """Measures the collectives of a config's mesh; its model plays no part.

    Raises:
        ConfigError: The mesh does not fit the devices.
        StartError: Processes or devices are missing.
    """
    processes = start(config.runtime, say=say)
    try:
        mesh = make_mesh(_mesh_sizes(config, processes))
        self_test(mesh)

        def told(found: Measurement) -> None:
            if processes.process_id == 0:
                say(f"{found.axis} {found.op} {found.bytes} bytes: {found.bus_bandwidth / 1e9:.4g} GB/s")

        measurements = tuple(measure(mesh, sizes=sizes, iterations=iterations, ops=ops, say=told))
        measured = Measured(
            device_kind=processes.device_kind,
            num_devices=processes.global_devices,
            num_nodes=count_hosts(socket.gethostname()),
            by=f"jaxpar bench collectives, JAX {jax.__version__}, {processes}, {datetime.date.today()}",
            measurements=measurements,
        )
        meet("benchmark done")
    except BaseException as error:
        # The other processes would wait in a collective.
        if processes.num_processes > 1:
            say(f"error: {error}")
            stop(success=False, exit_code=2 if isinstance(error, ConfigError) else 1)
        raise
    stop(success=True)
    return measured


def _mesh_sizes(config: Config, processes: Processes) -> dict[str, int]:
    """The config's mesh; if it asks for none, the devices of a node are fsdp, and nodes data."""
    if all(getattr(config.mesh, axis) == 1 for axis in AXES):
        nodes = count_hosts(socket.gethostname())
        return {"data": nodes, "fsdp": processes.global_devices // nodes}
    facts = gather_facts(config, num_devices=processes.global_devices)
    if problems := find_problems(facts, MESH_RULES):
        raise ConfigError(problems)
    return facts.mesh
