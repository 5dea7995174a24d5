"""Time: bubbles, bytes on the wire by hand, links, and that more of anything slow is never faster."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS, ConfigError
from jaxpar.plan.catalogue import GPUS, gpu_named
from jaxpar.plan.layout import mesh_layout
from jaxpar.plan.shape import PUBLIC_SHAPES, shape_of
from jaxpar.plan.time import step_time, tokens_per_s_per_device, utilisation
from jaxpar.plan.topology import make_cluster

EIGHT_B = shape_of(PRESETS["llama-3.1-8b"].model)
ONE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


def cluster(devices, gpu="h100", nodes=None):
    return make_cluster(gpu_named(gpu), num_devices=devices, num_nodes=nodes)


def layout(rows=1, microbatches=1, **axes_and_settings):
    mesh = ONE | {axis: size for axis, size in axes_and_settings.items() if axis in ONE}
    others = {name: value for name, value in axes_and_settings.items() if name not in ONE}
    shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    return mesh_layout(
        mesh, global_batch_size=rows * shards * microbatches, seq_len=8192, microbatches=microbatches, **others
    )


def collective(time, axis, op):
    (found,) = [c for c in time.collectives if (c.axis, c.op) == (axis, op)]
    return found


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "percent"),
    [(4, 4, 1, 42.9), (4, 8, 1, 27.3), (4, 16, 1, 15.8), (4, 8, 2, 15.8), (8, 32, 1, 17.9), (16, 16, 1, 48.4),
     (8, 64, 8, 1.35), (4, 2, 1, 60.0)],
)  # fmt: skip
def test_bubbles(stages, microbatches, chunks, percent):
    schedule = "interleaved" if chunks > 1 else "gpipe"
    spread = layout(pipeline=stages, microbatches=microbatches, chunks=chunks, schedule=schedule)
    time = step_time(EIGHT_B, spread, cluster(stages))
    assert 100 * time.bubble_fraction == pytest.approx(percent, abs=0.06)
    in_pipeline = time.step_s - time.optimizer_s - sum(c.exposed_s for c in time.collectives if c.axis == "fsdp")
    assert time.bubble_s / in_pipeline == pytest.approx(time.bubble_fraction)


def test_fsdp_bytes_by_hand():
    time = step_time(EIGHT_B, layout(fsdp=64, microbatches=2), cluster(64))
    matrices = EIGHT_B.total_params - EIGHT_B.vector_params
    assert collective(time, "fsdp", "all-gather").bytes == pytest.approx(2 * 2 * 2 * matrices * 63 / 64)
    assert collective(time, "fsdp", "reduce-scatter").bytes == pytest.approx(2 * 4 * matrices * 63 / 64)
    assert collective(time, "fsdp", "all-gather").link == "network"


def test_a_stage_repeats_its_forward_pass_once_and_gathers_three_times():
    one, staged = layout(fsdp=8), layout(pipeline=2, fsdp=4, microbatches=2)
    assert (one.recompute, staged.recompute) == (1.0, pytest.approx(1.2))
    time = step_time(EIGHT_B, staged, cluster(8))
    matrices = (EIGHT_B.total_params - EIGHT_B.vector_params) / 2
    assert collective(time, "fsdp", "all-gather").bytes == pytest.approx(2 * 3 * 2 * matrices * 3 / 4)
    assert collective(time, "fsdp", "reduce-scatter").bytes == pytest.approx(2 * 4 * matrices * 3 / 4)


def test_ddp_and_hybrid_bytes_by_hand():
    matrices = EIGHT_B.total_params - EIGHT_B.vector_params
    ddp = step_time(EIGHT_B, layout(data=64), cluster(64))
    assert collective(ddp, "data", "all-reduce").bytes == pytest.approx(2 * 4 * matrices * 63 / 64)
    hybrid = step_time(EIGHT_B, layout(data=8, fsdp=8, microbatches=4), cluster(64))
    assert collective(hybrid, "data", "all-reduce").bytes == pytest.approx(2 * 4 * matrices / 8 * 7 / 8)
    assert (collective(hybrid, "data", "all-reduce").link, collective(hybrid, "fsdp", "all-gather").link) == (
        "network",
        "NVLink",
    )


def test_tensor_bytes_by_hand():
    time = step_time(EIGHT_B, layout(tensor=4, remat="full"), cluster(8))
    moved = collective(time, "tensor", "all-gather, reduce-scatter")
    # 4 collectives a block forward, 4 backward, 4 again under full remat, each (t - 1) / t of S x D in bfloat16.
    assert moved.count == 12 * 32
    assert moved.bytes == pytest.approx(12 * 32 * 8192 * 4096 * 2 * 3 / 4)


def test_rings_across_nodes_use_every_network_interface_of_a_node():
    machine = cluster(64)
    nic, link = machine.network_bandwidth, machine.gpu.link_bandwidth * machine.link_share
    assert machine.ring_bandwidth(1, 8) == link
    assert machine.ring_bandwidth(1, 64) == min(link, 8 * nic)
    assert machine.ring_bandwidth(4, 16) == 2 * nic
    assert machine.ring_bandwidth(8, 8) == nic
    assert [machine.link_name(1, 8), machine.link_name(8, 8)] == ["NVLink", "network"]
    assert cluster(72, "gb200").link_name(1, 72) == "NVLink"
    assert cluster(8, "l40s").link_name(1, 8) == "PCIe"
    assert cluster(8, "h100-nvl").link_name(1, 2) == "NVLink"


def test_every_gpu_that_was_asked_for_is_known_by_its_short_name():
    short = ["a100-40", "a100-80", "a100", "h100", "h100-pcie", "h100-nvl", "h200", "b200", "gb200", "l40s", "rtx4090"]
    assert len({gpu_named(name).name for name in short}) == len(short) - 1
    assert all(gpu_named(gpu.name) is gpu for gpu in GPUS)
    with pytest.raises(ConfigError, match="did you mean"):
        gpu_named("rtx4091")


def test_nodes_divide_the_devices():
    assert cluster(64).num_nodes == 8
    assert cluster(64, "gb200").devices_per_node == 4
    assert cluster(4).num_nodes == 1
    with pytest.raises(ConfigError, match="do not divide"):
        cluster(64, nodes=7)


def test_parts_add_up_and_rates_follow():
    spread = layout(data=2, fsdp=4, tensor=2, pipeline=2, microbatches=4)
    time = step_time(EIGHT_B, spread, cluster(32))
    assert time.compute_s + time.exposed_comm_s + time.bubble_s == pytest.approx(time.step_s)
    rate = tokens_per_s_per_device(spread, time.step_s)
    assert rate * time.step_s * 32 == pytest.approx(8 * 4 * 8192)
    assert utilisation(EIGHT_B, spread, cluster(32), time.step_s) == pytest.approx(rate * 5.147e10 / 989e12, rel=1e-3)


settings_of_a_step = st.fixed_dictionaries(
    {axis: st.sampled_from([1, 2, 4, 8]) for axis in ("pipeline", "data", "fsdp", "context", "tensor")}
    | {"microbatches": st.sampled_from([8, 16]), "remat": st.sampled_from(["none", "full"])}
)


@settings(deadline=None, max_examples=60)
@given(settings_of_a_step, st.sampled_from(["a100", "h100", "b200", "l40s", "gb200"]))
def test_slower_hardware_and_more_work_are_never_faster(chosen, gpu):
    spread = layout(**chosen)
    machine = cluster(spread.num_devices, gpu)
    time = step_time(EIGHT_B, spread, machine)
    assert time.step_s > 0
    assert all(c.exposed_s >= 0 and c.bytes > 0 and c.seconds > 0 for c in time.collectives)
    for field in ("bfloat16_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        slower = dataclasses.replace(machine.gpu, **{field: getattr(machine.gpu, field) / 2})
        assert step_time(EIGHT_B, spread, dataclasses.replace(machine, gpu=slower)).step_s >= time.step_s * (1 - 1e-9)
    assert step_time(EIGHT_B, dataclasses.replace(spread, rows=2), machine).step_s > time.step_s
    assert step_time(EIGHT_B, dataclasses.replace(spread, recompute=2.0), machine).step_s >= time.step_s
    assert time.step_s < step_time(PUBLIC_SHAPES["deepseek-v3"], dataclasses.replace(spread, expert=1), machine).step_s
    ideal = EIGHT_B.training_flops_per_token(8192) * spread.global_batch_size * 8192 / machine.gpu.bfloat16_flops
    assert time.step_s * spread.num_devices > ideal
