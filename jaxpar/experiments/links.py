"""What a measured collective says about a link: bandwidths as nccl-tests defines them, and a cluster file. No JAX."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from jaxpar.config.toml_text import toml_value
from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.topology import Cluster, make_cluster

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")

_RING_OPS = ("all-reduce", "all-gather", "reduce-scatter")
"""Those whose speed the plan takes from one number per link."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective over one mesh axis with one message size."""

    axis: str
    op: str
    devices: int
    """Members of each group."""
    stride: int
    """How far apart its members lie in the order of devices."""
    bytes: int
    """Size of the message as nccl-tests counts it: of the whole buffer that a device ends (all-gather) or starts with
    (every other)."""
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes/s: the message over the time."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s that every device's link carries in one direction.

        All-reduce 2 (n - 1) / n of the algorithm bandwidth; all-gather, reduce-scatter and all-to-all (n - 1) / n;
        permute all of it. Source: nccl-tests, doc/PERFORMANCE.md.
        """
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "permute": 1.0}.get(self.op, share)
        return self.algorithm_bandwidth * factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Where measurements were made."""

    device_kind: str
    num_devices: int
    num_nodes: int
    """Hosts."""
    by: str
    """Program, versions, processes and date, for people."""
    measurements: tuple[Measurement, ...]

    @property
    def cluster(self) -> Cluster | None:
        """The cluster by the catalogue; None for a device that it does not have, or nodes that are not equal."""
        gpu = find_gpu(self.device_kind)
        if gpu is None or self.num_devices % self.num_nodes:
            return None
        return make_cluster(gpu, num_devices=self.num_devices, num_nodes=self.num_nodes)

    @property
    def domain_size(self) -> int:
        """Devices that reach each other without the network."""
        cluster = self.cluster
        return cluster.domain_size if cluster is not None else max(1, self.num_devices // self.num_nodes)


def link_bandwidths(measured: Measured) -> dict[str, float]:
    """What plan calculates with, in bytes/s per device and direction; only what was measured.

    ``intra`` and ``inter``: of a ring (all-reduce, all-gather, reduce-scatter: their median at the largest message)
    inside a domain and across the network. ``all_to_all_intra`` and ``all_to_all_inter``: of an exchange. Across the
    network it is what one device's own interface carries: a ring enters and leaves a domain once, with the interfaces
    of all its members there; of an exchange only what goes to other domains crosses it.
    """
    largest: dict[tuple[str, str, int], Measurement] = {}
    for found in measured.measurements:
        key = found.axis, found.op, found.devices
        if key not in largest or found.bytes > largest[key].bytes:
            largest[key] = found
    values: dict[str, list[float]] = {}
    for found in largest.values():
        inside = found.stride * found.devices <= measured.domain_size
        here = min(found.devices, max(1, measured.domain_size // found.stride))
        if found.op in _RING_OPS:
            values.setdefault("intra" if inside else "inter", []).append(
                found.bus_bandwidth if inside else found.bus_bandwidth / here
            )
        elif found.op == "all-to-all":
            leaving = (found.devices - here) / found.devices
            values.setdefault("all_to_all_intra" if inside else "all_to_all_inter", []).append(
                found.bus_bandwidth if inside else found.algorithm_bandwidth * leaving
            )
    return {name: statistics.median(found) for name, found in sorted(values.items())}


def cluster_text(measured: Measured) -> str:
    """The cluster file: what plan reads, and every measurement it comes from."""
    cluster = measured.cluster
    lines = ["# Written by jaxpar bench collectives; jaxpar plan CONFIG --cluster FILE calculates with it.", ""]
    lines += ["[cluster]"]
    if cluster is not None:
        lines += [f"gpu = {toml_value(cluster.gpu.name)}"]
    elif measured.device_kind == "cpu":
        lines += ["# measured on CPU devices, to try the benchmark: plans of GPUs do not use it"]
    else:
        lines += ["# the catalogue has no such GPU: describe it in a [gpu] table"]
    lines += [f"devices = {measured.num_devices}"]
    if measured.num_devices % measured.num_nodes == 0:
        lines += [f"nodes = {measured.num_nodes}"]
    lines += ["", "[measured]", f"by = {toml_value(measured.by)}", f"device_kind = {toml_value(measured.device_kind)}"]
    for name, bandwidth in link_bandwidths(measured).items():
        lines.append(f"{name}_gb_per_s = {_giga(bandwidth)}")
    for found in measured.measurements:
        lines += [
            "",
            "[[measured.collectives]]",
            f"axis = {toml_value(found.axis)}",
            f"op = {toml_value(found.op)}",
            f"devices = {found.devices}",
            f"stride = {found.stride}",
            f"bytes = {found.bytes}",
            f"seconds = {found.seconds:.4g}",
            f"algorithm_gb_per_s = {_giga(found.algorithm_bandwidth)}",
            f"bus_gb_per_s = {_giga(found.bus_bandwidth)}",
        ]
    return "\n".join(lines) + "\n"


def _giga(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.4g}"


def strides(mesh: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Distance between neighbours on each axis in the order of devices, from (axis, size), outermost first."""
    found, stride = {}, 1
    for axis, size in reversed(mesh):
        found[axis] = stride
        stride *= size
    return found
