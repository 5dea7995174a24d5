"""Which settings each optimizer has, and their defaults. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxpar.config.schema import OptimConfig

OPTIMIZER_SETTINGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
        "lion": {"b1": 0.9, "b2": 0.99},
        "sgd": {"momentum": 0.9, "nesterov": False},
        "adafactor": {
            "eps": 1e-30,
            "momentum": 0.0,
            "factored": True,
            "min_factored_dim": 128,
            "decay_exponent": 0.8,
            "clip_update_rms": 1.0,
            "scale_by_param_rms": True,
        },
        "muon": {
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "update_scale": "rms",
            "adamw_lr": None,
        },
    }
)
"""Settings by optimizer, with what an absent one means; ``adamw_lr`` absent is ``optim.lr``."""

_ALL = sorted({name for settings in OPTIMIZER_SETTINGS.values() for name in settings})


def with_optimizer_defaults(optim: OptimConfig) -> OptimConfig:
    """The config with the absent settings of its optimizer filled in."""
    defaults = OPTIMIZER_SETTINGS[optim.name]
    return dataclasses.replace(
        optim, **{name: value for name, value in defaults.items() if getattr(optim, name) is None}
    )


def unused_settings(optim: OptimConfig) -> list[str]:
    """Settings that are given, and that the chosen optimizer does not have."""
    used = OPTIMIZER_SETTINGS[optim.name]
    return [name for name in _ALL if name not in used and getattr(optim, name) is not None]


def optimizers_with(setting: str) -> list[str]:
    """Optimizers that have a setting."""
    return [name for name, settings in OPTIMIZER_SETTINGS.items() if setting in settings]
