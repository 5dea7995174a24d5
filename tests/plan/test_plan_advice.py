"""Advice: each rule on a layout that deserves it, and on one that does not."""

import dataclasses

import pytest

from jaxpar.config import PRESETS
from jaxpar.plan.advice import find_plan_problems, verdict
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import Task, evaluate
from jaxpar.plan.layout import mesh_layout
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster
from jaxpar.plan.variations import is_legal, variations

ONE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


def case(preset, gpu, rows, seq_len=4096, devices=None, **axes_and_settings):
    mesh = ONE | {axis: size for axis, size in axes_and_settings.items() if axis in ONE}
    others = {name: value for name, value in axes_and_settings.items() if name not in ONE}
    spread = mesh_layout(mesh, global_batch_size=rows, seq_len=seq_len, **others)
    machine = make_cluster(gpu_named(gpu), num_devices=devices or spread.num_devices)
    task = Task(shape=shape_of(PRESETS[preset].model), cluster=machine, global_batch_size=rows, seq_len=seq_len)
    return task, evaluate(task, spread)


def rules_of(*arguments, **changes):
    task, plan = case(*arguments, **changes)
    problems, _ = find_plan_problems(task, plan)
    return {problem.rule: problem for problem in problems}


def test_memory_names_the_fastest_changes_that_make_it_fit():
    found = rules_of("llama-3.1-8b", "h100", 512, fsdp=8)
    assert verdict(list(found.values())) == "does not fit"
    assert "train.microbatches" in found["memory"].remedy


def test_memory_that_no_single_change_mends_is_said_to_be_so():
    found = rules_of("llama-3.1-70b", "h100", 8, fsdp=8)
    assert "parameters, gradients and optimizer" in found["memory"].message
    assert "more devices (16?)" in found["memory"].remedy


def test_near_the_limit_it_is_not_certain():
    task, plan = case("llama-3.1-8b", "h100", 64, fsdp=8)
    tight = (plan.memory.total_bytes - plan.memory.reserve) / (0.95 - (1 - task.memory_fraction))
    task = dataclasses.replace(
        task, cluster=dataclasses.replace(task.cluster, gpu=dataclasses.replace(task.cluster.gpu, memory_bytes=tight))
    )
    plan = evaluate(task, plan.layout)
    problems, _ = find_plan_problems(task, plan)
    assert plan.fits
    assert "memory_margin" in {problem.rule for problem in problems}


@pytest.mark.parametrize(
    ("rule", "arguments", "deserving", "innocent"),
    [
        ("microbatches_per_stage", ("llama-3.1-8b", "h100", 64), {"pipeline": 4, "microbatches": 4},
         {"pipeline": 4, "microbatches": 16}),
        ("tensor_outside_nvlink", ("llama-3.1-8b", "l40s", 64), {"tensor": 8}, {"fsdp": 8}),
        ("tensor_without_need", ("llama-3.1-8b", "h100", 64), {"tensor": 8, "fsdp": 8}, {"fsdp": 64}),
        ("pipeline_without_need", ("llama-3.1-8b", "h100", 64), {"pipeline": 8, "microbatches": 32}, {"fsdp": 8}),
        ("ddp_fits", ("llama-3.2-1b", "h100", 256, 1024), {"fsdp": 64, "microbatches": 4},
         {"data": 64, "microbatches": 4}),
        ("expert_over_network", ("qwen3-30b-a3b", "h100", 64), {"expert": 64}, {"expert": 8, "fsdp": 8}),
    ],
)  # fmt: skip
def test_rules(rule, arguments, deserving, innocent):
    assert rule in rules_of(*arguments, **deserving)
    assert rule not in rules_of(*arguments, **innocent)


def test_fsdp_over_a_slow_network_is_told_to_go_hybrid():
    found = rules_of("llama-3.1-8b", "l40s", 64, seq_len=1024, fsdp=64)
    assert (
        "mesh.data=8 mesh.fsdp=8" in found["fsdp_over_network"].remedy or "hide it" in found["fsdp_over_network"].remedy
    )
    assert "fsdp_over_network" not in rules_of("llama-3.1-8b", "h100", 64, data=8, fsdp=8)


def test_variations_are_legal_and_keep_batch_and_devices():
    task, plan = case("llama-3.1-8b", "h100", 64, data=2, fsdp=4, tensor=2, pipeline=2, microbatches=4)
    near = list(variations(task, plan.layout))
    assert len(near) > 8
    for variation in near:
        changed = variation.evaluation.layout
        assert is_legal(task, changed)
        assert (changed.global_batch_size, changed.num_devices) == (64, 32)
        assert changed != plan.layout
