"""``jaxpar bench collectives``: what it runs, how bandwidth is defined, and that plan calculates with the file."""

import json
import math

import jax
import numpy as np
import pytest

from jaxpar.experiments.collectives import collective, filled
from jaxpar.experiments.links import OPS, Measured, Measurement, cluster_text, link_bandwidths, strides
from jaxpar.mesh import make_mesh
from jaxpar.plan.topology import read_cluster
from tests.cli.command import Command, ended, finish, free_port, start

GB = 1e9


def found(op, *, devices=8, stride=1, size=8 * 2**20, seconds=1e-3, axis="fsdp") -> Measurement:
    return Measurement(axis=axis, op=op, devices=devices, stride=stride, bytes=size, seconds=seconds)


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all-reduce", 14 / 8), ("all-gather", 7 / 8), ("reduce-scatter", 7 / 8), ("all-to-all", 7 / 8), ("permute", 1)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op, factor):
    """Factors of nccl-tests' doc/PERFORMANCE.md for 8 ranks."""
    measurement = found(op)
    assert measurement.algorithm_bandwidth == pytest.approx(8 * 2**20 / 1e-3)
    assert measurement.bus_bandwidth == pytest.approx(factor * 8 * 2**20 / 1e-3)


def test_strides_follow_the_order_of_the_axes():
    assert strides((("data", 4), ("fsdp", 3), ("tensor", 2))) == {"data": 6, "fsdp": 2, "tensor": 1}


@pytest.mark.parametrize("op", OPS)
def test_collectives_move_what_they_say(op):
    mesh = make_mesh({"data": 2, "fsdp": 4}, jax.devices()[:8])
    items = 8
    start_values = np.asarray(filled(mesh, items)).reshape(2, 4, items)
    assert start_values[1, 2].tolist() == [7.0] * items
    result = np.asarray(collective(mesh, "fsdp", op)(filled(mesh, items))).reshape(2, 4, -1)
    row = np.arange(5, 9)
    expected = {
        "all-reduce": np.full((4, 8), 26),
        "all-gather": np.tile(np.repeat(row, 8), (4, 1)),
        "reduce-scatter": np.full((4, 2), 26),
        "all-to-all": np.tile(np.repeat(row, 2), (4, 1)),
        "permute": np.repeat(np.roll(row, 1)[:, None], 8, axis=1),
    }[op]
    assert np.array_equal(result[1], expected)


def two_nodes(*measurements: Measurement) -> Measured:
    """Of 16 H100, 8 a node."""
    return Measured(
        device_kind="NVIDIA H100 80GB HBM3", num_devices=16, num_nodes=2, by="a test", measurements=measurements
    )


def test_links_inside_and_across_nodes():
    size = 80 * 10**6
    inside = {"devices": 8, "stride": 1, "axis": "fsdp"}
    across = {"devices": 2, "stride": 8, "axis": "data"}
    measured = two_nodes(
        found("all-gather", size=1000, seconds=1.0, **inside),  # small messages do not count
        found("all-gather", size=size, seconds=0.07 / 300, **inside),
        found("reduce-scatter", size=size, seconds=0.07 / 320, **inside),
        found("all-reduce", size=size, seconds=0.14 / 310, **inside),
        found("all-to-all", size=size, seconds=0.07 / 250, **inside),
        found("all-gather", size=size, seconds=0.04 / 40, **across),
        found("all-to-all", size=size, seconds=0.04 / 20, **across),
        found("permute", size=size, seconds=1.0, **across),
    )
    links = {name: round(value / GB, 6) for name, value in link_bandwidths(measured).items()}
    assert links == {"intra": 310, "inter": 40, "all_to_all_intra": 250, "all_to_all_inter": 20}
    # A ring of all 16 enters each node with the interfaces of its 8 members; half of an exchange leaves the node.
    whole = {"devices": 16, "stride": 1, "axis": "fsdp"}
    measured = two_nodes(
        found("all-gather", size=size, seconds=0.075 / 240, **whole),
        found("all-to-all", size=size, seconds=0.04 / 20, **whole),
    )
    assert {n: round(v / GB, 6) for n, v in link_bandwidths(measured).items()} == {"inter": 30, "all_to_all_inter": 20}


def test_plan_calculates_with_what_was_measured(tmp_path, monkeypatch, capsys):
    jaxpar = Command(monkeypatch, capsys)
    size = 80 * 10**6
    measured = two_nodes(
        found("all-gather", size=size, seconds=0.07 / 100),
        found("all-gather", size=size, devices=2, stride=8, axis="data", seconds=0.04 / 5),
    )
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(measured))
    described = read_cluster(path)
    assert (described.num_devices, described.num_nodes, described.gpu.name) == (16, 2, "H100 SXM")
    assert (described.links.intra, described.links.inter) == (pytest.approx(100 * GB), pytest.approx(5 * GB))
    model = ["model.preset=llama-3.1-8b", "data.seq_len=8192", "train.global_batch_size=16", "mesh.fsdp=-1"]
    of_catalogue = json.loads(jaxpar("plan", *model, "--devices", "16", "--gpu", "h100", "--json").out)
    report = json.loads(jaxpar("plan", *model, "--cluster", str(path), "--json").out)
    assert (of_catalogue["links"], report["links"]) == ("catalogue", "a test")
    (gather,) = [row for row in report["communication"] if row["op"] == "all-gather"]
    # 8 members of a node share its 8 interfaces; the link of 100 GB/s is not what limits here.
    assert gather["bytes"] / gather["seconds"] == pytest.approx(40 * GB, rel=0.05)
    assert report["time"]["step_s"] > of_catalogue["time"]["step_s"]
    other = jaxpar("plan", *model, "--cluster", str(path), "--gpu", "b200")
    assert "warning: not used, because it was not on a B200: a test" in other.err


MOE = ["--model", "mixtral-8x7b", "mesh.expert=8", "mesh.fsdp=8", "train.global_batch_size=64", "data.seq_len=4096"]


def test_large_mixture_of_experts_without_a_measured_exchange_is_warned_of(tmp_path, monkeypatch, capsys):
    jaxpar = Command(monkeypatch, capsys)

    def rules(*arguments: str) -> set[str]:
        report = json.loads(jaxpar("plan", *MOE, *arguments, "--json").out)
        return {problem["rule"] for problem in report["problems"]}

    assert "all_to_all_unmeasured" in rules("--devices", "64", "--gpu", "h100")
    path = tmp_path / "cluster.toml"
    ring = found("all-gather", size=2**27)
    path.write_text(cluster_text(two_nodes(ring)))
    assert "all_to_all_unmeasured" in rules("--devices", "64", "--cluster", str(path))
    path.write_text(cluster_text(two_nodes(ring, found("all-to-all", size=2**27))))
    assert "all_to_all_unmeasured" not in rules("--devices", "64", "--cluster", str(path))


def test_command_measures_the_axes_that_have_devices(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cluster.toml"
    options = ["--max", "8KiB", "--min", "1KiB", "--iterations", "2", "--op", "all-gather", "--op", "all-to-all"]
    fake = ["mesh.data=2", "mesh.fsdp=-1", "runtime.cpu_devices=8"]
    result = Command(monkeypatch, capsys)("bench", "collectives", *fake, *options, "--out", str(out), "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    rows = [(row["axis"], row["op"], row["devices"], row["stride"], row["bytes"]) for row in report["collectives"]]
    assert rows == [
        (axis, op, devices, stride, size)
        for axis, devices, stride in (("data", 2, 4), ("fsdp", 4, 1))
        for op in ("all-gather", "all-to-all")
        for size in (1024, 8192)
    ]
    assert all(row["seconds"] > 0 and math.isfinite(row["bus_bytes_per_s"]) for row in report["collectives"])
    assert read_cluster(out).links.by == report["by"]
    assert read_cluster(out).gpu is None


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--max", "1KiB"], "--max"),
        (["--min", "lots"], "--min"),
        (["--op", "gossip"], "--op"),
        (["--out", "no-such-folder/cluster.toml"], "--out"),
        (["mesh.fsdp=3"], "mesh"),
        (["mesh.fdsp=3"], "mesh.fdsp"),
    ],
)
def test_bad_input_is_named(monkeypatch, capsys, arguments, key):
    result = Command(monkeypatch, capsys)("bench", "collectives", "runtime.cpu_devices=8", *arguments)
    assert result.code == 2
    assert f"error: {key}" in result.err


@pytest.mark.proof
def test_two_processes_measure_together(tmp_path):
    together = ["runtime.num_processes=2", f"runtime.coordinator=127.0.0.1:{free_port()}", "runtime.cpu_devices=2"]
    options = ["--max", "64KiB", "--iterations", "2", "--json", "--out", "cluster.toml"]
    processes = [
        start(
            "bench", "collectives", "mesh.data=2", "mesh.fsdp=2", f"runtime.process_id={i}", *together, *options,
            cwd=tmp_path,
        )
        for i in range(2)
    ]  # fmt: skip
    with ended(*processes):
        first, second = [finish(process) for process in processes]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.out == ""
    report = json.loads(first.out)
    assert "2 processes x 2 = 4 devices" in report["by"]
    assert len(report["collectives"]) == 2 * len(OPS)
    assert (tmp_path / "cluster.toml").is_file()
