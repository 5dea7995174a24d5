"""What compiling does before and after the compiler: targets, what is asked, and every way in which it can fail."""

import dataclasses
import importlib.metadata
import json

import pytest

from jaxpar.config import ConfigError, load_config
from jaxpar.experiments.compile import (
    CollectiveRow,
    CompileFailed,
    CompileOutcome,
    Lint,
    compile_step,
    cpu_target,
    gpu_target,
    gpu_targets,
    launch,
    targets,
)
from jaxpar.plan.catalogue import GPUS, find_gpu, gpu_named
from jaxpar.plan.topology import make_cluster

TINY = [
    "model.vocab_size=257",
    "model.embed_dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.mlp_dim=64",
    "mesh.fsdp=8",
]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(targets, "_is_installed", lambda package: True)


def cluster(name, num_devices, num_nodes=None):
    return make_cluster(gpu_named(name), num_devices=num_devices, num_nodes=num_nodes)


def test_every_target_is_a_gpu_of_the_catalogue():
    by_name = {gpu.name: gpu for gpu in GPUS}
    for name, target in gpu_targets().items():
        assert find_gpu(target.kind) is by_name[name]
        assert target.memory == pytest.approx(by_name[name].memory_bytes, rel=0.04)
        assert target.bandwidth == pytest.approx(by_name[name].memory_bandwidth, rel=0.06)
        description = target.description()
        assert f"core_count: {target.cores} " in description
        assert ("ACCELERATED_FEATURES" in description) == (target.capability >= (9, 0))


@pytest.mark.parametrize(("devices", "nodes", "topology"), [(8, None, "1x1x8"), (64, None, "8x1x8"), (4, 2, "2x1x2")])
def test_nodes_are_domains(installed, devices, nodes, topology):
    target = gpu_target(cluster("h100", devices, nodes))
    assert target.topology == topology
    assert target.label.startswith(f"{devices} x H100 SXM")
    assert "compiler estimate" in target.label
    assert "fake CPU" in cpu_target(8).label


def test_a_gpu_that_the_compiler_does_not_know(installed):
    with pytest.raises(ConfigError, match=r"H100 SXM.*--compile cpu") as error:
        gpu_target(cluster("rtx4090", 2))
    assert error.value.problems[0].key == "--gpu"


def test_a_missing_compiler_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(targets, "_is_installed", lambda package: package == "jax-cuda12-plugin")
    with pytest.raises(ConfigError) as error:
        gpu_target(cluster("h100", 8))
    (problem,) = error.value.problems
    assert "missing: jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12" in problem.message
    version = importlib.metadata.version("jax")
    command = f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12==12.9.86"
    assert command in problem.remedy


def test_neither_data_nor_run_directory_need_exist(tmp_path):
    config = load_config(None, [*TINY, "data.source=text", 'data.paths=["/absent/*.txt"]', "data.seq_len=64"])
    elsewhere = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(tmp_path / "absent")))
    asked = launch.program_config(elsewhere)
    assert asked.data.source == "synthetic"
    assert (asked.data.seq_len, asked.model, asked.mesh) == (64, config.model, config.mesh)


def test_a_vocabulary_of_unknown_size_is_asked_for():
    config = load_config(None, [*TINY[1:], "data.source=text", "data.tokenizer=/absent/tokenizer.json"])
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        launch.program_config(config)


def test_what_cannot_be_trained_is_refused_before_compiling():
    with pytest.raises(ConfigError, match=r"mesh\.fsdp"):
        compile_step(load_config(None, TINY), cpu_target(6))


@pytest.mark.parametrize(
    ("fails", "text"), [("abort", "died of SIGABRT"), ("raise", "no such option"), ("hang", "timed out after")]
)
def test_failures_are_told_with_the_last_words(monkeypatch, fails, text):
    monkeypatch.setattr(launch, "WORKER", "tests.experiments.stand_in_worker")
    monkeypatch.setenv("FAILS", fails)
    with pytest.raises(CompileFailed, match=text) as error:
        compile_step(load_config(None, TINY), cpu_target(8), timeout_s=2 if fails == "hang" else 60)
    assert ("the compiler's last words" in str(error.value)) == (fails != "hang")


def test_the_outcome_goes_through_json():
    row = CollectiveRow(
        op="all-gather",
        axis="fsdp",
        loop="forward",
        trips=4,
        count=2,
        bytes=8,
        dtype="bf16",
        is_async=True,
        overlapped=3,
        products=1,
    )
    outcome = CompileOutcome(
        target="t",
        peak_bytes=1,
        argument_bytes=2,
        temp_bytes=3,
        collectives=(row,),
        wire_bytes=4.0,
        hidden_share=None,
        conditionals=0,
        custom_calls={"__cudnn$fmhaSoftmax": 2},
        attention="attention xla",
        grouped=None,
        options={"a": 1},
        lints=(Lint(rule="r", message="m"),),
        lower_s=1.0,
        compile_s=2.0,
        cpu_s=3.0,
        max_rss_bytes=5,
    )
    values = json.loads(json.dumps(outcome.to_dict()))
    wanted = {"op", "axis", "loop", "trips", "count", "bytes", "dtype", "async", "overlapped", "products"}
    assert set(values["collectives"][0]) == wanted
    assert CompileOutcome.from_dict(values) == outcome
