"""A cluster as the arithmetic sees it: one GPU model, how many, and which link a collective uses."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path

from jaxpar.config.errors import NO_VALUE, ConfigError, Problem
from jaxpar.config.keys import nearest_name
from jaxpar.plan.catalogue import Gpu, gpu_named

DEVICES_PER_NODE = 8
"""Of the usual server; GB200 and GB300 nodes have 4."""

_PCIE_BANDWIDTH = 64e9
"""Between GPUs of a node that NVLink does not reach: PCIe 5.0 x16, one direction."""

_EXAMPLE = 'e.g. gpu = "h100", devices = 64, nodes = 8 under [cluster]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Bytes/s per device and direction, as ``jaxpar bench collectives`` measured them; None where it did not."""

    by: str
    """What measured them, where and when."""
    intra: float | None = None
    """Of a ring inside a domain."""
    inter: float | None = None
    """Of a ring across domains, of one device's own interface."""
    all_to_all_intra: float | None = None
    all_to_all_inter: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind. Consecutive devices fill an NVLink domain, then the next."""

    gpu: Gpu
    num_devices: int
    devices_per_node: int
    link_share: float = 0.9
    """What a collective reaches of the link inside a node. Fitted to published runs."""
    network_share: float = 0.75
    """What a collective reaches of the network interfaces. Fitted to published runs."""
    links: MeasuredLinks | None = None
    """What was measured on the cluster itself, which then counts instead; None: the catalogue."""

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def domain_size(self) -> int:
        """GPUs that reach each other without the network: an NVLink domain, or a node."""
        return max(self.gpu.domain_size, self.devices_per_node)

    @property
    def nvlink_size(self) -> int:
        """GPUs that reach each other over NVLink; 1: none."""
        return min(self.gpu.domain_size, self.num_devices)

    def link_name(self, stride: int, members: int) -> str:
        """Slowest link of a group: "NVLink", "PCIe" or "network"; see :meth:`ring_bandwidth`."""
        span = stride * members
        if members == 1:
            return "none"
        if span <= self.gpu.domain_size:
            return "NVLink"
        return "PCIe" if span <= self.domain_size else "network"

    def ring_bandwidth(self, stride: int, members: int) -> float:
        """Bytes/s that each member sends in a ring of ``members`` devices that lie ``stride`` apart.

        Inside a domain it is the link. Across domains the ring enters and leaves each domain once, and every member
        there brings its own network interface: min(link, members per domain x interface). (NCCL opens one channel per
        interface; without this, published runs of FSDP over many nodes are missed by half.)
        """
        link = self.link_bandwidth
        name = self.link_name(stride, members)
        if name in ("NVLink", "none") or (name == "PCIe" and self.links and self.links.intra):
            return link
        if name == "PCIe":
            return min(link, _PCIE_BANDWIDTH * self.link_share)
        members_per_domain = max(1, self.domain_size // stride)
        return min(link, members_per_domain * self.network_bandwidth)

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s that a collective reaches of the link between two devices of a domain."""
        measured = self.links.intra if self.links else None
        return measured or self.gpu.link_bandwidth * self.link_share

    @property
    def network_bandwidth(self) -> float:
        """Bytes/s that a collective reaches of one device's own network interface."""
        measured = self.links.inter if self.links else None
        return measured or self.gpu.network_bandwidth * self.network_share

    def exchange_bandwidth(self, stride: int, members: int) -> tuple[float, float]:
        """Bytes/s of an all-to-all: of each device's link, and of its network interface."""
        link = self.link_bandwidth
        if self.link_name(stride, members) == "PCIe":
            link = self.ring_bandwidth(stride, members)
        if self.links is None:
            return link, self.network_bandwidth
        return self.links.all_to_all_intra or link, self.links.all_to_all_inter or self.network_bandwidth

    def knows_exchange(self, stride: int, members: int) -> bool:
        """Whether all-to-all was measured on the links that a group uses."""
        if self.links is None:
            return False
        is_inside = self.link_name(stride, members) != "network"
        return bool(self.links.all_to_all_intra if is_inside else self.links.all_to_all_inter)


def make_cluster(gpu: Gpu, *, num_devices: int, num_nodes: int | None = None) -> Cluster:
    """A cluster of equal nodes.

    Args:
        gpu: The GPU.
        num_devices: GPUs in all.
        num_nodes: Nodes; None puts 8 GPUs in a node, or 4 with NVLink beyond the node, or all if there are fewer.

    Raises:
        ConfigError: The devices do not divide by the nodes.
    """
    if num_nodes is None:
        usual = 4 if gpu.domain_size > DEVICES_PER_NODE else DEVICES_PER_NODE
        return Cluster(gpu=gpu, num_devices=num_devices, devices_per_node=min(usual, num_devices))
    if num_nodes < 1 or num_devices % num_nodes:
        message = f"{num_devices} devices do not divide by {num_nodes} nodes"
        raise ConfigError([Problem(key="--nodes", value=num_nodes, message=message, remedy="give equal nodes")])
    return Cluster(gpu=gpu, num_devices=num_devices, devices_per_node=num_devices // num_nodes)


_CLUSTER_KEYS = {"gpu": str, "devices": int, "nodes": int, "intra_gb_per_s": float, "inter_gb_per_s": float}
_MEASURED_KEYS = {
    "by": str,
    "device_kind": str,
    "intra_gb_per_s": float,
    "inter_gb_per_s": float,
    "all_to_all_intra_gb_per_s": float,
    "all_to_all_inter_gb_per_s": float,
}
_GPU_KEYS = {
    "name": str,
    "memory_gib": float,
    "memory_gb_per_s": float,
    "bfloat16_tflops": float,
    "float8_tflops": float,
    "float4_tflops": float,
    "float32_tflops": float,
    "link_gb_per_s": float,
    "domain_size": int,
    "network_gb_per_s": float,
}
_GPU_REQUIRED = ("name", "memory_gib", "memory_gb_per_s", "bfloat16_tflops", "link_gb_per_s", "network_gb_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """What a cluster file says; None where it says nothing. Command-line options win."""

    gpu: Gpu | None
    num_devices: int | None
    num_nodes: int | None
    links: MeasuredLinks | None = None
    """Measured on the GPU of the file."""


def read_cluster(path: str | os.PathLike) -> ClusterFile:
    """Reads a cluster description.

    ``[cluster]`` has gpu (a catalogue name), devices, nodes, and intra_gb_per_s and inter_gb_per_s, which replace the
    catalogue's link and network bandwidth (per GPU, one direction, e.g. as measured). A ``[gpu]`` table describes a GPU
    that the catalogue does not have: name, memory_gib, memory_gb_per_s, bfloat16_tflops (dense), float8_tflops,
    float4_tflops, float32_tflops, link_gb_per_s, domain_size (NVLink), network_gb_per_s. ``[measured]`` is written by
    ``jaxpar bench collectives``: what collectives reach of the links of that GPU.

    Raises:
        ConfigError: The file cannot be read, or a key is unknown, missing or of the wrong type.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _problem(str(path), NO_VALUE, "no such cluster file", f"give a TOML file, {_EXAMPLE}") from None
    except (OSError, ValueError) as error:
        raise _problem(str(path), NO_VALUE, f"cannot be read: {error}", f"give a TOML file, {_EXAMPLE}") from None
    for name in tables:
        if name not in ("cluster", "gpu", "measured"):
            raise _problem(str(path), name, "no such table", "tables are [cluster], [gpu] and [measured]")
    cluster = _checked(path, "cluster", tables.get("cluster", {}), _CLUSTER_KEYS)
    gpu = None
    if "gpu" in tables:
        gpu = _own_gpu(path, _checked(path, "gpu", tables["gpu"], _GPU_KEYS))
    elif "gpu" in cluster:
        gpu = gpu_named(cluster["gpu"])
    measured = {
        field: cluster[key] * 1e9
        for key, field in (("intra_gb_per_s", "link_bandwidth"), ("inter_gb_per_s", "network_bandwidth"))
        if key in cluster
    }
    if measured and gpu is None:
        raise _problem(f"{path}: cluster.gpu", NO_VALUE, "bandwidths belong to a GPU", _EXAMPLE)
    if measured:
        gpu = dataclasses.replace(gpu, **measured)
    links = _measured_links(path, tables["measured"]) if "measured" in tables else None
    return ClusterFile(gpu=gpu, num_devices=cluster.get("devices"), num_nodes=cluster.get("nodes"), links=links)


def _measured_links(path: str | os.PathLike, table: object) -> MeasuredLinks:
    """The [measured] table; its ``collectives`` are for people."""
    if isinstance(table, dict):
        table = {name: value for name, value in table.items() if name != "collectives"}
    values = _checked(path, "measured", table, _MEASURED_KEYS)
    bandwidths = {
        name.removesuffix("_gb_per_s"): value * 1e9 for name, value in values.items() if name.endswith("_gb_per_s")
    }
    return MeasuredLinks(by=values.get("by", f"measured ({path})"), **bandwidths)


def _checked(path: str | os.PathLike, table: str, values: object, kinds: dict[str, type]) -> dict:
    if not isinstance(values, dict):
        raise _problem(f"{path}: {table}", values, "must be a table", _EXAMPLE)
    for name, value in values.items():
        if name not in kinds:
            nearest = nearest_name(name, kinds)
            hint = f"did you mean {nearest}? " if nearest else ""
            raise _problem(f"{path}: {table}.{name}", value, "unknown key", hint + "keys: " + ", ".join(kinds))
        kind = kinds[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = isinstance(value, str) if kind is str else is_number and value > 0
        if not fits or (kind is int and not isinstance(value, int)):
            accepted = {str: "a string", int: "an integer above 0", float: "a number above 0"}[kind]
            raise _problem(f"{path}: {table}.{name}", value, f"not {accepted}", f"give {accepted}")
    return values


def _own_gpu(path: str | os.PathLike, values: dict) -> Gpu:
    missing = [name for name in _GPU_REQUIRED if name not in values]
    if missing:
        raise _problem(f"{path}: gpu", NO_VALUE, f"lacks {', '.join(missing)}", "give them; peaks are dense")

    def tera(name: str) -> float | None:
        return values[name] * 1e12 if name in values else None

    return Gpu(
        name=values["name"],
        pattern="",
        bfloat16_flops=tera("bfloat16_tflops"),
        float16_flops=tera("bfloat16_tflops"),
        tf32_flops=None,
        float32_flops=tera("float32_tflops") or tera("bfloat16_tflops") / 16,
        memory_bytes=round(values["memory_gib"] * 2**30),
        memory_bandwidth=values["memory_gb_per_s"] * 1e9,
        float8_flops=tera("float8_tflops"),
        float4_flops=tera("float4_tflops"),
        link_bandwidth=values["link_gb_per_s"] * 1e9,
        domain_size=values.get("domain_size", 1),
        network_bandwidth=values["network_gb_per_s"] * 1e9,
    )


def _problem(key: str, value: object, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key=key, value=value, message=message, remedy=remedy)])
