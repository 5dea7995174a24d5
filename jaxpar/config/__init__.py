"""Configuration: frozen schema, presets, TOML and dotted overrides, named errors. Imports no JAX."""

from jaxpar.config.errors import NO_VALUE, ConfigError, Problem
from jaxpar.config.load import LoadedConfig, load_config, load_with_sources
from jaxpar.config.presets import PRESETS
from jaxpar.config.schema import AXES, BYTE_VOCAB_SIZE, Config
from jaxpar.config.toml_text import config_to_toml

__all__ = [
    "AXES",
    "BYTE_VOCAB_SIZE",
    "NO_VALUE",
    "PRESETS",
    "Config",
    "ConfigError",
    "LoadedConfig",
    "Problem",
    "config_to_toml",
    "load_config",
    "load_with_sources",
]
