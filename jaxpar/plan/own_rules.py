"""Rules of a run that trains a user's own module instead of a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.config.schema import DataConfig, ModelConfig
from jaxpar.plan.facts import Facts

_DECODER_AXES = ("pipeline", "expert", "context")
_LOADING_KEYS = ("shuffle", "last_batch", "repeat", "prefetch", "num_threads")
"""Keys of data.* that are about the order and the loading of any rows."""


def own_axes(facts: Facts) -> Iterator[Problem]:
    """Axes that only decoders can use."""
    for axis in _DECODER_AXES:
        size = facts.mesh.get(axis, 1)
        if size > 1:
            yield Problem(
                key=f"mesh.{axis}",
                value=getattr(facts.config.mesh, axis),
                message=f"axis {axis} splits what jaxpar's own decoder has; a module of your own has no use for it",
                remedy=f"set mesh.{axis}=1; data, fsdp and tensor work",
            )


def own_settings(facts: Facts) -> Iterator[Problem]:
    """Settings of the decoder and of token data do nothing for a module of one's own."""
    config = facts.config
    for section, given, unset in (("model", config.model, ModelConfig()), ("data", config.data, DataConfig())):
        for field in dataclasses.fields(given):
            value = getattr(given, field.name)
            if field.name not in _LOADING_KEYS and value != getattr(unset, field.name):
                yield Problem(
                    key=f"{section}.{field.name}",
                    value=value,
                    message="does nothing: model and data are given to jaxpar.Trainer",
                    remedy=f"remove {section}.{field.name}",
                )
    for key, value, unset in (
        ("mesh.fsdp_strategy", config.mesh.fsdp_strategy, "full"),
        ("train.dropout", config.train.dropout, 0.0),
        ("train.z_loss", config.train.z_loss, 0.0),
        ("train.loss_chunk_tokens", config.train.loss_chunk_tokens, 0),
    ):
        if value != unset:
            yield Problem(key=key, value=value, message="works with jaxpar's own decoder only", remedy=f"remove {key}")
    if config.train.remat in ("selective", "offload"):
        yield Problem(
            key="train.remat",
            value=config.train.remat,
            message="keeps activations that jaxpar's own decoder names",
            remedy="remove train.remat; use jax.checkpoint in your module",
        )
    if config.data.last_batch == "pad":
        yield Problem(
            key="data.last_batch",
            value="pad",
            message="rows of your own have no weight of 0 to be padded with",
            remedy='data.last_batch="drop"',
        )
