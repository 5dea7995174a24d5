"""What a program is compiled for: GPUs of a kind in nodes, or fake CPU devices. No JAX."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from jaxpar.config.errors import ConfigError, Problem
from jaxpar.plan.topology import Cluster

CUDA_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
"""Packages of the compiler that carry JAX's own version."""

ASSEMBLER = "nvidia-cuda-nvcc-cu12"
"""Package with ptxas, without which no kernel is assembled."""


SIDE_DIRECTORY = Path(sys.prefix, "gpu-compiler")
"""Where ``make`` puts these packages: beside the environment's own, so that nothing but a compilation sees them. (JAX
tries every CUDA plugin that it can see, and reports at length that there is no GPU.)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """A GPU as the compiler sees it; an entry of ``gpus.toml``."""

    name: str
    """Catalogue name."""
    kind: str
    """``jax.Device.device_kind``."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int
    shared_per_core: int
    shared_per_block: int

    def description(self) -> str:
        """The GPU as text of a ``GpuTargetConfigProto``. Source: XLA ``stream_executor/device_description.proto``."""
        major, minor = self.capability
        # Hopper and newer have instructions (wgmma, tcgen05) that only an architecture of its own may use: sm_90a.
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core}
  shared_memory_per_block_optin: {self.shared_per_block}
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.kind}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Devices that a program is compiled for."""

    num_devices: int
    devices_per_node: int
    gpu: GpuTarget | None
    """None: fake CPU devices."""

    @property
    def topology(self) -> str:
        """NVLink domains x hosts of a domain x GPUs of a host, every node a domain of its own.

        (One domain of several hosts, ``1x8x8``, makes the compiler of JAX 0.12 abort in a one-shot all-reduce.)
        """
        return f"{self.num_devices // self.devices_per_node}x1x{self.devices_per_node}"

    @property
    def label(self) -> str:
        """What was compiled for, and how far to trust it."""
        if self.gpu is None:
            return f"{self.num_devices} fake CPU devices: another compiler than the GPU's, for the communication only"
        nodes = self.num_devices // self.devices_per_node
        spread = f" in {nodes} nodes" if nodes > 1 else ""
        return f"{self.num_devices} x {self.gpu.name}{spread}, without a GPU: a compiler estimate, not a measurement"


@functools.cache
def gpu_targets() -> Mapping[str, GpuTarget]:
    """Every GPU that programs can be compiled for, by catalogue name."""
    tables = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return {
        name: GpuTarget(name=name, **{**table, "capability": tuple(table["capability"])})
        for name, table in tables.items()
    }


def gpu_target(cluster: Cluster) -> Target:
    """The GPUs of a cluster.

    Raises:
        ConfigError: The GPU has no entry in ``gpus.toml``, or the CUDA compiler is not installed.
    """
    problems = [*_unknown_gpu(cluster.gpu.name), *_missing_packages()]
    if problems:
        raise ConfigError(problems)
    return Target(
        num_devices=cluster.num_devices,
        devices_per_node=min(cluster.num_devices, cluster.devices_per_node),
        gpu=gpu_targets()[cluster.gpu.name],
    )


def cpu_target(num_devices: int) -> Target:
    """Fake CPU devices."""
    return Target(num_devices=num_devices, devices_per_node=num_devices, gpu=None)


def _unknown_gpu(name: str) -> list[Problem]:
    if name in gpu_targets():
        return []
    message = "no description for the compiler is known of this GPU"
    remedy = f"these can be compiled for: {', '.join(gpu_targets())}; --compile cpu works for any"
    return [Problem(key="--gpu", value=name, message=message, remedy=remedy)]


def _missing_packages() -> list[Problem]:
    missing = [package for package in (*CUDA_PACKAGES, ASSEMBLER) if not _is_installed(package)]
    if not missing:
        return []
    version = importlib.metadata.version("jax")
    wanted = [*(f"{package}=={version}" for package in CUDA_PACKAGES), f"{ASSEMBLER}==12.9.86"]
    return [
        Problem(
            key="--compile",
            value="gpu",
            message=f"the CUDA compiler is not installed (missing: {', '.join(missing)}); no GPU is needed for it",
            remedy=f"pip install {' '.join(wanted)}  (the extra plan-gpu), or --compile cpu for fake CPU devices",
        )
    ]


def _is_installed(package: str) -> bool:
    places = [str(SIDE_DIRECTORY), *sys.path]
    return any(importlib.metadata.distributions(name=package, path=places))
