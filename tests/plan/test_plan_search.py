"""The search: everything it ranks is legal and fits, nothing better of the same kind exists, and it says why."""

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import PRESETS, load_config
from jaxpar.plan.catalogue import gpu_named
from jaxpar.plan.evaluation import SAFE_MARGIN, Task, evaluate
from jaxpar.plan.facts import gather_facts
from jaxpar.plan.layout import balanced_places, layout_of, mesh_layout
from jaxpar.plan.legality import batch_objection, mesh_objection
from jaxpar.plan.rules import LAYOUT_RULES, find_problems
from jaxpar.plan.search import SIMPLER, famous_layouts, layout_overrides, legal_meshes, search
from jaxpar.plan.shape import shape_of
from jaxpar.plan.topology import make_cluster
from jaxpar.plan.variations import is_legal, variations
from jaxpar.schedule.counts import layer_counts

ONE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


def task_of(preset, devices, rows, seq_len=8192, gpu="h100"):
    machine = make_cluster(gpu_named(gpu), num_devices=devices)
    return Task(shape=shape_of(PRESETS[preset].model), cluster=machine, global_batch_size=rows, seq_len=seq_len)


@pytest.fixture(scope="module")
def eight_b():
    task = task_of("llama-3.1-8b", 16, 64)
    return task, search(task)


def test_everything_ranked_is_legal_fits_and_is_in_order(eight_b):
    task, result = eight_b
    assert len(result.ranked) > 5
    for evaluation in result.ranked:
        assert is_legal(task, evaluation.layout)
        assert evaluation.layout.num_devices == 16
        assert evaluation.layout.global_batch_size == 64
        assert evaluation.memory.free_bytes >= SAFE_MARGIN * evaluation.memory.device_bytes
    speeds = [evaluation.tokens_per_s_per_device for evaluation in result.ranked]
    assert all(later <= earlier * (1 + 6 * SIMPLER) for earlier, later in itertools.pairwise(speeds))
    assert len({tuple(evaluation.layout.mesh.items()) for evaluation in result.ranked}) == len(result.ranked)


def test_no_mesh_is_missed(eight_b):
    task, result = eight_b
    by_hand = set()
    sizes = [1, 2, 4, 8, 16]
    for pipeline in sizes:
        for data in sizes:
            for fsdp in sizes:
                for context in (1, 2, 4):
                    for tensor in sizes[:4]:
                        mesh = ONE | {
                            "pipeline": pipeline, "data": data, "fsdp": fsdp, "context": context, "tensor": tensor,
                        }  # fmt: skip
                        if math.prod(mesh.values()) == 16 and not (
                            mesh_objection(task.shape, mesh, 8192) or batch_objection(mesh, 64, 1)
                        ):
                            by_hand.add(tuple(mesh.items()))
    assert {tuple(mesh.items()) for mesh in legal_meshes(task)} == by_hand
    assert result.meshes == len(by_hand)


def test_no_setting_of_plain_fsdp_beats_the_one_found(eight_b):
    task, result = eight_b
    mesh = ONE | {"fsdp": 16}
    (found,) = [e for e in result.all_ranked if e.layout.mesh == mesh]
    for microbatches in (1, 2, 4):
        for remat in ("none", "full"):
            layout = mesh_layout(mesh, global_batch_size=64, seq_len=8192, microbatches=microbatches, remat=remat)
            tried = evaluate(task, layout)
            if tried.fits_safely:
                assert tried.tokens_per_s_per_device <= found.tokens_per_s_per_device * (1 + 1e-9)


def test_it_explains_winner_runner_up_and_plain_fsdp(eight_b):
    _, result = eight_b
    text = "\n".join(result.explanation)
    assert text.startswith("winner: ")
    assert "runner-up: " in text
    assert "plain FSDP" in text


def test_famous_choices_are_rejected_with_a_reason(eight_b):
    task, result = eight_b
    reasons = {rejection.name: rejection.reason for rejection in result.rejected}
    assert "does not fit by" in reasons["DDP"]
    assert "slower" in reasons["tensor in a node, FSDP across"]
    assert "kv heads do not divide by tensor 16" in reasons["tensor across nodes"]
    winner = result.ranked[0].layout
    assert set(reasons) == {famous.name for famous in famous_layouts(task) if not famous.is_like(winner)}


def test_16384_gpus_take_seconds():
    start = time.process_time()
    result = search(task_of("llama-3.1-405b", 16384, 2048))
    assert time.process_time() - start < 10
    assert result.ranked
    reasons = {rejection.name: rejection.reason for rejection in result.rejected}
    assert "slower" in reasons["Llama 3 405B's"]
    assert "rows do not divide" in reasons["plain FSDP"]


@given(st.integers(1, 130), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]))
def test_balanced_places_are_those_of_the_largest_stage(num_layers, num_stages, num_chunks):
    places = balanced_places(num_layers, num_stages, num_chunks)
    if num_layers % (num_stages * num_chunks) == 0:
        assert places == 0
    elif num_layers > num_stages * num_chunks:
        sizes = {"num_stages": num_stages, "num_chunks": num_chunks, "layers_per_stage": "balanced"}
        assert places == max(layer_counts(num_layers, **sizes)) * num_chunks


def test_neighbours_of_balanced_stages_are_legal():
    task = task_of("llama-3.1-405b", 16384, 2048)
    mesh = ONE | {"pipeline": 8, "data": 32, "fsdp": 8, "tensor": 8}
    places = balanced_places(126, 8, 8)
    settings = {"microbatches": 8, "schedule": "interleaved", "chunks": 8, "places": places}
    layout = mesh_layout(mesh, global_batch_size=2048, seq_len=8192, **settings)
    found = {variation.name: variation.evaluation.layout for variation in variations(task, layout)}
    assert found["no pipeline"].places == 0
    assert found["shard over all of data"].places == places
    assert "pipeline 16" not in found  # fewer layers than 16 x 8 chunks


def test_layers_that_stages_do_not_divide_are_balanced():
    """126 layers on 16 stages, as Llama 3 405B was trained."""
    found = [e.layout for e in search(task_of("llama-3.1-405b", 16384, 2048)).all_ranked if e.layout.pipeline == 16]
    assert {layout.places for layout in found} == {8}
    for layout in found[:20]:
        overrides = ["model.preset=llama-3.1-405b", "data.seq_len=8192", "train.global_batch_size=2048"]
        config = load_config(None, [*overrides, *layout_overrides(layout).split()])
        facts = gather_facts(config, num_devices=16384)
        assert find_problems(facts, LAYOUT_RULES) == []
        assert layout_of(facts).places == layout.places


def test_mixture_of_experts_uses_the_expert_axis():
    result = search(task_of("qwen3-30b-a3b", 16, 32, seq_len=4096))
    assert {e.layout.expert for e in result.all_ranked} >= {1, 2, 4, 8}
    assert "experts in a node" in {rejection.name for rejection in result.rejected}


def test_weights_of_a_small_model_stay_whole():
    """Nothing is gathered if it fits and speed is wanted, with accumulation over a slow network."""
    result = search(task_of("llama-3.2-1b", 16, 256, seq_len=1024, gpu="l40s"))
    assert result.ranked[0].layout.strategy in ("none", "optimizer")
    reasons = {rejection.name: rejection.reason for rejection in result.rejected}
    assert "slower" in reasons["plain FSDP"]


def test_nothing_fits():
    result = search(task_of("llama-3.1-405b", 8, 8))
    assert result.ranked == ()
    assert "no legal layout fits" in result.explanation[0]
    assert all("GiB" in rejection.reason or "divide" in rejection.reason for rejection in result.rejected)
