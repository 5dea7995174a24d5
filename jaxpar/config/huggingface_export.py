"""``model.*`` settings -> Hugging Face ``config.json``: the inverse of ``huggingface.read_model_settings``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxpar.config.dims import dims_problems, with_derived_dims
from jaxpar.config.errors import ConfigError, Problem
from jaxpar.config.schema import ModelConfig
from jaxpar.families import FAMILIES
from jaxpar.families.family import ExpertKeys, HuggingFace

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

    RoPE and dtype are written in both forms, flat for transformers 4 and ``rope_parameters`` and ``dtype`` for 5, as is
    the number of Qwen3's experts: each reads its own without a word about the other, and an absent ``rope_theta`` means
    10000.

    Args:
        model: The model; its vocabulary is what the file states, unpadded.
        dtype: Dtype of the exported weights, e.g. ``"bfloat16"``.
        original: The config.json that the weights came from; keys that ``model`` does not decide are kept, token ids
            among them.
        max_positions: Longest sequence that the model is meant for; ``max_position_embeddings``. None: the original's.
            A model with learned positions states the length of their table instead.

    Returns:
        The file's content, ready for ``json.dump(..., indent=2)``; keys sorted.

    Raises:
        ConfigError: A dimension is missing or one that transformers does not have, the original is of another family,
            or nothing says how many positions the model has.
    """
    original = original or {}
    model = with_derived_dims(model)
    if problems := [*_problems(model, original, max_positions), *dims_problems(model)]:
        raise ConfigError(problems)
    family = FAMILIES[model.family]
    hf = family.huggingface
    config: dict[str, object] = {
        "initializer_range": model.init_std,
        "use_cache": True,
        **hf.defaults,
        **{key: value for key, value in original.items() if key not in _REPLACED},
        **hf.written,
        "architectures": [hf.architecture],
        "model_type": model.family,
        **dict.fromkeys(_DTYPE_KEYS, dtype),
        **{theirs: getattr(model, ours) for ours, theirs in hf.keys.items() if ours not in ("head_dim", "mlp_dim")},
        hf.keys["mlp_dim"]: None if hf.mlp_ratio and model.mlp_dim == hf.mlp_ratio * model.embed_dim else model.mlp_dim,
        **dict.fromkeys(hf.activation_keys, hf.activations[0]),
        "tie_word_embeddings": model.tie_embeddings,
    }
    if not family.learned_positions:
        config |= _rope(model)
        if max_positions is not None:
            config["max_position_embeddings"] = max_positions
    if "head_dim" in hf.keys and (hf.writes_head_dim == "always" or not _head_dim_is_derived(model)):
        config[hf.keys["head_dim"]] = model.head_dim
    if hf.experts:
        config |= _experts(model, hf.experts)
    if hf.layer_types:
        config["layer_types"] = ["full_attention"] * model.num_layers
    return dict(sorted(config.items()))


def _head_dim_is_derived(model: ModelConfig) -> bool:
    return model.head_dim * model.num_heads == model.embed_dim


def _problems(model: ModelConfig, original: Mapping[str, object], max_positions: int | None) -> list[Problem]:
    problems = [*_missing_keys(model, FAMILIES[model.family].huggingface), *experts_without_keys(model)]
    if not model.vocab_size:
        message = "the file must state the size of the vocabulary"
        problems.append(Problem(key="model.vocab_size", value=0, message=message, remedy="set model.vocab_size"))
    if (theirs := original.get("model_type", model.family)) != model.family:
        message = f"the original config.json has model_type {theirs!r}"
        remedy = "give the config.json that the weights came from, or none"
        problems.append(Problem(key="model.family", value=model.family, message=message, remedy=remedy))
    has_positions = FAMILIES[model.family].learned_positions
    if not has_positions and max_positions is None and original.get("max_position_embeddings") is None:
        message = "a RoPE model has no number of positions of its own, but config.json states one"
        remedy = "give the longest sequence that the model is meant for, or the config.json that the weights came from"
        problems.append(Problem(key="max_position_embeddings", message=message, remedy=remedy))
    return problems


def _missing_keys(model: ModelConfig, hf: HuggingFace) -> Iterator[Problem]:
    """Dims for which the family's config.json has no key, so that they must be what transformers takes."""
    if "num_kv_heads" not in hf.keys and model.num_kv_heads != model.num_heads:
        message = f"{hf.architecture} of transformers has as many kv heads as heads ({model.num_heads})"
        yield Problem(key="model.num_kv_heads", value=model.num_kv_heads, message=message, remedy="cannot be exported")
    if "head_dim" not in hf.keys and not _head_dim_is_derived(model):
        message = f"heads of transformers' {hf.architecture} are embed_dim / num_heads wide"
        yield Problem(key="model.head_dim", value=model.head_dim, message=message, remedy="cannot be exported")


def experts_without_keys(model: ModelConfig) -> Iterator[Problem]:
    """Options of a mixture of experts that the family has in no checkpoint of transformers."""
    keys = FAMILIES[model.family].huggingface.experts
    if model.num_experts and keys is None:
        remedy = "family mixtral is llama with experts, qwen3_moe is qwen3 with experts"
        message = "transformers has no such model with experts"
        yield Problem(key="model.family", value=model.family, message=message, remedy=remedy)
    off = {"num_shared_experts": 0, "first_dense_layers": 0, "router": "softmax", "num_expert_groups": 0}
    if keys is not None and keys.norm_topk is None:
        off["norm_topk"] = True
    if keys is not None and keys.width == "intermediate_size":
        off["mlp_dim"] = model.expert_mlp_dim
    for name, value in off.items():
        if model.num_experts and getattr(model, name) != value:
            message = f"models of family {model.family} in transformers have {value!r}"
            yield Problem(key=f"model.{name}", value=getattr(model, name), message=message, remedy="cannot be exported")


def _experts(model: ModelConfig, keys: ExpertKeys) -> dict[str, object]:
    written = dict.fromkeys(keys.num_experts, model.num_experts)
    written |= {"num_experts_per_tok": model.top_k, keys.width: model.expert_mlp_dim}
    return written if keys.norm_topk is None else written | {keys.norm_topk: model.norm_topk}


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
