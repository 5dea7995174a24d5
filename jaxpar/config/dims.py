"""Model dimensions that follow from others, and those that must be given."""

from __future__ import annotations

import dataclasses

from jaxpar.config.errors import Problem
from jaxpar.config.schema import ModelConfig

REQUIRED_DIMS = ("embed_dim", "num_layers", "num_heads", "mlp_dim")
"""``model.*`` keys without which there is no model."""


def with_derived_dims(model: ModelConfig) -> ModelConfig:
    """The model with ``num_kv_heads``, ``head_dim`` and ``expert_mlp_dim`` of 0 replaced by what they mean.

    ``head_dim`` stays 0 where ``embed_dim`` does not divide by ``num_heads``; :func:`dims_problems` names that.
    """
    num_kv_heads = model.num_kv_heads or model.num_heads
    head_dim = model.head_dim
    if not head_dim and model.num_heads and model.embed_dim % model.num_heads == 0:
        head_dim = model.embed_dim // model.num_heads
    expert_mlp_dim = model.expert_mlp_dim or (model.mlp_dim if model.num_experts else 0)
    return dataclasses.replace(model, num_kv_heads=num_kv_heads, head_dim=head_dim, expert_mlp_dim=expert_mlp_dim)


def dims_problems(model: ModelConfig) -> list[Problem]:
    """Dimensions that are missing, and a ``head_dim`` that cannot be derived."""
    # A config made in Python can name a preset without having its dimensions: only load_config applies presets.
    remedy = "presets are applied by jaxpar.load_config" if model.preset else "or set model.preset"
    problems = [
        Problem(
            key=f"model.{name}",
            value=0,
            message="the model has no such dimension yet",
            remedy=f"set model.{name} (at least 1), {remedy}",
        )
        for name in REQUIRED_DIMS
        if getattr(model, name) == 0
    ]
    if model.num_heads and not model.head_dim and model.embed_dim % model.num_heads:
        problems.append(
            Problem(
                key="model.num_heads",
                value=model.num_heads,
                message=f"does not divide model.embed_dim = {model.embed_dim} "
                f"(remainder {model.embed_dim % model.num_heads}), so head_dim cannot be embed_dim / num_heads",
                remedy="set model.head_dim, or num_heads to a divisor of embed_dim",
            )
        )
    return problems
