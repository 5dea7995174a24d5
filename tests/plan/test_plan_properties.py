"""For any config and device count: a plan that is legal by an independent check, or a ConfigError; nothing else."""

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import AXES, Config, ConfigError
from jaxpar.config.schema import DataConfig, MeshConfig, ModelConfig, RuntimeConfig, TrainConfig
from jaxpar.plan.resolve import check, resolve

LEGAL = {
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "model": {"vocab_size": 257, "embed_dim": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 128},
    "train": {"global_batch_size": 48, "microbatches": 2},
    "data": {"seq_len": 16, "num_samples": 1024},
}
# Values next to the border between legal and not; a few at once leave about as many configs on either side.
CHANGES = {
    "mesh.data": [1, 4, 8, 3, -1, 0],
    "mesh.fsdp": [1, 4, 8, 3, -1, -2],
    "mesh.tensor": [1, 4, 8, 3, -1, 10**12],
    "mesh.pipeline": [2, -1],
    "mesh.expert": [2, -1],
    "mesh.context": [2, -1],
    "model.vocab_size": [1, 160, 50257],
    "model.vocab_multiple": [1, 3, 4],
    "model.embed_dim": [96, 130, 72, 0],
    "model.num_heads": [4, 6, 12],
    "model.num_kv_heads": [0, 1, 2, 8, 3],
    "model.head_dim": [16, 15],
    "model.mlp_dim": [96, 7, 10**12],
    "model.tie_embeddings": [True],
    "train.global_batch_size": [1, 8, 24, 10, 16],
    "train.microbatches": [1, 3, 16, 64],
    "data.seq_len": [12, 7, 24],
    "data.num_samples": [9, 48],
}
changes = st.dictionaries(st.sampled_from(list(CHANGES)), st.integers(0, 5), max_size=4)
device_counts = st.sampled_from([8, 8, 8, 4, 2, 16, 1, 6])
any_mesh = st.fixed_dictionaries({axis: st.sampled_from([1, 1, 2, 4, 8, 3, -1, 0, -2, 10**12]) for axis in AXES})


def make(changed: dict[str, int], **runtime) -> Config:
    tables = {section: dict(values) for section, values in LEGAL.items()}
    for key, choice in changed.items():
        section, name = key.split(".")
        tables[section][name] = CHANGES[key][choice % len(CHANGES[key])]
    return Config(
        mesh=MeshConfig(**tables["mesh"]),
        model=ModelConfig(**tables["model"]),
        train=TrainConfig(**tables["train"]),
        data=DataConfig(**tables["data"]),
        runtime=RuntimeConfig(**runtime),
    )


def is_legal(config: Config, num_devices: int) -> bool:
    """The rules of mesh, model and batch again, as one expression each, written apart from the rule table."""
    model, train = config.model, config.train
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    if list(sizes.values()).count(-1) == 1:
        others = math.prod(size for size in sizes.values() if size != -1)
        if others < 1 or num_devices % others or num_devices < others:
            return False
        sizes = {axis: num_devices // others if size == -1 else size for axis, size in sizes.items()}
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != num_devices:
        return False
    stages, tensor, context, fsdp = (sizes[axis] for axis in ("pipeline", "tensor", "context", "fsdp"))
    shards = sizes["data"] * fsdp
    kv_heads = model.num_kv_heads or model.num_heads
    has_head_dim = model.head_dim or model.embed_dim % model.num_heads == 0
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    padded = math.ceil(model.vocab_size / model.vocab_multiple) * model.vocab_multiple
    return bool(
        sizes["expert"] == 1
        and model.num_layers % stages == 0
        and train.microbatches >= stages
        and padded % (stages * tensor) == 0
        and model.embed_dim
        and has_head_dim
        and head_dim % 2 == 0
        and model.num_heads % kv_heads == 0
        and all(size % tensor == 0 for size in (model.num_heads, kv_heads, model.mlp_dim, padded))
        and config.data.seq_len % (context * tensor) == 0
        and (context == 1 or config.data.seq_len % (2 * context) == 0)
        and model.embed_dim % (fsdp * context) == 0
        and train.global_batch_size % (shards * train.microbatches) == 0
        and config.data.num_samples >= train.global_batch_size
    )


@settings(max_examples=500, deadline=None)
@given(changes, device_counts)
def test_resolve_agrees_with_an_independent_check(changed, num_devices):
    config = make(changed)
    try:
        plan = resolve(config, num_devices=num_devices)
    except ConfigError:
        plan = None
    assert (plan is not None) == is_legal(config, num_devices)
    if plan is not None:
        assert math.prod(plan.mesh.values()) == plan.num_devices == num_devices
        assert plan.rows_per_device * plan.batch_shards * config.train.microbatches == config.train.global_batch_size
        assert plan.padded_vocab_size % (plan.mesh["pipeline"] * plan.mesh["tensor"]) == 0
        assert resolve(plan.config, num_devices=num_devices) == plan


@settings(max_examples=150, deadline=None)
@given(any_mesh, st.none() | st.integers(-1, 70), st.none() | st.integers(0, 60), st.integers(0, 9), st.integers(1, 3))
def test_odd_facts_never_end_in_another_exception(mesh, num_devices, num_rows, cpu_devices, num_processes):
    config = make({}, cpu_devices=cpu_devices, num_processes=num_processes, coordinator="localhost:1234")
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh))
    facts = {"num_devices": num_devices, "num_rows": num_rows}
    try:
        plan = resolve(config, **facts)
    except ConfigError:
        return
    assert math.prod(plan.mesh.values()) == plan.num_devices
    assert check(config, **facts) == plan.warnings


@settings(max_examples=150, deadline=None)
@given(changes)
def test_what_passes_without_devices_is_legal_on_the_devices_of_its_mesh(changed):
    config = make({key: choice for key, choice in changed.items() if CHANGES[key][choice % len(CHANGES[key])] != -1})
    try:
        check(config)
    except ConfigError:
        return
    product = math.prod(getattr(config.mesh, axis) for axis in AXES)
    assert is_legal(config, product)
    assert resolve(config, num_devices=None).num_devices == product
