"""``jaxpar doctor``: what it reads of a machine, and what it makes of it. GPUs are played by a module like pynvml."""

import copy
import json
import types

import pytest

from jaxpar.config import load_config
from jaxpar.experiments.diagnosis import diagnose
from jaxpar.experiments.machine import PACKAGES, disk, file_system, launcher, read_nvml
from tests.cli.command import Command

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


class NVMLError(Exception):
    pass


def fake_nvml(*, gpus=8, name=H100, used=GIB, nvlinks=18, paths=None, broken=False) -> types.SimpleNamespace:
    """As much of pynvml as a node of GPUs answers; ``paths`` are the pairs without NVLink and their PCIe levels."""

    def init():
        if broken:
            raise NVMLError("Driver Not Loaded")

    def link_state(_gpu, link):
        if link >= nvlinks:
            raise NVMLError("Not Supported")
        return 1

    def peer_status(one, other, _what):
        return 0 if (paths is None or (min(one, other), max(one, other)) not in paths) and nvlinks else 1

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"550.54.15",
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _gpu: name,
        nvmlDeviceGetMemoryInfo=lambda _gpu: types.SimpleNamespace(total=80 * GIB, used=used),
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetP2PStatus=peer_status,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: (paths or {}).get(
            (min(one, other), max(one, other)), 50
        ),
    )


def healthy() -> dict:
    """A node of 8 H100 on which a run of :func:`run` starts."""
    versions = dict.fromkeys(PACKAGES, "1.0")
    versions |= dict.fromkeys(("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt"), "0.12.0.1")
    versions |= dict.fromkeys([name for name in PACKAGES if "cuda13" in name])
    return {
        "packages": versions,
        "has_nvidia_device": True,
        "nvidia": read_nvml(fake_nvml()),
        "jax": {"error": None, "platform": "gpu", "device_kind": H100, "devices": 8, "notes": []},
        "variables": {},
        "launcher": None,
        "interfaces": ["lo", "eth0"],
        "infiniband": ["mlx5_0"],
        "coordinator_error": None,
        "disk": {"path": "runs/a", "file_system": "nfs4", "writable": True, "total_bytes": 2**44, "free_bytes": 2**43},
        "shared_memory": {"total_bytes": 2**36, "free_bytes": 2**36},
        "limits": {"open_files": 65536, "processes": None, "locked_memory": None},
    }


def run(*overrides: str):
    given = ["model.preset=llama-3.1-8b", "mesh.fsdp=-1", "train.global_batch_size=64", *overrides]
    keys = [override.partition("=")[0] for override in given]
    return load_config(None, [o for o, key in zip(given, keys, strict=True) if keys.count(key) == 1 or o in overrides])


def test_a_healthy_node_has_no_problem():
    assert diagnose(healthy(), run()) == []


def test_nvml_is_read():
    found = read_nvml(fake_nvml(gpus=3, paths={(0, 2): 50, (1, 2): 10}))
    assert (found["driver"], found["cuda"]) == ("550.54.15", "12.4")
    assert found["gpus"][1] == {"name": H100, "memory_bytes": 80 * GIB, "used_bytes": GIB, "nvlinks": 18}
    assert found["links"] == [["-", "NVLink", "SYS"], ["NVLink", "-", "PIX"], ["SYS", "PIX", "-"]]
    assert read_nvml(fake_nvml(broken=True)) == {"error": "Driver Not Loaded"}


TWO = ["runtime.num_processes=2", "runtime.coordinator=node0:1234"]
SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}


def changed(**changes) -> dict:
    """Facts with values replaced; ``a__b`` is facts["a"]["b"]."""
    facts = copy.deepcopy(healthy())
    for key, value in changes.items():
        table, _, name = key.partition("__")
        if name:
            facts[table][name.replace("_PLUGIN", "-plugin") if table == "packages" else name] = value
        else:
            facts[table] = value
    return facts


STOPS = {
    "jax and jaxlib apart": (changed(packages__jaxlib="0.11.2"), [], "jax 0.12.0.1 and jaxlib 0.11.2", "pip install"),
    "plugin of another release": (
        changed(packages={**healthy()["packages"], "jax-cuda12-plugin": "0.11.2"}),
        [],
        "jax-cuda12-plugin 0.11.2 does not belong to jaxlib 0.12.0.1",
        "jax-cuda12-plugin==0.12.0.1",
    ),
    "half a plugin": (
        changed(packages={**healthy()["packages"], "jax-cuda12-pjrt": None}),
        [],
        "only one is installed",
        "jax[cuda12]",
    ),
    "no plugin": (
        changed(packages={**healthy()["packages"], "jax-cuda12-plugin": None, "jax-cuda12-pjrt": None}),
        [],
        "CUDA plugin is not installed",
        "jaxpar[cuda12]",
    ),
    "JAX does not start": (changed(jax={"error": "no luck"}), [], "JAX does not start: no luck", "jax.devices()"),
    "no driver": (changed(nvidia=read_nvml(fake_nvml(broken=True))), [], "does not answer: Driver Not", "nvidia-smi"),
    "old driver": (
        changed(nvidia__driver="470.57.02"),
        [],
        "too old for CUDA 12, which needs 525",
        "update the driver",
    ),
    "mesh of other devices": (changed(jax__devices=4), ["mesh.fsdp=8"], "8 devices, but there are 4", "mesh.fsdp=4"),
    "GPU in use": (
        changed(nvidia=read_nvml(fake_nvml(used=40 * GIB))),
        [],
        "GPU 7 has 40.0 GiB free of 80.0",
        "memory_fraction to 0.49",
    ),
    "launcher ignored": (
        changed(launcher=launcher(SLURM)),
        [],
        "SLURM has started 2 processes",
        "runtime.process_id=$SLURM_PROCID",
    ),
    "numbers apart": (
        changed(launcher=launcher(SLURM)),
        TWO,
        "process 1 of SLURM, but runtime.process_id = 0",
        "$SLURM",
    ),
    "coordinator unknown": (changed(coordinator_error="not known"), TWO, "'node0:1234' cannot be found", "every node"),
    "memory twice": (
        changed(variables={"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".6"}),
        [],
        "both set",
        "unset",
    ),
    "GPUs hidden": (changed(variables={"CUDA_VISIBLE_DEVICES": ""}), [], "hides every GPU", "unset"),
    "no such interface": (
        changed(variables={"NCCL_SOCKET_IFNAME": "ib0"}),
        TWO,
        "interfaces here are lo, eth0",
        "unset",
    ),
    "not writable": (changed(disk__writable=False), [], "run.dir = 'runs/a' cannot be written", "run.dir=DIR"),
    "disk full": (changed(disk__free_bytes=50 * GIB), [], "a checkpoint takes about 89.7 GiB", "another run.dir"),
    "memory not locked": (changed(limits__locked_memory=65536), TWO, "InfiniBand (mlx5_0)", "ulimit -l"),
}

WARNINGS = {
    "no NVML": (changed(nvidia=None), [], "are not known here", "jaxpar[doctor]"),
    "no accelerator": (
        changed(has_nvidia_device=False, nvidia=None, jax__platform="cpu"),
        [],
        "no accelerator",
        "runtime.cpu_devices=8",
    ),
    "no NVLink": (
        changed(nvidia=read_nvml(fake_nvml(paths={(0, 1): 40}))),
        [],
        "1 pairs of GPUs",
        "jaxpar bench collectives",
    ),
    "tensor over PCIe": (
        changed(nvidia=read_nvml(fake_nvml(name="NVIDIA L40S", nvlinks=0))),
        ["mesh.tensor=2"],
        "linked by PCIe (SYS)",
        "fsdp",
    ),
    "local disk": (changed(disk__file_system="ext4"), TWO, "ext4, a file system of this machine alone", "share"),
    "disk in memory": (changed(disk__file_system="tmpfs"), [], "is on memory", "another run.dir"),
    "room for one": (
        changed(disk__free_bytes=300 * GIB),
        [],
        "checkpoint.keep = 3 needs room for 4",
        "checkpoint.keep=2",
    ),
    "few files": (changed(limits__open_files=1024), [], "at most 1024 files", "ulimit -n"),
    "little shared memory": (changed(shared_memory__total_bytes=64 * 2**20), [], "/dev/shm has 64 MiB", "--shm-size"),
    "proxy": (changed(variables={"http_proxy": "http://proxy"}), TWO, "may try to reach node0 through it", "no_proxy"),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_a_run(name):
    facts, overrides, what, remedy = STOPS[name]
    first = diagnose(facts, run(*overrides))[0]
    assert first.stops
    troubles = [trouble for trouble in diagnose(facts, run(*overrides)) if what in trouble.what]
    assert troubles, diagnose(facts, run(*overrides))
    assert all(trouble.stops for trouble in troubles)
    assert remedy in troubles[0].remedy


@pytest.mark.parametrize("name", WARNINGS)
def test_what_is_to_be_known(name):
    facts, overrides, what, remedy = WARNINGS[name]
    (trouble,) = diagnose(facts, run(*overrides))
    assert not trouble.stops
    assert what in trouble.what
    assert remedy in trouble.remedy


def test_launchers_are_told_by_their_variables():
    assert launcher({}) is None
    found = launcher(SLURM)
    assert (found["name"], found["num_processes"], found["process_id"]) == ("SLURM", 2, 1)
    found = launcher({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"})
    assert (found["name"], found["num_processes"], found["process_id"]) == ("Open MPI", 4, 3)
    found = launcher({"JOB_COMPLETION_INDEX": "5", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (found["num_processes"], found["process_id"]) == (None, 5)


def test_the_file_system_of_a_path_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\nserver:/x /mnt/data nfs4 rw 0 0\ntmpfs /mnt/data/my\\040tmp tmpfs rw 0 0\n"
    )
    cases = {"/mnt/data": "nfs4", "/mnt/data/my tmp/x": "tmpfs", "/mnt/database": "overlay", "/": "overlay"}
    for path, kind in cases.items():
        assert file_system(type(tmp_path)(path), mounts) == kind
    assert file_system(tmp_path, tmp_path / "none") is None
    found = disk(tmp_path / "not" / "yet" / "there")
    assert found["writable"]
    assert 0 < found["free_bytes"] <= found["total_bytes"]


def test_command_says_what_stops_a_run_and_exits_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "0")
    jaxpar = Command(monkeypatch, capsys)
    fake = ["runtime.cpu_devices=2", "mesh.fsdp=-1"]
    result = jaxpar("doctor", *fake, "--json")
    report = json.loads(result.out)
    assert (result.code, report["ok"]) == (1, False)
    assert [problem["what"].split(",")[0] for problem in report["problems"]] == ["SLURM has started 3 processes"]
    assert (report["jax"]["devices"], report["jax"]["platform"], report["variables"]["SLURM_NTASKS"]) == (2, "cpu", "3")
    monkeypatch.delenv("SLURM_PROCID")
    monkeypatch.setattr("jaxpar.experiments.machine.ask_jax", lambda *_: report["jax"])
    result = jaxpar("doctor", *fake)
    assert result.code == 0
    assert "2 x cpu (cpu)" in result.out
    assert "nothing here stops a run" in result.out
    assert jaxpar("doctor", "mesh.fdsp=2").code == 2
