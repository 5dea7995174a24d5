"""Rules of the model: its dims against each other and against the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxpar.config.dims import dims_problems
from jaxpar.config.errors import Problem
from jaxpar.config.schema import ModelConfig
from jaxpar.families import FAMILIES
from jaxpar.plan.context import sequence_shards
from jaxpar.plan.facts import EMBED_AXES, Facts
from jaxpar.plan.parameters import dim_sizes, padded_vocab_size, param_kinds
from jaxpar.schedule.counts import layer_counts
from jaxpar.schedule.kinds import CHUNKED_KINDS

_MAX_AXIS = 4096

# Logical dim -> the mesh axes that split it and the config key that sets its size.
_SHARDED_DIMS = {
    "embed": (EMBED_AXES, "model.embed_dim"),
    "heads": (("tensor",), "model.num_heads"),
    "kv_heads": (("tensor",), "model.num_kv_heads"),
    "mlp": (("tensor",), "model.mlp_dim"),
    "vocab": (("pipeline", "tensor"), "model.vocab_multiple"),
    "experts": (("expert",), "model.num_experts"),
    "expert_mlp": (("tensor",), "model.expert_mlp_dim"),
    "shared_mlp": (("tensor",), "model.num_shared_experts"),
}


def dims_complete(facts: Facts) -> Iterator[Problem]:
    """The dims that define a model are given."""
    yield from dims_problems(facts.model)


def kv_heads_divide_heads(facts: Facts) -> Iterator[Problem]:
    """Every kv head serves the same number of query heads."""
    model = facts.model
    if model.num_heads and model.num_heads % model.num_kv_heads:
        yield Problem(
            key="model.num_kv_heads",
            value=model.num_kv_heads,
            message=f"does not divide model.num_heads = {model.num_heads} "
            f"(remainder {model.num_heads % model.num_kv_heads})",
            remedy=f"use one of {_divisors(model.num_heads)}",
        )


def head_dim_even(facts: Facts) -> Iterator[Problem]:
    """RoPE turns pairs of head dims."""
    model = facts.model
    if model.head_dim % 2 and not FAMILIES[model.family].learned_positions:
        yield Problem(
            key="model.head_dim",
            value=model.head_dim,
            message=f"RoPE ({model.family}) turns pairs of head dims, so head_dim must be even",
            remedy=f"set model.head_dim to {model.head_dim + 1} or another even number",
        )


def rope_scaling_order(facts: Facts) -> Iterator[Problem]:
    """The scaled and the unscaled band of frequencies do not overlap, or the blend between them divides by 0."""
    scaling = facts.model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Problem(
            key="model.rope_scaling.high_freq_factor",
            value=scaling.high_freq_factor,
            message=f"must be above model.rope_scaling.low_freq_factor = {scaling.low_freq_factor}",
            remedy="llama-3.1 has low 1 and high 4",
        )


def positions_fit(facts: Facts) -> Iterator[Problem]:
    """Learned positions reach as far as a row; RoPE families have none."""
    model, seq_len = facts.model, facts.config.data.seq_len
    if not FAMILIES[model.family].learned_positions:
        if model.max_positions:
            yield Problem(
                key="model.max_positions",
                value=model.max_positions,
                message=f"family {model.family} uses RoPE and has no position table, so this would do nothing",
                remedy="remove model.max_positions",
            )
    elif seq_len > model.max_positions:
        yield Problem(
            key="data.seq_len",
            value=seq_len,
            message=f"is longer than the learned position table, model.max_positions = {model.max_positions}",
            remedy=f"set data.seq_len to at most {model.max_positions}, or model.max_positions to at least {seq_len}",
        )


def vocabulary_holds_tokenizer(facts: Facts) -> Iterator[Problem]:
    """Every id of the tokenizer has a row in the embedding."""
    size, needed = facts.model.vocab_size, facts.tokenizer_vocab_size
    if needed is not None and size < needed:
        yield Problem(
            key="model.vocab_size",
            value=size,
            message=f"the tokenizer ({facts.config.data.tokenizer}) has {needed} ids",
            remedy=f"set model.vocab_size to at least {needed}, or to 0 to take the tokenizer's",
        )


def layers_divide_stages(facts: Facts) -> Iterator[Problem]:
    """Every pipeline stage has the same number of layers, or the numbers are given; none is floored away."""
    num_stages, num_layers, pipeline = facts.mesh.get("pipeline", 1), facts.model.num_layers, facts.config.pipeline
    given = pipeline.layers_per_stage
    if given != "even":
        yield from _uneven_layers(facts, num_stages)
    elif num_layers % num_stages:
        yield Problem(
            key="model.num_layers",
            value=num_layers,
            message=f"{num_layers} layers do not divide by {num_stages} pipeline stages "
            f"(remainder {num_layers % num_stages})",
            remedy=f'use a mesh.pipeline of {_divisors(num_layers)}, or pipeline.layers_per_stage="balanced"',
        )


def _uneven_layers(facts: Facts, num_stages: int) -> Iterator[Problem]:
    """The split that was asked for exists."""
    given, chunks = facts.config.pipeline.layers_per_stage, facts.config.pipeline.chunks
    if num_stages == 1:
        if given != "balanced":
            yield Problem(
                key="pipeline.layers_per_stage",
                value=list(given),
                message="there is one stage (mesh.pipeline = 1), which has all layers",
                remedy="remove it, or set mesh.pipeline",
            )
        return
    try:
        layer_counts(facts.model.num_layers, num_stages=num_stages, num_chunks=chunks, layers_per_stage=given)
    except ValueError as error:
        yield Problem(
            key="pipeline.layers_per_stage",
            value=given if isinstance(given, str) else list(given),
            message=str(error),
            remedy="give a number of layers for each stage (with chunks: stages x chunks numbers); together they are "
            "model.num_layers",
        )


def chunks_need_interleaving(facts: Facts) -> Iterator[Problem]:
    """Only some schedules split a stage into chunks, and they need at least two of them."""
    pipeline, num_stages = facts.config.pipeline, facts.mesh.get("pipeline", 1)
    has_chunks = pipeline.schedule in CHUNKED_KINDS and num_stages > 1
    if pipeline.chunks > 1 and not has_chunks:
        yield Problem(
            key="pipeline.chunks",
            value=pipeline.chunks,
            message=f"stages have chunks only under the schedules {' and '.join(CHUNKED_KINDS)} (pipeline.schedule = "
            f"{pipeline.schedule!r}, mesh.pipeline = {num_stages})",
            remedy='pipeline.schedule="interleaved" with mesh.pipeline above 1, or pipeline.chunks=1',
        )
    elif has_chunks and pipeline.chunks < 2:
        yield Problem(
            key="pipeline.chunks",
            value=pipeline.chunks,
            message=f"the {pipeline.schedule} schedule needs at least 2 chunks per stage",
            remedy='e.g. pipeline.chunks=2, or pipeline.schedule="1f1b"',
        )
    elif has_chunks and pipeline.layers_per_stage == "even" and facts.model.num_layers % (num_stages * pipeline.chunks):
        yield Problem(
            key="pipeline.chunks",
            value=pipeline.chunks,
            message=f"{facts.model.num_layers} layers do not divide by {num_stages} stages x {pipeline.chunks} chunks",
            remedy=f"stages x chunks must be one of {_divisors(facts.model.num_layers)}, or set "
            'pipeline.layers_per_stage="balanced"',
        )


def microbatches_fill_stages(facts: Facts) -> Iterator[Problem]:
    """1F1B and interleaved schedules need a microbatch for every stage; GPipe runs with fewer."""
    num_stages, train = facts.mesh.get("pipeline", 1), facts.config.train
    if train.microbatches < num_stages and facts.config.pipeline.schedule != "gpipe":
        yield Problem(
            key="train.microbatches",
            value=train.microbatches,
            message=f"{facts.config.pipeline.schedule} needs at least one microbatch per stage "
            f"(mesh.pipeline = {num_stages})",
            remedy=f"set train.microbatches to {num_stages} or more, better {4 * num_stages} "
            '(4 per stage), or pipeline.schedule="gpipe"',
        )


def stages_repeat_their_forward_pass(facts: Facts) -> Iterator[Problem]:
    """A stage keeps only its inputs, so that its memory does not grow with the microbatches."""
    num_stages, remat = facts.mesh.get("pipeline", 1), facts.config.train.remat
    if num_stages > 1 and remat != "full":
        yield Problem(
            key="train.remat",
            value=remat,
            message=f"each of the {num_stages} pipeline stages keeps the input of its layers for every microbatch in "
            "flight, and does their forward pass again before the backward pass",
            remedy='set train.remat="full", or mesh.pipeline=1 to keep activations',
        )


def experts_consistent(facts: Facts) -> Iterator[Problem]:
    """Settings of a mixture of experts go together."""
    model = facts.model
    if not model.num_experts:
        for name in (
            *("top_k", "expert_mlp_dim", "num_shared_experts", "first_dense_layers", "num_expert_groups"),
            *("top_k_groups", "balance_coef", "router_z_coef", "capacity_factor"),
        ):
            if value := getattr(model, name):
                yield Problem(
                    key=f"model.{name}",
                    value=value,
                    message="does nothing: model.num_experts is 0, so this is a dense model",
                    remedy=f"set model.num_experts, or remove model.{name}",
                )
        if FAMILIES[model.family].huggingface.experts:
            yield Problem(
                key="model.num_experts",
                value=0,
                message=f"family {model.family} has experts in every block",
                remedy="set model.num_experts and model.top_k",
            )
        return
    yield from _family_with_experts(model)
    yield from _expert_groups(model)
    if not 1 <= model.top_k <= model.num_experts:
        yield Problem(
            key="model.top_k",
            value=model.top_k,
            message=f"a token uses at least 1 and at most model.num_experts = {model.num_experts} experts",
            remedy=f"set model.top_k from 1 to {model.num_experts}",
        )
    if model.first_dense_layers >= model.num_layers:
        yield Problem(
            key="model.first_dense_layers",
            value=model.first_dense_layers,
            message=f"leaves no block with experts (model.num_layers = {model.num_layers})",
            remedy="make it smaller, or model.num_experts=0 for a dense model",
        )


def _family_with_experts(model: ModelConfig) -> Iterator[Problem]:
    """Experts are gated MLPs without biases; blocks that are otherwise have none."""
    able = [name for name, f in FAMILIES.items() if f.gated_mlp and not f.linear_bias and f.activation == "silu"]
    if model.family not in able:
        yield Problem(
            key="model.num_experts",
            value=model.num_experts,
            message=f"blocks of family {model.family} have no experts",
            remedy=f"model.num_experts=0, or one of the families {', '.join(able)}",
        )


def _expert_groups(model: ModelConfig) -> Iterator[Problem]:
    """Groups of equal size, of which enough are chosen to hold top_k experts."""
    groups, chosen = model.num_expert_groups, model.top_k_groups
    if not groups:
        if chosen:
            message = "does nothing: model.num_expert_groups is 0, so there are no groups to choose"
            remedy = "set model.num_expert_groups, or remove model.top_k_groups"
            yield Problem(key="model.top_k_groups", value=chosen, message=message, remedy=remedy)
        return
    if model.num_experts % groups:
        yield Problem(
            key="model.num_expert_groups",
            value=groups,
            message=f"{model.num_experts} experts do not divide by {groups} groups",
            remedy=f"use one of {_divisors(model.num_experts)}",
        )
        return
    least = -(-model.top_k // (model.num_experts // groups))
    if not least <= chosen <= groups:
        yield Problem(
            key="model.top_k_groups",
            value=chosen,
            message=f"of {groups} groups of {model.num_experts // groups} experts, a token with top_k {model.top_k} "
            "chooses enough to hold them",
            remedy=f"set model.top_k_groups from {least} to {groups}",
        )


def param_dims_divide(facts: Facts) -> Iterator[Problem]:
    """Each dim that a mesh axis splits divides evenly; nothing is replicated or padded per mesh instead."""
    sizes = dim_sizes(facts.model) | {"vocab": padded_vocab_size(facts.model)}
    kinds = [kind for kind in param_kinds(facts.model) if not kind.replicated]
    for dim, (axes, key) in _SHARDED_DIMS.items():
        shards, size = facts.axes_product(axes), sizes[dim]
        if shards is None or size % shards == 0 or not any(dim in kind.dims for kind in kinds):
            continue
        used = tuple(axis for axis in axes if facts.mesh[axis] > 1)
        uses = ", ".join(f"{kind.name} dim {kind.dims.index(dim)}" for kind in kinds if dim in kind.dims)
        what = f"size {size}"
        allowed = f"; allowed {_divisors(size)}"
        remedy = f"set {' x '.join(f'mesh.{axis}' for axis in used)} to an allowed size, or change {key}"
        if dim == "vocab":
            multiple = facts.model.vocab_multiple
            what, allowed = f"the vocabulary of {facts.model.vocab_size}, padded to {size},", ""
            remedy = (
                f"set model.vocab_multiple={math.lcm(multiple, shards)} (on every mesh alike), or change "
                f"{' or '.join(f'mesh.{axis}' for axis in used)}"
            )
        yield Problem(
            key=key,
            value=facts.model.vocab_multiple if dim == "vocab" else size,
            message=f"{what} does not divide by {facts.describe_axes(used)}{f' = {shards}' if len(used) > 1 else ''} "
            f"(remainder {size % shards}), which splits {uses}{allowed}",
            remedy=remedy,
        )


def sequence_divides(facts: Facts) -> Iterator[Problem]:
    """The context axis splits the sequence, and between blocks the tensor axis splits what is left of it."""
    tensor, context, seq_len = facts.mesh.get("tensor", 1), facts.mesh.get("context", 1), facts.config.data.seq_len
    shards = sequence_shards(tensor=tensor, context=context)
    if seq_len % shards:
        lower = seq_len // shards * shards
        working = [length for length in (lower, lower + shards) if length]
        if context == 1:
            divisor, why = f"tensor {tensor}", "which splits the sequence between blocks (activations dim 1)"
        else:
            parts = f"context {context} holds two chunks of it" + (f", split by tensor {tensor}" if tensor > 1 else "")
            divisor, why = str(shards), f"into which the mesh splits the sequence (each member of {parts})"
        yield Problem(
            key="data.seq_len",
            value=seq_len,
            message=f"does not divide by {divisor} (remainder {seq_len % shards}), {why}",
            remedy=f"set data.seq_len to {' or '.join(map(str, working))}, or change mesh.tensor"
            + (" or mesh.context" if context > 1 else ""),
        )


def _divisors(size: int) -> str:
    """Divisors that a mesh axis may have, e.g. "{1, 2, 4}"; sizes beyond any mesh are left out."""
    divisors = [str(n) for n in range(1, min(size, _MAX_AXIS) + 1) if size % n == 0]
    return "{" + ", ".join(divisors) + (", ..." if size > _MAX_AXIS else "") + "}"
