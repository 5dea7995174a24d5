"""Memory: the ZeRO paper's table, the compiler's peak of the 8B program, published sizes, and properties."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS
from jaxpar.config.schema import AXES
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import Task, evaluate
from jaxpar.plan.layout import SAVED_WORK, Layout, mesh_layout, recompute_share
from jaxpar.plan.memory import (
    BFLOAT16_STATE,
    FLOAT32_STATE,
    StateBytes,
    buffer_slots,
    kept_per_token,
    state_memory,
    training_memory,
)
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster
from jaxpar.plan.variations import variations
from jaxpar.schedule import build_schedule

GIB = 2**30
EIGHT_B = shape_of(PRESETS["llama-3.1-8b"].model)
# Mixed precision as in the paper: 16-bit weights and gradients; float32 master weights and two moments.
ZERO_PAPER_STATE = StateBytes(params=2, grads=2, optimizer=12)
MIXTRAL = shape_of(PRESETS["mixtral-8x7b"].model)


@pytest.mark.parametrize(
    ("params", "shards", "published"),
    [  # arXiv 1910.02054, table 1; GB for DDP, ZeRO-1, ZeRO-2, ZeRO-3
        (7.5e9, 4, (120, 52.5, 41.3, 30)),
        (7.5e9, 16, (120, 35.6, 21.6, 7.5)),
        (7.5e9, 64, (120, 31.4, 16.6, 1.88)),
        (7.5e9, 1024, (120, 30.1, 15.1, 0.12)),
        (128e9, 64, (2048, 536, 284, 32)),
        (1e12, 1024, (16000, 4012, 2014, 15.6)),
    ],
)
def test_zero_table(params, shards, published):
    for strategy, gigabytes in zip(("none", "optimizer", "grads", "full"), published, strict=True):
        total = sum(state_memory(params, shards, strategy, ZERO_PAPER_STATE)) / 1e9
        assert total == pytest.approx(gigabytes, rel=0.005, abs=0.01)


@pytest.mark.parametrize(
    ("preset", "shards", "gib"),
    [("llama-3.1-8b", 8, 14.96), ("llama-3.1-8b", 128, 0.93), ("llama-3.1-405b", 512, 11.81)],
)
def test_float32_state_of_public_models(preset, shards, gib):
    shape = shape_of(PRESETS[preset].model)
    assert sum(state_memory(shape.total_params, shards, "full")) / GIB == pytest.approx(gib, abs=0.01)


GOLDEN = Path(__file__).parents[1] / "golden"
"""Layouts that the trainer itself gives every array of its state, with bytes per device."""
STATES = [
    ("llama-3.1-8b", "llama-3.1-8b_fsdp8"), ("llama-3.1-8b", "llama-3.1-8b_data2_fsdp4"),
    ("llama-3.1-8b", "llama-3.1-8b_fsdp4_tensor2"), ("llama-3.1-8b", "llama-3.1-8b_bfloat16_data8"),
    ("qwen3-8b", "qwen3-8b_data2_fsdp2_tensor2"), ("qwen2.5-0.5b", "qwen2.5-0.5b_fsdp4_tensor2"),
    ("tiny-bytes", "config_quickstart"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "golden"), STATES)
def test_state_is_that_of_the_trainer_to_the_byte(preset, golden):
    header, _, *rows = (GOLDEN / f"{golden}.txt").read_text(encoding="utf-8").splitlines()
    mesh = dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1)
    mesh |= {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", header)}
    held = {"params": 0, "optimizer": 0}
    for part, size in ((row.split(".")[0], row.split()[-1]) for row in rows):
        if part in held:
            held[part] += int(size.replace(",", ""))
    state = BFLOAT16_STATE if "bfloat16" in golden else FLOAT32_STATE
    layout = mesh_layout(mesh, global_batch_size=64, seq_len=256)
    planned = training_memory(shape_of(PRESETS[preset].model), layout, device_bytes=0, state=state)
    # Query, key and value biases are split by the tensor axis, and planned as whole: 0.02% of the smallest Qwen.
    exact = 3e-4 if preset.startswith("qwen2") else 1e-9
    assert held["params"] == pytest.approx(planned.params, rel=exact)
    assert held["optimizer"] == pytest.approx(planned.optimizer, rel=exact, abs=64)


# (devices, rows, remat, chunks of the head, peak GiB that the CUDA compiler reports), llama-3.1-8b, 8192 tokens a row.
COMPILED = [
    (8, 1, "full", 8, 21.58), (8, 1, "full", 1, 23.54), (8, 1, "selective", 8, 28.26), (8, 1, "dots", 8, 40.44),
    (8, 2, "full", 8, 24.80), (8, 2, "full", 1, 30.67), (8, 2, "selective", 8, 38.70), (8, 2, "dots", 8, 62.88),
    (64, 1, "full", 8, 7.69), (64, 1, "selective", 8, 14.61), (64, 2, "full", 8, 11.15), (64, 2, "selective", 8, 25.05),
    (64, 2, "full", 1, 17.03), (64, 2, "selective", 1, 30.91),
]  # fmt: skip


def fsdp(shards: int, rows: int, remat: str) -> Layout:
    mesh = {"pipeline": 1, "data": 1, "fsdp": shards, "expert": 1, "context": 1, "tensor": 1}
    return mesh_layout(mesh, global_batch_size=rows * shards, seq_len=8192, remat=remat)


@pytest.mark.parametrize(("devices", "rows", "remat", "chunks", "peak_gib"), COMPILED)
def test_peak_is_that_of_the_compiler(devices, rows, remat, chunks, peak_gib):
    memory = training_memory(
        EIGHT_B, fsdp(devices, rows, remat), device_bytes=0, memory_fraction=1, loss_chunk_tokens=rows * 8192 // chunks
    )
    assert memory.total_bytes / GIB == pytest.approx(peak_gib, rel=0.1 if chunks == 1 else 0.025)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth_first"])
def test_buffer_slots_are_those_of_the_table(schedule):
    assert buffer_slots(fsdp(8, 1, "full")) == 0
    chunk_counts = (1,) if schedule in ("gpipe", "1f1b") else (2, 4)
    for stages, chunks in itertools.product((2, 4, 8), chunk_counts):
        for m in (stages, stages + 1, 2 * stages, 3 * stages + 1, 8 * stages):
            table = build_schedule(schedule, num_stages=stages, num_microbatches=m, num_chunks=chunks)
            spread = dataclasses.replace(
                fsdp(8, 1, "full"), pipeline=stages, microbatches=m, chunks=chunks, schedule=schedule
            )
            assert buffer_slots(spread) == table.num_activation_slots + table.num_gradient_slots


PIPELINES = {
    "1f1b": (8, {}, 9.15),
    "1f1b, 8 layers per stage": (32, {}, 26.43),
    "gpipe": (8, {"schedule": "gpipe", "microbatches": 32}, 11.13),
    "interleaved": (16, {"schedule": "interleaved", "microbatches": 8, "chunks": 2}, 15.04),
}
"""8B with so many layers on pipeline=4 x fsdp=2, rows of 4,096 tokens: the CUDA compiler's peak, GB."""


@pytest.mark.parametrize("name", PIPELINES)
def test_peak_of_a_pipeline_is_that_of_the_compiler(name):
    num_layers, changes, peak_gb = PIPELINES[name]
    mesh = {"pipeline": 4, "data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
    settings = {"microbatches": 4, **changes}
    spread = mesh_layout(mesh, global_batch_size=2 * settings["microbatches"], seq_len=4096, **settings)
    shape = shape_of(dataclasses.replace(PRESETS["llama-3.1-8b"].model, num_layers=num_layers))
    found = training_memory(shape, spread, device_bytes=0, memory_fraction=1)
    assert found.total_bytes / 1e9 == pytest.approx(peak_gb, rel=0.05)


# (preset, mesh, rows and microbatches of a step, receive factor, peak GiB that the CUDA compiler reports), 8192 tokens.
EXPERTS = [
    ("mixtral-8x7b", {"fsdp": 8, "expert": 8}, (256, 2), 0.0, 42.75),
    ("mixtral-8x7b", {"fsdp": 8, "expert": 8}, (256, 2), 1.5, 28.38),
    ("qwen3-235b-a22b", {"data": 4, "fsdp": 8, "expert": 16}, (1024, 1), 0.0, 180.75),
    ("qwen3-235b-a22b", {"data": 4, "fsdp": 16, "expert": 8}, (1024, 1), 1.5, 63.2),
]


@pytest.mark.parametrize(("preset", "axes", "batch", "factor", "peak_gib"), EXPERTS)
def test_peak_of_experts_is_that_of_the_compiler(preset, axes, batch, factor, peak_gib):
    mesh = dict.fromkeys(AXES, 1) | axes
    settings = {"global_batch_size": batch[0], "microbatches": batch[1], "receive_factor": factor, "is_packed": True}
    spread = mesh_layout(mesh, seq_len=8192, **settings)
    found = training_memory(shape_of(PRESETS[preset].model), spread, device_bytes=0, memory_fraction=1)
    assert found.total_bytes / GIB == pytest.approx(peak_gib, rel=0.03)


sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw, shape=EIGHT_B):
    mesh = {axis: draw(sizes) for axis in ("pipeline", "data", "fsdp", "context", "tensor")}
    mesh["expert"] = draw(sizes) if shape.num_experts else 1
    microbatches = mesh["pipeline"] * draw(sizes)
    shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    return mesh_layout(
        mesh,
        global_batch_size=shards * microbatches * draw(sizes),
        seq_len=draw(st.sampled_from([2048, 8192])),
        microbatches=microbatches,
        remat=draw(st.sampled_from(["none", "dots", "selective", "offload", "full"])),
        remat_save=tuple(draw(st.sets(st.sampled_from(list(SAVED_WORK))))),
        strategy=draw(st.sampled_from(["full", "grads", "optimizer"])),
    )


def memory(layout, shape=EIGHT_B, **settings):
    return training_memory(shape, layout, device_bytes=80e9, **settings)


@settings(deadline=None, max_examples=60)
@given(layouts(), sizes)
def test_more_sharding_or_fewer_rows_never_cost_memory(layout, factor):
    more_rows = dataclasses.replace(layout, rows=layout.rows * (1 + factor))
    assert memory(layout).total_bytes <= memory(more_rows).total_bytes
    if layout.strategy == "full":
        wider = dataclasses.replace(layout, weight_shards=layout.weight_shards * factor)
        assert memory(wider).total_bytes <= memory(layout).total_bytes
    if layout.weight_shards > 1:
        none, optimizer, grads, full = (
            memory(dataclasses.replace(layout, strategy=strategy)).total_bytes
            for strategy in ("none", "optimizer", "grads", "full")
        )
        assert full <= min(optimizer, grads) <= max(optimizer, grads) <= none


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_remat_and_schedule_order(layout):
    kept = [memory(dataclasses.replace(layout, remat=remat)).activations for remat in ("full", "selective", "none")]
    assert kept == sorted(kept)
    assert memory(dataclasses.replace(layout, remat="offload")).activations <= kept[1]
    if layout.pipeline > 1:
        assert memory(layout).total_bytes <= memory(dataclasses.replace(layout, schedule="gpipe")).total_bytes


@settings(deadline=None, max_examples=40)
@given(layouts(MIXTRAL))
def test_shards_of_a_mixture_of_experts_add_up(layout):
    """All devices together hold every parameter once per replica, but for the small vectors."""
    layout = dataclasses.replace(layout, strategy="full")
    if layout.weight_shards == 1:
        layout = dataclasses.replace(layout, strategy="none")
    got = memory(layout, MIXTRAL).params * layout.num_devices
    vectors = 4 * MIXTRAL.vector_params * layout.num_devices / layout.pipeline
    matrices = 4 * (MIXTRAL.total_params - MIXTRAL.vector_params) * layout.replicas
    assert got == pytest.approx(matrices + vectors, rel=1e-6)


@pytest.mark.parametrize("name", SAVED_WORK)
def test_what_is_kept_costs_memory_and_saves_work(name):
    others = tuple(other for other in SAVED_WORK if other != name)
    mesh = {"pipeline": 1, "data": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    with_it, without = (
        mesh_layout(mesh, global_batch_size=8, seq_len=8192, remat="selective", remat_save=save)
        for save in ((*others, name), others)
    )
    assert kept_per_token(EIGHT_B, with_it) > kept_per_token(EIGHT_B, without)
    assert with_it.recompute < without.recompute
    assert (recompute_share("selective", ()), recompute_share("selective", tuple(SAVED_WORK))) == (1.0, 0.0)
    assert recompute_share("selective") == pytest.approx(0.5)


def test_a_bounded_receive_buffer_is_a_remedy():
    task = Task(
        shape=MIXTRAL,
        cluster=make_cluster(gpu_named("h100"), num_devices=64),
        global_batch_size=256,
        seq_len=8192,
    )
    mesh = dict.fromkeys(AXES, 1) | {"fsdp": 8, "expert": 8}
    worst = mesh_layout(mesh, global_batch_size=256, seq_len=8192, microbatches=2)
    changed = {variation.overrides: variation.evaluation for variation in variations(task, worst)}
    bounded = changed["mesh.expert_receive_factor=1.5"]
    assert bounded.layout.receive_factor == 1.5
    assert bounded.memory.total_bytes < 0.8 * evaluate(task, worst).memory.total_bytes
