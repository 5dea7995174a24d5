"""A config made small: the same structure, so that what can go wrong with its layout still can. No JAX.

Kept: family, ratios of heads, ties, whether dims divide, how layers meet stages, packing, remat, microbatches against
stages, sharding strategy, schedule, optimizer, and every setting that is not a size. Made small: everything else.
Offloaded activations stay where they are (remat selective): the devices are fake and have no other memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxpar.config.schema import (
    AXES,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    TrainConfig,
)
from jaxpar.plan.context import resolved_context_mode, sequence_shards
from jaxpar.plan.experts import exchange_mode, receive_bound
from jaxpar.plan.facts import BATCH_AXES, EMBED_AXES, Facts
from jaxpar.plan.parameters import padded_vocab_size

MAX_DEVICES = 16
"""Fake devices that two CPU cores carry in reasonable time."""

REST_DEVICES = 8
"""Devices that a mesh with a -1 is tried on when nothing says how many there are."""

_MIN_WIDTH = 32
_MIN_SEQ_LEN = 16
_STEPS = 8
"""Length of the learning-rate schedule; fewer steps are run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A small config with the structure of a large one."""

    config: Config
    """In float32, on fake CPU devices, synthetic data."""
    mesh: Mapping[str, int]
    """Size of each axis, outermost first."""
    changes: Mapping[str, tuple[object, object]]
    """Dotted key -> (given, tried), of everything that was made smaller."""


def shrink(facts: Facts, *, max_devices: int = MAX_DEVICES) -> Shrunk:
    """A small config with the structure of the given one.

    Args:
        facts: Of a config whose layout is legal. An axis of -1 takes ``REST_DEVICES`` if the devices are not known.
        max_devices: Axes are halved, the largest first, until the mesh has at most so many devices, as far as every
            axis that was above 1 stays so.
    """
    config = facts.config
    given = _whole_mesh(facts)
    mesh = _scaled_down(given, max_devices)
    model = _small_model(config, given, mesh)
    data = _small_data(config, mesh)
    train = _small_train(config, given, mesh, data.seq_len)
    factor = _small_receive_factor(config, given, model, mesh, _local_tokens(train, data.seq_len, mesh))
    small = dataclasses.replace(
        config,
        model=model,
        mesh=dataclasses.replace(_small_mesh(config, given, mesh), expert_receive_factor=factor),
        data=data,
        train=train,
        optim=_small_optim(config.optim),
        precision=dataclasses.replace(config.precision, params="float32", compute="float32", reduce="float32"),
        runtime=dataclasses.replace(
            config.runtime,
            cpu_devices=math.prod(mesh.values()),
            coordinator=None,
            num_processes=1,
            process_id=0,
            compilation_cache="auto",
        ),
        run=dataclasses.replace(config.run, dir="runs/verify"),
        checkpoint=type(config.checkpoint)(every=0, final=False),
        observe=type(config.observe)(),
    )
    return Shrunk(config=small, mesh=mesh, changes=_changes(config, small, given))


def _whole_mesh(facts: Facts) -> dict[str, int]:
    """All six axes; the rest axis takes what is left of ``REST_DEVICES``, at least 2."""
    known = math.prod(facts.mesh.values())
    return {axis: facts.mesh.get(axis) or max(2, REST_DEVICES // known) for axis in AXES}


def _scaled_down(mesh: Mapping[str, int], max_devices: int) -> dict[str, int]:
    mesh = dict(mesh)
    while math.prod(mesh.values()) > max_devices and max(mesh.values()) > 2:
        largest = max(mesh, key=mesh.get)
        mesh[largest] = (mesh[largest] + 1) // 2
    return mesh


def _small_mesh(config: Config, given: Mapping[str, int], mesh: Mapping[str, int]) -> MeshConfig:
    """The small axes, with the ways of attention and of exchange that ``auto`` means at the given sizes."""
    small = dataclasses.replace(config.mesh, **mesh)
    if given["context"] > 1:
        mode = resolved_context_mode(small.context_mode, config.data.seq_len / given["context"])
        small = dataclasses.replace(small, context_mode=mode)
    if given["expert"] > 1:
        mode = exchange_mode(small.expert_exchange, config.model.top_k, given["expert"])
        small = dataclasses.replace(small, expert_exchange=mode)
    return small


def _local_tokens(train: TrainConfig, seq_len: int, mesh: Mapping[str, int]) -> int:
    """Tokens of a microbatch that one device exchanges."""
    rows = train.global_batch_size // (train.microbatches * math.prod(mesh[axis] for axis in BATCH_AXES))
    return rows * seq_len // mesh["context"]


def _small_receive_factor(
    config: Config, given: Mapping[str, int], small: ModelConfig, mesh: Mapping[str, int], tokens: int
) -> float:
    """Room for all rows of the worst case but one, where the given factor is less than the worst case; else 0.

    The bounded exchange then runs, and nothing is left out: so few tokens may be spread too unevenly for less room. A
    model that sends every token to all experts needs the worst case.
    """
    factor, model = config.mesh.expert_receive_factor, config.model
    if not factor or small.top_k == small.num_experts:
        return 0.0
    sizes = (tokens, model.top_k, model.num_experts, given["expert"])
    if receive_bound(*sizes, factor) == receive_bound(*sizes, 0.0):
        return 0.0
    worst = receive_bound(tokens, small.top_k, small.num_experts, mesh["expert"], 0.0)
    return (worst - 1.5) / (tokens * small.top_k)  # rounded up to whole rows


def _few(per_shard: int) -> int:
    """1 where each shard has 1, else 2."""
    return min(per_shard, 2)


def _small_optim(optim: OptimConfig) -> OptimConfig:
    """The same optimizer, with steps that show a fault and hide rounding."""
    # A parameter whose true gradient is 0 (a key bias) would turn rounding into full-size steps. Adafactor's eps is
    # added to squares. Lion has none: there only the sign of a gradient matters.
    eps = {"adafactor": 1e-8, "lion": None, "sgd": None}.get(optim.name, 1e-4)
    return dataclasses.replace(
        optim,
        lr=1e-3,
        warmup_steps=min(optim.warmup_steps, 2),
        decay_steps=min(optim.decay_steps, 2) if optim.schedule == "wsd" else 0,
        eps=None if eps is None else max(optim.eps or 0.0, eps),
        # Low enough to be reached by a fresh model, as is the size from which small matrices are factored.
        clip_norm=min(optim.clip_norm, 0.5),
        min_factored_dim=8 if optim.name == "adafactor" else None,
    )


def _small_model(config: Config, given: Mapping[str, int], mesh: Mapping[str, int]) -> ModelConfig:
    model, tensor = config.model, mesh["tensor"]
    kv_heads = tensor * _few(model.num_kv_heads // given["tensor"])
    heads = kv_heads * (model.num_heads // model.num_kv_heads)
    shards = math.prod(mesh[axis] for axis in EMBED_AXES)
    if model.embed_dim == model.num_heads * model.head_dim:
        # Four dims of a head are two frequencies of RoPE; with very many heads one has to do.
        embed_dim = _multiple(math.lcm(shards, (4 if heads <= 32 else 2) * heads), _MIN_WIDTH)
        head_dim = embed_dim // heads
    else:
        head_dim, embed_dim = 8, _multiple(math.lcm(shards, 2), _MIN_WIDTH)
        embed_dim += embed_dim if embed_dim == heads * head_dim else 0
    layers, dense_layers = _small_layers(config, given, mesh)
    vocab_size, multiple = _small_vocabulary(model, mesh)
    small = dataclasses.replace(
        model,
        preset=None,
        init_from=None,
        vocab_size=vocab_size,
        vocab_multiple=multiple,
        embed_dim=embed_dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_dim=_width(model.mlp_dim, model.embed_dim, embed_dim, tensor),
        first_dense_layers=dense_layers,
        max_positions=min(model.max_positions, 256),
        rope_scaling=_small_scaling(model.rope_scaling),
    )
    if not model.num_experts:
        return small
    experts = _small_experts(model, given["expert"], mesh["expert"])
    groups = min(model.num_expert_groups, 2)
    return dataclasses.replace(
        small,
        num_experts=experts,
        top_k=min(model.top_k, experts),
        num_expert_groups=groups,
        top_k_groups=groups if model.top_k_groups == model.num_expert_groups else 1,
        expert_mlp_dim=_width(model.expert_mlp_dim, model.embed_dim, embed_dim, tensor),
        num_shared_experts=_few(model.num_shared_experts),
    )


def _small_experts(model: ModelConfig, given: int, axis: int) -> int:
    """Experts that the axis divides, one on each device only if it was so, and more than a token uses if it was so.

    With groups, each of the two that are left has as many as a token uses.
    """
    least = max(axis * _few(model.num_experts // given), min(model.num_experts, model.top_k + 1))
    if model.num_expert_groups > 1:
        return _multiple(math.lcm(axis, 2), max(least, 2 * model.top_k))
    return _multiple(axis, least)


def _small_layers(config: Config, given: Mapping[str, int], mesh: Mapping[str, int]) -> tuple[int, int]:
    """Layers and leading dense ones: as many per stage and chunk as it takes, uneven where they were uneven."""
    num_layers, chunks = config.model.num_layers, config.pipeline.chunks
    parts_given, parts = given["pipeline"] * chunks, mesh["pipeline"] * chunks
    dense = min(config.model.first_dense_layers, 1)
    layers = parts * _few(num_layers // parts_given)
    if num_layers % parts_given:
        layers = max(parts, layers) + parts - 1 if parts > 1 else layers
    if dense and layers < 2:
        layers += parts
    return max(1, layers), dense


def _small_vocabulary(model: ModelConfig, mesh: Mapping[str, int]) -> tuple[int, int]:
    """Size and multiple: padded unless the given vocabulary needs no padding, and then odd."""
    multiple = math.lcm(8, mesh["tensor"] * mesh["pipeline"])
    full = _multiple(multiple, 152)
    needs_none = model.vocab_size and padded_vocab_size(model) == model.vocab_size
    return full if needs_none else full - 1, multiple


def _small_scaling(scaling: RopeScaling | None) -> RopeScaling | None:
    """Its bands inside the few positions that are left, so that it changes something."""
    return dataclasses.replace(scaling, original_max_positions=64) if scaling is not None else None


def _small_data(config: Config, mesh: Mapping[str, int]) -> DataConfig:
    seq_len = _multiple(sequence_shards(tensor=mesh["tensor"], context=mesh["context"]), _MIN_SEQ_LEN)
    return DataConfig(seq_len=seq_len, num_samples=4096, pack=config.data.pack)


def _small_train(config: Config, given: Mapping[str, int], mesh: Mapping[str, int], seq_len: int) -> TrainConfig:
    train, stages = config.train, mesh["pipeline"]
    shards = math.prod(mesh[axis] for axis in BATCH_AXES)
    shards_given = math.prod(given[axis] for axis in BATCH_AXES)
    microbatches = min(train.microbatches, 2 if stages == 1 else 2 * stages)
    rows = _few(train.global_batch_size // (shards_given * train.microbatches))
    local_tokens = rows * seq_len // mesh["context"] // mesh["tensor"]
    return dataclasses.replace(
        train,
        steps=_STEPS,
        stop_at=None,
        global_batch_size=shards * microbatches * max(1, rows),
        microbatches=microbatches,
        # Several chunks, the last one not full.
        loss_chunk_tokens=max(1, 3 * local_tokens // 5),
        eval_every=0,
        eval_batches=0,
        remat="selective" if train.remat == "offload" else train.remat,
    )


def _width(width: int, embed_dim: int, small_embed_dim: int, tensor: int) -> int:
    """A hidden width that ``tensor`` divides, in about the given proportion to the embedding but not too large."""
    wanted = min(4 * small_embed_dim, max(tensor, round(width * small_embed_dim / embed_dim)))
    return _multiple(tensor, wanted)


def _multiple(unit: int, least: int) -> int:
    return -(-least // unit) * unit


def _changes(config: Config, small: Config, given: Mapping[str, int]) -> dict[str, tuple[object, object]]:
    """What differs between the configs in the sections that shape the step, the mesh as it was resolved."""
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **given))
    sections = ("mesh", "pipeline", "model", "data", "train", "precision", "optim")
    return {
        key: values
        for section in sections
        for key, values in _differences(section, getattr(config, section), getattr(small, section)).items()
    }


def _differences(prefix: str, before: object, after: object) -> dict[str, tuple[object, object]]:
    found = {}
    for field in dataclasses.fields(before):
        key, one, other = f"{prefix}.{field.name}", getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(one) and dataclasses.is_dataclass(other):
            found |= _differences(key, one, other)
        elif one != other:
            found[key] = one, other
    return found
