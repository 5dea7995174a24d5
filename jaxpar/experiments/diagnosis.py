"""What is wrong with a machine for a run, and what to do: from plain values to problems. No JAX, no devices.

The values are those of :func:`jaxpar.experiments.machine.gather`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jaxpar.config import Config, ConfigError
from jaxpar.plan.catalogue import find_gpu
from jaxpar.plan.parameters import param_count
from jaxpar.plan.resolve import check

_GIB = 2**30
_STATE_BYTES = 12
"""Of a checkpoint per parameter: float32 weights and two moments."""

_MIN_DRIVER = {"12": ("525.60.13", "12.0"), "13": ("580.65.06", "13.0")}
"""Oldest driver (Linux) of a CUDA generation, and the CUDA version that it reports. Source: NVIDIA's table of CUDA
toolkits and minimum driver versions for minor version compatibility."""

_LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs"}
_PASSING_FILE_SYSTEMS = {
    "tmpfs": "memory: what is written there takes memory and is gone after a restart",
    "ramfs": "memory: what is written there takes memory and is gone after a restart",
    "overlay": "a container's own layer: what is written there is gone with the container",
}
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that is wrong."""

    stops: bool
    """Whether a run would not start, or would fail; else it is to be known."""
    what: str
    remedy: str


def diagnose(facts: Mapping, config: Config) -> list[Trouble]:
    """Everything that is wrong with a machine for a run of ``config``, what stops it first."""
    rules = (_packages, _jax_starts, _driver, _accelerator, _config, _gpus, _processes, _variables, _disk, _limits)
    found = [trouble for rule in rules for trouble in rule(facts, config)]
    return sorted(found, key=lambda trouble: not trouble.stops)


def _packages(facts: Mapping, _config: Config) -> Iterator[Trouble]:
    versions = facts["packages"]
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax and jaxlib and _release(jax)[:2] != _release(jaxlib)[:2]:
        yield Trouble(
            stops=True,
            what=f"jax {jax} and jaxlib {jaxlib} are not of one release",
            remedy=f"pip install jaxlib=={jax}",
        )
    for generation in ("12", "13"):
        for name in (f"jax-cuda{generation}-plugin", f"jax-cuda{generation}-pjrt"):
            version = versions[name]
            if version and jaxlib and _release(version)[:3] != _release(jaxlib)[:3]:
                yield Trouble(
                    stops=True,
                    what=f"{name} {version} does not belong to jaxlib {jaxlib}",
                    remedy=f"pip install {name}=={jaxlib}",
                )
        if bool(versions[f"jax-cuda{generation}-plugin"]) != bool(versions[f"jax-cuda{generation}-pjrt"]):
            yield Trouble(
                stops=facts["has_nvidia_device"],
                what=f"of jax-cuda{generation}-plugin and jax-cuda{generation}-pjrt only one is installed",
                remedy=f"pip install 'jax[cuda{generation}]=={jax}'",
            )
    if versions["jax-cuda12-plugin"] and versions["jax-cuda13-plugin"]:
        yield Trouble(
            stops=facts["has_nvidia_device"],
            what="the CUDA 12 and the CUDA 13 plugin are both installed; JAX uses either of them",
            remedy="pip uninstall jax-cuda12-plugin jax-cuda12-pjrt, or those of cuda13",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _jax_starts(facts: Mapping, _config: Config) -> Iterator[Trouble]:
    if error := facts["jax"]["error"]:
        yield Trouble(
            stops=True,
            what=f"JAX does not start: {error}",
            remedy="mend what the message names; `python -c 'import jax; print(jax.devices())'` shows all of it",
        )


def _driver(facts: Mapping, _config: Config) -> Iterator[Trouble]:
    nvidia, versions = facts["nvidia"], facts["packages"]
    if not facts["has_nvidia_device"]:
        return
    if nvidia is None:
        yield Trouble(
            stops=False,
            what="driver, memory and links of the GPUs are not known here",
            remedy="pip install 'jaxpar[doctor]' (nvidia-ml-py)",
        )
        return
    if nvidia["error"]:
        yield Trouble(
            stops=True,
            what=f"the NVIDIA driver does not answer: {nvidia['error']}",
            remedy="load the driver (nvidia-smi must work), or in a container start it with the NVIDIA runtime",
        )
        return
    for generation, (driver, cuda) in _MIN_DRIVER.items():
        if versions[f"jax-cuda{generation}-plugin"] and _release(nvidia["driver"]) < _release(driver):
            other = "use jaxpar[cuda12], or " if generation == "13" else ""
            yield Trouble(
                stops=True,
                what=f"driver {nvidia['driver']} (CUDA {nvidia['cuda']}) is too old for CUDA {generation}, which needs "
                f"{driver} (CUDA {cuda})",
                remedy=f"{other}update the driver",
            )


def _accelerator(facts: Mapping, config: Config) -> Iterator[Trouble]:
    plugins = [name for name in ("jax-cuda12-plugin", "jax-cuda13-plugin") if facts["packages"][name]]
    platform = facts["jax"].get("platform")
    if facts["has_nvidia_device"] and not plugins and not config.runtime.cpu_devices:
        yield Trouble(
            stops=True,
            what="this machine has an NVIDIA GPU, but JAX's CUDA plugin is not installed",
            remedy="pip install 'jaxpar[cuda12]', or ask for the CPU with runtime.cpu_devices=1",
        )
    elif platform == "cpu" and not config.runtime.cpu_devices:
        yield Trouble(
            stops=False,
            what="JAX finds no accelerator: a run would train on one CPU device",
            remedy="runtime.cpu_devices=8 simulates 8 devices; plan and verify need no GPU",
        )


def _config(facts: Mapping, config: Config) -> Iterator[Trouble]:
    """Rules of the config itself, now that the devices of this process are known."""
    devices = facts["jax"].get("devices")
    try:
        check(config, num_devices=devices * config.runtime.num_processes if devices else None)
    except ConfigError as error:
        for problem in error.problems:
            what = str(problem).split("\n")[0]
            yield Trouble(stops=True, what=what, remedy=problem.remedy)


def _gpus(facts: Mapping, config: Config) -> Iterator[Trouble]:
    nvidia = facts["nvidia"]
    if not nvidia or nvidia["error"] or config.runtime.cpu_devices:
        return
    gpus = nvidia["gpus"]
    names = sorted({gpu["name"] for gpu in gpus})
    if len(names) > 1:
        yield Trouble(
            stops=False,
            what=f"the GPUs differ ({', '.join(names)}): every step waits for the slowest",
            remedy="choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    for index, gpu in enumerate(gpus):
        wanted = config.runtime.memory_fraction * gpu["memory_bytes"]
        free = gpu["memory_bytes"] - gpu["used_bytes"]
        if free < wanted:
            yield Trouble(
                stops=True,
                what=f"GPU {index} has {free / _GIB:.1f} GiB free of {gpu['memory_bytes'] / _GIB:.1f}, and a run "
                f"reserves {wanted / _GIB:.1f} (runtime.memory_fraction = {config.runtime.memory_fraction})",
                remedy="end the other program on it (nvidia-smi names it), or lower runtime.memory_fraction to "
                f"{free / gpu['memory_bytes'] * 0.98:.2f}",
            )
    yield from _links(gpus, nvidia["links"], config)


def _links(gpus: list[Mapping], links: list[list[str]], config: Config) -> Iterator[Trouble]:
    """NVLink between all GPUs of a kind that has it."""
    pairs = [
        (one, other, links[one][other])
        for one in range(len(gpus))
        for other in range(one + 1, len(gpus))
        if links[one][other] != "NVLink"
    ]
    known = find_gpu(gpus[0]["name"]) if gpus else None
    if pairs and known is not None and known.domain_size > 1:
        one, other, path = pairs[0]
        yield Trouble(
            stops=False,
            what=f"{len(pairs)} pairs of GPUs do not reach each other over NVLink (GPU {one} and {other}: {path}), "
            f"which a {known.name} has: plans for it are too fast",
            remedy="check nvidia-smi topo -m and nvidia-smi nvlink --status, and the fabric manager; measure with "
            "jaxpar bench collectives",
        )
    elif pairs and config.mesh.tensor > 1:
        yield Trouble(
            stops=False,
            what=f"mesh.tensor = {config.mesh.tensor}, but GPUs are linked by PCIe ({pairs[0][2]}): its collectives "
            "delay every block",
            remedy="use mesh.fsdp instead; jaxpar plan compares",
        )
    counts = {gpu["nvlinks"] for gpu in gpus}
    if len(counts) > 1:
        yield Trouble(
            stops=False,
            what=f"the GPUs have different numbers of active NVLinks: {', '.join(str(gpu['nvlinks']) for gpu in gpus)}",
            remedy="a link is down: nvidia-smi nvlink --status, then the machine's vendor",
        )


def _processes(facts: Mapping, config: Config) -> Iterator[Trouble]:
    """What the launcher says against what the config says; jaxpar believes only the config."""
    launcher, runtime = facts["launcher"], config.runtime
    if launcher is not None and launcher["num_processes"] not in (None, runtime.num_processes):
        count, index = launcher["count_variable"], launcher["index_variable"]
        alone = "each would train by itself" if runtime.num_processes == 1 else "they would wait for each other"
        yield Trouble(
            stops=True,
            what=f"{launcher['name']} has started {launcher['num_processes']} processes, but runtime.num_processes = "
            f"{runtime.num_processes}: {alone}",
            remedy=f"runtime.num_processes=${count} runtime.process_id=${index} runtime.coordinator=HOST:PORT, "
            "with the host of process 0",
        )
    elif launcher is not None and runtime.num_processes > 1 and launcher["process_id"] != runtime.process_id:
        yield Trouble(
            stops=True,
            what=f"this is process {launcher['process_id']} of {launcher['name']}, but runtime.process_id = "
            f"{runtime.process_id}: two processes would have one number",
            remedy=f"runtime.process_id=${launcher['index_variable']}",
        )
    if facts["coordinator_error"]:
        yield Trouble(
            stops=True,
            what=f"runtime.coordinator = {runtime.coordinator!r} cannot be found: {facts['coordinator_error']}",
            remedy="give a name or address that every node knows: of the node of process 0",
        )
    files = facts["disk"]
    if runtime.num_processes > 1 and files["file_system"] in _LOCAL_FILE_SYSTEMS and not runtime.cpu_devices:
        yield Trouble(
            stops=False,
            what=f"run.dir = {files['path']!r} is on {files['file_system']}, a file system of this machine alone",
            remedy="with several nodes, name a directory on one that all of them share",
        )


def _variables(facts: Mapping, config: Config) -> Iterator[Trouble]:
    variables = facts["variables"]
    if all(variables.get(name) for name in _MEMORY_VARIABLES):
        yield Trouble(
            stops=True,
            what=f"{' and '.join(_MEMORY_VARIABLES)} are both set",
            remedy=f"unset {_MEMORY_VARIABLES[1]}, which is deprecated",
        )
    if facts["has_nvidia_device"] and variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Trouble(
            stops=not config.runtime.cpu_devices,
            what=f"CUDA_VISIBLE_DEVICES = {variables['CUDA_VISIBLE_DEVICES']!r} hides every GPU",
            remedy="unset it, or name the GPUs",
        )
    if config.runtime.num_processes == 1:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = variables.get(name, "")
        wanted = [part for part in asked.lstrip("=").split(",") if part] if not asked.startswith("^") else []
        if wanted and not any(own.startswith(part) for own in facts["interfaces"] for part in wanted):
            yield Trouble(
                stops=True,
                what=f"{name} = {asked!r}, but the network interfaces here are {', '.join(facts['interfaces'])}",
                remedy="name one of them, or unset it",
            )
    proxy = next((name for name in ("http_proxy", "HTTP_PROXY", "https_proxy") if variables.get(name)), None)
    host = (config.runtime.coordinator or "").rpartition(":")[0]
    direct = variables.get("no_proxy", variables.get("NO_PROXY", ""))
    if proxy and host and host not in direct.split(",") and direct != "*":
        yield Trouble(
            stops=False,
            what=f"{proxy} is set: JAX's processes may try to reach {host} through it",
            remedy=f"add {host} to no_proxy",
        )


def _disk(facts: Mapping, config: Config) -> Iterator[Trouble]:
    files = facts["disk"]
    if not files["writable"]:
        yield Trouble(
            stops=True,
            what=f"run.dir = {files['path']!r} cannot be written",
            remedy="name a directory that can: run.dir=DIR",
        )
    if reason := _PASSING_FILE_SYSTEMS.get(files["file_system"] or ""):
        yield Trouble(stops=False, what=f"run.dir = {files['path']!r} is on {reason}", remedy="name another run.dir")
    model, checkpoint = config.model, config.checkpoint
    if not model.vocab_size or files["free_bytes"] is None:
        return
    size = _STATE_BYTES * param_count(model)
    kept = checkpoint.keep + 1  # the oldest goes when the newest is whole
    free = f"{files['free_bytes'] / _GIB:.1f} GiB are free in {files['path']!r}"
    one = f"a checkpoint takes about {size / _GIB:.1f} GiB ({_STATE_BYTES} bytes per parameter)"
    if files["free_bytes"] < size:
        yield Trouble(stops=True, what=f"{free}, and {one}", remedy="free some, or name another run.dir")
    elif files["free_bytes"] < kept * size:
        yield Trouble(
            stops=False,
            what=f"{free}, {one}, and checkpoint.keep = {checkpoint.keep} needs room for {kept}",
            remedy=f"free some, or checkpoint.keep={max(1, int(files['free_bytes'] // size) - 1)}",
        )


def _limits(facts: Mapping, config: Config) -> Iterator[Trouble]:
    limits, several = facts["limits"], config.runtime.num_processes > 1
    open_files, locked = limits["open_files"], limits["locked_memory"]
    if open_files is not None and open_files < 4096:
        yield Trouble(
            stops=False,
            what=f"at most {open_files} files may be open: reading and writing checkpoints opens hundreds",
            remedy="ulimit -n 65536",
        )
    if facts["infiniband"] and several and locked is not None and locked < _GIB:
        yield Trouble(
            stops=True,
            what=f"at most {locked // 1024} KiB of memory may be locked, and NCCL locks buffers for InfiniBand "
            f"({', '.join(facts['infiniband'])})",
            remedy="ulimit -l unlimited; in a container --ulimit memlock=-1",
        )
    shared = facts["shared_memory"]["total_bytes"]
    gpus = len(facts["nvidia"]["gpus"]) if facts["nvidia"] and not facts["nvidia"]["error"] else 0
    if shared is not None and shared < _GIB and gpus > 1 and not config.runtime.cpu_devices:
        yield Trouble(
            stops=False,
            what=f"/dev/shm has {shared / 2**20:.0f} MiB, and NCCL exchanges through it between processes of a node",
            remedy="in a container --shm-size=1g or more",
        )
