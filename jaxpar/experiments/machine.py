"""What a machine is, as plain values: versions, devices, GPUs and their links, launcher, disk, limits. No JAX here.

Everything is read, nothing judged (:mod:`jaxpar.experiments.diagnosis` does that), and nothing that is missing is an
error. Devices are asked for in a process of its own, because a broken driver can hang or abort it.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

from jaxpar.config import Config, config_to_toml
from jaxpar.experiments.children import environment, run_child

PACKAGES = (
    "jaxpar", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "flax",
    "optax", "orbax-checkpoint", "grain", "numpy", "tokamax", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-ml-py",
)  # fmt: skip

VARIABLES = (
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_JOB_NODELIST",
    "SLURM_STEP_GPUS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
    "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT",
    "COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_PLATFORMS",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE",
    "GLOO_SOCKET_IFNAME", "http_proxy", "HTTP_PROXY", "https_proxy", "no_proxy", "NO_PROXY", "TF_CPP_MIN_LOG_LEVEL",
)  # fmt: skip
"""Of the environment, what changes how a run starts. All of it is printed, so nothing secret is here."""

NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""There wherever the driver has found a GPU."""
_INFINIBAND = Path("/sys/class/infiniband")
_TOPOLOGY = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Names of nvidia-smi for how two GPUs reach each other without NVLink: one PCIe switch, several, the host bridge, one
NUMA node, several sockets."""

Facts = dict[str, object]


def gather(config: Config, *, nvml: ModuleType | None, timeout_s: float = 120) -> Facts:
    """Everything about this machine.

    Args:
        config: Whose ``runtime`` and ``run.dir`` matter.
        nvml: The module ``pynvml`` (package nvidia-ml-py), or None.
        timeout_s: Seconds that JAX may take to start.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "packages": installed(),
        "has_nvidia_device": NVIDIA_DEVICE.exists(),
        "nvidia": read_nvml(nvml) if nvml is not None else None,
        "jax": ask_jax(config, timeout_s),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "launcher": launcher(os.environ),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "infiniband": sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else [],
        "coordinator_error": _unresolvable(config.runtime.coordinator),
        "disk": disk(Path(config.run.dir)),
        "shared_memory": _space(Path("/dev/shm")),
        "limits": limits(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def installed() -> dict[str, str | None]:
    """Versions of the packages that matter; None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def ask_jax(config: Config, timeout_s: float) -> Facts:
    """Devices that a run of this config would see, from JAX itself: platform, device_kind, devices; or an error."""
    with tempfile.TemporaryDirectory(prefix="jaxpar-doctor-") as directory:
        folder = Path(directory)
        (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
        result = folder / "devices.json"
        ended = run_child(
            ["jaxpar.experiments.devices", str(folder / "config.toml"), str(result)],
            environment=environment(fake_devices=config.runtime.cpu_devices > 0),
            timeout_s=timeout_s,
            log=folder / "log.txt",
        )
        if ended.code == 0 and result.is_file():
            return {"error": None, **json.loads(result.read_text(encoding="utf-8"))}
        return {"error": ended.reason}


def read_nvml(nvml: ModuleType) -> Facts:
    """Driver, GPUs, their memory and links, from NVIDIA's management library.

    ``links`` is a matrix of how two GPUs reach each other: NVLink, or nvidia-smi's names of PCIe paths.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"error": str(error)}
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {
            "error": None,
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": [_gpu(nvml, handle) for handle in handles],
            "links": [[_link(nvml, one, other) for other in handles] for one in handles],
        }
    except nvml.NVMLError as error:
        return {"error": str(error)}
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ModuleType, handle: object) -> Facts:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    active = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except nvml.NVMLError:  # no such link
            break
    return {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory_bytes": int(memory.total),
        "used_bytes": int(memory.used),
        "nvlinks": active,
    }


def _link(nvml: ModuleType, one: object, other: object) -> str:
    if one is other:
        return "-"
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    except nvml.NVMLError:
        pass  # drivers of cards without NVLink do not know the question
    try:
        return _TOPOLOGY.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)), "?")
    except nvml.NVMLError:
        return "?"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def launcher(variables: Mapping[str, str]) -> Facts | None:
    """What started this process among others, how many they are and which it is; None if nothing says so.

    jaxpar itself reads none of it: ``runtime.num_processes``, ``process_id`` and ``coordinator`` say it.
    """
    known = (
        ("SLURM", "SLURM_NTASKS", "SLURM_PROCID"),
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("torchrun or a Kubernetes operator", "WORLD_SIZE", "RANK"),
        ("a Kubernetes indexed job", "JOB_COMPLETIONS", "JOB_COMPLETION_INDEX"),
    )
    for name, count, index in known:
        if variables.get(index, "").isdecimal():
            number = variables.get(count, "")
            return {
                "name": name,
                "num_processes": int(number) if number.isdecimal() else None,
                "process_id": int(variables[index]),
                "count_variable": count,
                "index_variable": index,
            }
    return None


def _unresolvable(coordinator: str | None) -> str | None:
    """Why the coordinator's name cannot be found, or None."""
    if not coordinator:
        return None
    host = coordinator.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return str(error)
    return None


def disk(directory: Path) -> Facts:
    """Where ``run.dir`` is or will be: file system, space, and whether it can be written."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    return {
        "path": str(directory),
        "file_system": file_system(there, Path("/proc/self/mounts")),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        **_space(there),
    }


def file_system(path: Path, mounts: Path) -> str | None:
    """Type of the file system that holds a path, e.g. "ext4", "nfs4"; None where the system does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    target, found, longest = str(path.resolve()), None, -1
    for line in lines:
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # The last of several mounts on one point is the one that is seen.
        if inside and len(point) >= longest:
            found, longest = kind, len(point)
    return found


def _space(path: Path) -> Facts:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return {"total_bytes": None, "free_bytes": None}
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def limits() -> dict[str, int | None]:
    """Soft limits of this process; None: unlimited."""
    names = {"open_files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked_memory": "RLIMIT_MEMLOCK"}
    found = {}
    for name, constant in names.items():
        soft = resource.getrlimit(getattr(resource, constant))[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found
