"""jaxpar: train Transformers on GPU clusters with one named mesh and one table of PartitionSpecs.

The public names load lazily, so that ``jaxpar --help`` and ``jaxpar config`` start without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpar.config import Config as Config
    from jaxpar.config import ConfigError as ConfigError
    from jaxpar.config import load_config as load_config
    from jaxpar.hf import from_hf as from_hf
    from jaxpar.plan.parameters import param_count_of as param_count
    from jaxpar.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "Config": ("jaxpar.config", "Config"),
    "ConfigError": ("jaxpar.config", "ConfigError"),
    "load_config": ("jaxpar.config", "load_config"),
    "param_count": ("jaxpar.plan.parameters", "param_count_of"),
    "from_hf": ("jaxpar.hf", "from_hf"),
    "Trainer": ("jaxpar.trainer", "Trainer"),
}
__all__ = ["Config", "ConfigError", "Trainer", "__version__", "from_hf", "load_config", "param_count"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)
