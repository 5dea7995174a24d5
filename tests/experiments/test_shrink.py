"""A shrunk config is legal whenever the given one is, small, and has its structure."""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS, Config, load_config
from jaxpar.config.schema import AXES
from jaxpar.experiments.shrink import REST_DEVICES, shrink
from jaxpar.plan.experts import receive_bound
from jaxpar.plan.facts import BATCH_AXES, gather_facts
from jaxpar.plan.parameters import padded_vocab_size
from jaxpar.plan.rules import LAYOUT_RULES, find_problems

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


@st.composite
def legal_configs(draw) -> Config:
    preset = draw(st.sampled_from(sorted(PRESETS)))
    model = load_config(None, [f"model.preset={preset}"]).model
    mesh = {axis: draw(SIZES) for axis in AXES}
    chunks = draw(st.sampled_from([1, 2]))
    microbatches = draw(st.sampled_from([1, 3, 8, 32]))
    shards = math.prod(mesh[axis] for axis in BATCH_AXES)
    config = Config(
        model=dataclasses.asdict(model),
        mesh=mesh,
        pipeline={"schedule": "interleaved" if chunks > 1 else "gpipe", "chunks": chunks},
        data={"seq_len": draw(st.sampled_from([1024, 3072])), "pack": draw(st.booleans())},
        train={
            "microbatches": microbatches,
            "global_batch_size": shards * microbatches * draw(st.sampled_from([1, 2, 5])),
        },
    )
    assume(not find_problems(gather_facts(config), LAYOUT_RULES))
    return config


@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(legal_configs())
def test_legal_small_and_of_the_same_structure(config):
    shrunk = shrink(gather_facts(config))
    small, model, before = shrunk.config, shrunk.config.model, config.model
    assert find_problems(gather_facts(small), LAYOUT_RULES) == []
    assert math.prod(shrunk.mesh.values()) <= 2 ** max(4, sum(size > 1 for size in shrunk.mesh.values()))
    assert model.embed_dim * model.mlp_dim * model.num_layers < 20_000_000
    for axis in AXES:
        size, small_size = getattr(config.mesh, axis), shrunk.mesh[axis]
        assert (size > 1) == (small_size > 1)
        assert small_size == size or f"mesh.{axis}" in shrunk.changes
    assert model.num_heads // model.num_kv_heads == before.num_heads // before.num_kv_heads
    assert (model.num_heads * model.head_dim == model.embed_dim) == (
        before.num_heads * before.head_dim == before.embed_dim
    )
    assert (padded_vocab_size(model) == model.vocab_size) == (padded_vocab_size(before) == before.vocab_size)
    assert (model.num_layers > 1) == (before.num_layers > 1)
    assert bool(model.first_dense_layers) == bool(before.first_dense_layers)
    assert bool(model.num_experts) == bool(before.num_experts)
    if before.num_experts:
        assert model.num_experts > shrunk.mesh["expert"] or before.num_experts == config.mesh.expert
        assert (model.top_k < model.num_experts) == (before.top_k < before.num_experts)
    assert (small.train.microbatches > 1) == (config.train.microbatches > 1)
    for kept in ("family", "tie_embeddings", "norm_eps", "rope_theta", "init_std"):
        assert getattr(model, kept) == getattr(before, kept)
    assert (small.train.remat, small.data.pack) == (config.train.remat, config.data.pack)
    assert small.pipeline == config.pipeline


@pytest.mark.parametrize(("groups", "chosen", "top_k"), [(8, 4, 8), (8, 8, 2), (2, 1, 1)])
def test_groups_of_experts_stay_groups_and_the_exchange_that_of_the_large_mesh(groups, chosen, top_k):
    options = ["model.router=sigmoid", f"model.num_expert_groups={groups}", f"model.top_k_groups={chosen}"]
    config = load_config(None, ["model.preset=qwen3-30b-a3b", "mesh.expert=4", f"model.top_k={top_k}", *options])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=8))
    shrunk = shrink(gather_facts(config)).config
    assert find_problems(gather_facts(shrunk), LAYOUT_RULES) == []
    assert shrunk.model.num_expert_groups == 2
    assert (shrunk.model.router, shrunk.mesh.expert) == ("sigmoid", 4)
    assert shrunk.mesh.expert_exchange == ("gather" if top_k == 8 else "all_to_all")


def test_settings_that_are_no_sizes_stay():
    given_ = [
        "model.preset=qwen3-8b", "mesh.fsdp=-1", "mesh.fsdp_strategy=optimizer", "optim.name=muon",
        "optim.weight_decay=0.3", "optim.schedule=wsd", "optim.decay_steps=50", "train.z_loss=1e-4",
        "train.remat=none", "train.global_batch_size=64",
    ]  # fmt: skip
    shrunk = shrink(gather_facts(load_config(None, given_)))
    assert shrunk.mesh["fsdp"] == REST_DEVICES
    small = shrunk.config
    assert (small.mesh.fsdp_strategy, small.optim.name, small.optim.weight_decay) == ("optimizer", "muon", 0.3)
    assert (small.optim.schedule, small.optim.decay_steps) == ("wsd", 2)
    assert (small.train.z_loss, small.train.remat) == (1e-4, "none")
    assert small.precision.compute == "float32"
    assert shrunk.changes["model.num_layers"] == (36, 2)


@pytest.mark.parametrize(
    ("mesh", "tried"),
    [
        ({"pipeline": 16, "fsdp": 64, "tensor": 8}, {"pipeline": 2, "fsdp": 2, "tensor": 4}),
        ({"data": 7, "fsdp": 8}, {"data": 4, "fsdp": 4}),
        ({"fsdp": 16}, {"fsdp": 16}),
    ],
)
def test_large_meshes_lose_devices_axis_by_axis(mesh, tried):
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    config = load_config(None, ["model.preset=llama-3.1-405b", "train.global_batch_size=1024", *sizes])
    found = shrink(gather_facts(config)).mesh
    assert {axis: size for axis, size in found.items() if size > 1} == tried


@pytest.mark.parametrize(
    ("factor", "is_bounded"), [(0.0, False), (2.0, True), (100.0, False)], ids=["worst", "bounded", "more"]
)
def test_a_bounded_receive_buffer_stays_bounded(factor, is_bounded):
    config = load_config(None, ["model.preset=qwen3-30b-a3b", "mesh.expert=8", f"mesh.expert_receive_factor={factor}"])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=8))
    small = shrink(gather_facts(config)).config
    tokens = small.train.global_batch_size // small.mesh.expert * small.data.seq_len
    sizes = (tokens, small.model.top_k, small.model.num_experts, small.mesh.expert)
    room, worst = receive_bound(*sizes, small.mesh.expert_receive_factor), receive_bound(*sizes, 0.0)
    assert room == worst - is_bounded
