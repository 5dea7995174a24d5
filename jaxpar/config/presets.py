"""Public models by name, as model settings. Source: the models' published config files."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from jaxpar.config.dims import with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.keys import nearest_name
from jaxpar.config.schema import BYTE_VOCAB_SIZE, ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    settings: Mapping[str, object]
    """``model.*`` settings that define it; all others keep their defaults."""

    @property
    def model(self) -> ModelConfig:
        """The model with every dimension filled in."""
        return with_derived_dims(ModelConfig(preset=self.name, **self.settings))


_LLAMA_2 = {"family": "llama", "vocab_size": 32000, "norm_eps": 1e-5, "rope_theta": 10000.0}
_LLAMA_3 = {"family": "llama", "vocab_size": 128256, "norm_eps": 1e-5, "rope_theta": 500000.0}
_LLAMA_3_1 = _LLAMA_3 | {"rope_scaling": RopeScaling(factor=8.0, original_max_positions=8192)}
_LLAMA_3_2 = _LLAMA_3 | {
    "rope_scaling": RopeScaling(factor=32.0, original_max_positions=8192),
    "tie_embeddings": True,
}
_QWEN_2_5 = {"family": "qwen2", "norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN_3 = {"family": "qwen3", "vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6}
_MIXTRAL = {"family": "mixtral", "norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8, "top_k": 2}
_QWEN_3_MOE = _QWEN_3 | {"family": "qwen3_moe", "num_experts": 128, "top_k": 8}
_GEMMA = {
    "family": "gemma",
    "vocab_size": 256000,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_embeddings": True,
}
_GPT2 = {
    "family": "gpt2",
    "vocab_size": 50257,
    "max_positions": 1024,
    "norm_eps": 1e-5,
    "tie_embeddings": True,
}


def _dims(embed: int, layers: int, heads: int, kv_heads: int, head: int, mlp: int) -> dict[str, int]:
    return {
        "embed_dim": embed,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head,
        "mlp_dim": mlp,
    }


_SETTINGS: dict[str, dict[str, object]] = {
    # Ours: small enough to train on a CPU; divides over fsdp up to 8 and tensor up to 4.
    "tiny-bytes": {"family": "llama", "vocab_size": BYTE_VOCAB_SIZE} | _dims(128, 6, 8, 4, 16, 512),
    "gpt2-124m": _GPT2 | _dims(768, 12, 12, 12, 64, 3072),
    "gpt2-1.5b": _GPT2 | _dims(1600, 48, 25, 25, 64, 6400),
    "llama-2-7b": _LLAMA_2 | _dims(4096, 32, 32, 32, 128, 11008),
    "llama-2-13b": _LLAMA_2 | _dims(5120, 40, 40, 40, 128, 13824),
    "llama-2-70b": _LLAMA_2 | _dims(8192, 80, 64, 8, 128, 28672),
    "llama-3-8b": _LLAMA_3 | _dims(4096, 32, 32, 8, 128, 14336),
    "llama-3-70b": _LLAMA_3 | _dims(8192, 80, 64, 8, 128, 28672),
    "llama-3.1-8b": _LLAMA_3_1 | _dims(4096, 32, 32, 8, 128, 14336),
    "llama-3.1-70b": _LLAMA_3_1 | _dims(8192, 80, 64, 8, 128, 28672),
    "llama-3.1-405b": _LLAMA_3_1 | _dims(16384, 126, 128, 8, 128, 53248),
    "llama-3.2-1b": _LLAMA_3_2 | _dims(2048, 16, 32, 8, 64, 8192),
    "llama-3.2-3b": _LLAMA_3_2 | _dims(3072, 28, 24, 8, 128, 8192),
    "gemma-2b": _GEMMA | _dims(2048, 18, 8, 1, 256, 16384),
    "gemma-7b": _GEMMA | _dims(3072, 28, 16, 16, 256, 24576),
    "qwen2.5-0.5b": _QWEN_2_5 | {"vocab_size": 151936, "tie_embeddings": True} | _dims(896, 24, 14, 2, 64, 4864),
    "qwen2.5-7b": _QWEN_2_5 | {"vocab_size": 152064} | _dims(3584, 28, 28, 4, 128, 18944),
    "qwen3-0.6b": _QWEN_3 | {"tie_embeddings": True} | _dims(1024, 28, 16, 8, 128, 3072),
    "qwen3-8b": _QWEN_3 | _dims(4096, 36, 32, 8, 128, 12288),
    "mixtral-8x7b": _MIXTRAL | {"vocab_size": 32000, "expert_mlp_dim": 14336} | _dims(4096, 32, 32, 8, 128, 14336),
    "mixtral-8x22b": _MIXTRAL | {"vocab_size": 32768, "expert_mlp_dim": 16384} | _dims(6144, 56, 48, 8, 128, 16384),
    "qwen3-30b-a3b": _QWEN_3_MOE | {"expert_mlp_dim": 768} | _dims(2048, 48, 32, 4, 128, 6144),
    "qwen3-235b-a22b": _QWEN_3_MOE | {"expert_mlp_dim": 1536} | _dims(4096, 94, 64, 4, 128, 12288),
}

PRESETS: Mapping[str, Preset] = types.MappingProxyType(
    {name: Preset(name=name, settings=types.MappingProxyType(settings)) for name, settings in _SETTINGS.items()}
)
"""Models by public name."""


def find_preset(name: str) -> Preset:
    """The preset of a public name.

    Raises:
        ConfigError: Unknown name, with the nearest known one.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = nearest_name(name, PRESETS)
    remedy = f"did you mean {nearest}? " if nearest else ""
    remedy += "`jaxpar config --presets` lists all: " + ", ".join(PRESETS)
    raise ConfigError([Problem(key="model.preset", value=name, message="no such preset", remedy=remedy)])
