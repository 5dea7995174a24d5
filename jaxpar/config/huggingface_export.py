"""``model.*`` settings -> Hugging Face ``config.json``: the inverse of ``huggingface.read_model_settings``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxpar.config.dims import dims_problems, with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.huggingface import SUPPORTED_MODEL_TYPES
from jaxpar.config.schema import ModelConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Class of transformers by family; the family is also its ``model_type``."""

_WINDOW = {"max_window_layers": 28, "sliding_window": None}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {"llama": {}, "qwen2": _WINDOW, "qwen3": _WINDOW}
"""Keys without meaning for full attention; an original config.json may have others."""

_OFF: Mapping[str, Mapping[str, object]] = {
    "llama": {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    "qwen2": {"attention_dropout": 0.0},
    "qwen3": {"attention_bias": False, "attention_dropout": 0.0},
}
"""Options that our blocks do not have."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
_REPLACED = (*_DTYPE_KEYS, "head_dim", "rope_parameters", "rope_scaling", "rope_theta", "quantization_config")
"""Keys of an original that are not kept even where nothing is written in their place."""


def write_model_settings(
    model: ModelConfig,
    dtype: str,
    *,
    original: Mapping[str, object] | None = None,
    max_positions: int | None = None,
) -> dict[str, object]:
    """The config.json with which transformers loads our weights; ``read_model_settings`` gives ``model`` back.

    RoPE and dtype are written in both forms, flat for transformers 4 and ``rope_parameters`` and ``dtype`` for 5: each
    reads its own without a word about the other, and an absent ``rope_theta`` means 10000.

    Args:
        model: The model; its vocabulary is what the file states, unpadded.
        dtype: Dtype of the exported weights, e.g. ``"bfloat16"``.
        original: The config.json that the weights came from; keys that ``model`` does not decide are kept, token ids
            among them.
        max_positions: Longest sequence that the model is meant for; ``max_position_embeddings``. None: the original's.

    Returns:
        The file's content, ready for ``json.dump(..., indent=2)``; keys sorted.

    Raises:
        ConfigError: The family cannot be exported, a dimension is missing, the original is of another family, or
            nothing says how many positions the model has.
    """
    original = original or {}
    model = with_derived_dims(model)
    if problems := [*_problems(model, original, max_positions), *dims_problems(model)]:
        raise ConfigError(problems)
    config: dict[str, object] = {
        "initializer_range": model.init_std,
        "use_cache": True,
        **_DEFAULTS[model.family],
        **{key: value for key, value in original.items() if key not in _REPLACED},
        **_OFF[model.family],
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        **dict.fromkeys(_DTYPE_KEYS, dtype),
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        **_rope(model),
    }
    if max_positions is not None:
        config["max_position_embeddings"] = max_positions
    # Qwen2's class derives head_dim where the file has none, and its own files have none.
    if model.family != "qwen2" or model.head_dim * model.num_heads != model.embed_dim:
        config["head_dim"] = model.head_dim
    if model.family != "llama":
        config |= {"use_sliding_window": False, "layer_types": ["full_attention"] * model.num_layers}
    return dict(sorted(config.items()))


def _problems(model: ModelConfig, original: Mapping[str, object], max_positions: int | None) -> list[Problem]:
    if model.family not in _ARCHITECTURES:
        remedy = "families that can be exported: " + ", ".join(SUPPORTED_MODEL_TYPES)
        return [Problem(key="model.family", value=model.family, message="no export to Hugging Face yet", remedy=remedy)]
    problems = []
    if not model.vocab_size:
        message = "the file must state the size of the vocabulary"
        problems.append(Problem(key="model.vocab_size", value=0, message=message, remedy="set model.vocab_size"))
    if (theirs := original.get("model_type", model.family)) != model.family:
        message = f"the original config.json has model_type {theirs!r}"
        remedy = "give the config.json that the weights came from, or none"
        problems.append(Problem(key="model.family", value=model.family, message=message, remedy=remedy))
    if max_positions is None and original.get("max_position_embeddings") is None:
        message = "a RoPE model has no number of positions of its own, but config.json states one"
        remedy = "give the longest sequence that the model is meant for, or the config.json that the weights came from"
        problems.append(Problem(key="max_position_embeddings", message=message, remedy=remedy))
    return problems


def _rope(model: ModelConfig) -> dict[str, object]:
    if model.rope_scaling is None:
        return {
            "rope_theta": model.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        }
    scaling = dataclasses.asdict(model.rope_scaling)
    scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
    scaling["rope_type"] = "llama3"
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": dict(sorted(scaling.items())),
        "rope_parameters": dict(sorted({**scaling, "rope_theta": model.rope_theta}.items())),
    }
