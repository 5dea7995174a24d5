"""Hugging Face ``config.json`` -> ``model.*`` settings, refusing by name what would change the mathematics.

Key names follow transformers: flat ``rope_theta`` and ``rope_scaling`` up to version 4, ``rope_parameters`` from 5.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path

from jaxpar.config.errors import NO_VALUE, ConfigError, Problem
from jaxpar.families import FAMILIES
from jaxpar.families.family import ExpertKeys, HuggingFace

PREFIX = "hf:"
"""Marks a Hugging Face directory in ``model.init_from``."""

SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
"""``model_type`` values that can be read; each is also the family's name."""

SHAPE_SETTINGS = frozenset(
    {
        "family",
        "vocab_size",
        "embed_dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "mlp_dim",
        "num_experts",
        "expert_mlp_dim",
        "max_positions",
        "tie_embeddings",
    }
)
"""``model.*`` settings that decide which arrays the checkpoint holds; the others only change what is computed."""

_ROPE_THETA = 10000.0
"""What an absent ``rope_theta`` means."""

_LLAMA3_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
}


def read_model_settings(directory: str | Path) -> dict[str, object]:
    """Settings of ``model.*`` that a Hugging Face directory's config.json states.

    Args:
        directory: Directory with config.json, relative to the working directory.

    Returns:
        Setting name -> value. ``rope_scaling`` is a nested dict or None; every setting of the family is present.
        Dropout rates of GPT-2 are not read: they say how to train, not what the weights compute.

    Raises:
        ConfigError: No readable config.json, or one that needs what is not supported. Every such key is named.
    """
    path = Path(directory) / "config.json"
    try:
        if not str(directory):
            raise FileNotFoundError(errno.ENOENT, "no directory is given")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
    except ValueError as error:
        reason = f"{path} is not JSON: {error}"
    else:
        if isinstance(config, dict):
            return _Reader(path, config).settings()
        reason = f"{path} is not a JSON object"
    remedy = "point model.init_from = hf:DIR at a directory with config.json and safetensors"
    raise ConfigError([Problem(key="model.init_from", value=f"{PREFIX}{directory}", message=reason, remedy=remedy)])


class _Reader:
    """One config.json; collects everything that stands against using it."""

    def __init__(self, path: Path, config: dict):
        self.path = path
        self.config = config
        self.problems: list[Problem] = []

    def settings(self) -> dict[str, object]:
        model_type = self.config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            known = "supported: " + ", ".join(SUPPORTED_MODEL_TYPES)
            self.refuse("model_type", "not a model type that jaxpar reads", known)
            raise ConfigError(self.problems)
        family = FAMILIES[model_type]
        hf = family.huggingface
        self.refuse_unsupported(model_type, hf)
        dims = ("vocab_size", "embed_dim", "num_layers", "num_heads")
        settings: dict[str, object] = {name: self.integer(hf.keys[name]) for name in dims}
        settings["family"] = model_type
        settings["mlp_dim"] = self.mlp_dim(hf)
        settings["num_kv_heads"] = self.num_kv_heads(hf)
        settings["head_dim"] = self.head_dim(hf)
        settings["tie_embeddings"] = self.typed("tie_word_embeddings", bool, hf.tied)
        settings["norm_eps"] = float(self.typed(hf.keys["norm_eps"], (int, float), hf.norm_eps))
        if hf.experts:
            settings |= self.experts(hf.experts)
        if family.learned_positions:
            settings["max_positions"] = self.integer(hf.keys["max_positions"])
        else:
            settings |= self.rope()
        if self.problems:
            raise ConfigError(self.problems)
        return settings

    def refuse(self, key: str, message: str, remedy: str, value: object = NO_VALUE) -> None:
        value = self.config.get(key, NO_VALUE) if value is NO_VALUE else value
        given = "" if value is NO_VALUE else f" = {value!r}"
        self.problems.append(
            Problem(
                key="model.init_from",
                value=f"{PREFIX}{self.path.parent}",
                message=f"{self.path.name} has {key}{given}: {message}"
                if given
                else f"{self.path.name}: {key} {message}",
                remedy=remedy,
            )
        )

    def refuse_unsupported(self, model_type: str, hf: HuggingFace) -> None:
        """Options that the decoder does not have. Absent keys mean that the option is off."""
        config = self.config
        for key in (*hf.refused, "quantization_config"):
            if config.get(key):
                self.refuse(key, "not supported", "only checkpoints without it can be read")
        for key, value in hf.required.items():
            if config.get(key, value) != value:
                self.refuse(key, "not supported", f"only checkpoints with {value!r} can be read")
        stated = [key for key in hf.activation_keys if config.get(key) is not None]
        if stated and config[stated[-1]] not in hf.activations:
            wanted = hf.activations[0]
            self.refuse(stated[-1], f"{model_type} blocks here use {wanted}", f"only {wanted} can be read")
        if any(kind != "full_attention" for kind in self.typed("layer_types", list, [])):
            self.refuse("layer_types", "layers with other than full attention are not supported", "full_attention only")
        for source in (config, config.get("rope_parameters"), config.get("rope_scaling")):
            if isinstance(source, dict) and source.get("partial_rotary_factor", 1.0) not in (None, 1):
                factor = source["partial_rotary_factor"]
                self.refuse("partial_rotary_factor", "RoPE turns the whole head here", "only 1.0 can be read", factor)

    def typed(self, key: str, kinds: type | tuple[type, ...], default: object) -> object:
        value = self.config.get(key)
        if value is None:
            return default
        is_bool_as_number = isinstance(value, bool) and kinds is not bool
        if not isinstance(value, kinds) or is_bool_as_number:
            self.refuse(key, "has the wrong type", "repair config.json")
            return default
        return value

    def integer(self, key: str) -> int:
        value = self.typed(key, int, None)
        if value is None and self.config.get(key) is None:
            self.refuse(key, "is missing", "add it to config.json")
        elif value is not None and value < 1:
            self.refuse(key, "must be at least 1", "repair config.json")
        return value or 0

    def mlp_dim(self, hf: HuggingFace) -> int:
        if hf.mlp_ratio and self.config.get(hf.keys["mlp_dim"]) is None:
            return hf.mlp_ratio * self.typed(hf.keys["embed_dim"], int, 0)
        return self.integer(hf.keys["mlp_dim"])

    def num_kv_heads(self, hf: HuggingFace) -> int:
        key, num_heads = hf.keys.get("num_kv_heads"), self.typed(hf.keys["num_heads"], int, 0)
        if key is None:
            return num_heads
        # transformers' default for an absent key is e.g. 32 for Qwen, which no small model means; null means num_heads.
        if key not in self.config and not hf.kv_heads_may_be_absent:
            return self.integer(key)
        return num_heads if self.config.get(key) is None else self.integer(key)

    def head_dim(self, hf: HuggingFace) -> int:
        key = hf.keys.get("head_dim")
        if key is not None and self.config.get(key) is not None:
            return self.integer(key)
        if hf.head_dim is not None:
            return hf.head_dim
        num_heads = self.typed(hf.keys["num_heads"], int, 0)
        embed_dim = self.typed(hf.keys["embed_dim"], int, 0)
        if num_heads < 1 or embed_dim < 1:
            return 0  # already refused by name
        if embed_dim % num_heads:
            remedy = "add head_dim" if key else "repair config.json"
            self.refuse("head_dim", f"is absent and {num_heads} heads do not divide {embed_dim}", remedy)
        return embed_dim // num_heads

    def experts(self, keys: ExpertKeys) -> dict[str, object]:
        stated = [key for key in keys.num_experts if key in self.config]
        norm_topk = True if keys.norm_topk is None else self.typed(keys.norm_topk, bool, False)
        return {
            "num_experts": self.integer((stated or keys.num_experts)[0]),
            "top_k": self.integer("num_experts_per_tok"),
            "expert_mlp_dim": self.integer(keys.width),
            "norm_topk": norm_topk,
        }

    def rope(self) -> dict[str, object]:
        is_new = self.config.get("rope_parameters") is not None
        name = "rope_parameters" if is_new else "rope_scaling"
        parameters = self.typed(name, dict, {})
        theta = parameters.get("rope_theta", self.config.get("rope_theta", _ROPE_THETA))
        if not _is_number(theta) or theta <= 0:
            self.refuse("rope_theta", "must be a positive number", "repair config.json", theta)
            theta = _ROPE_THETA
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        scaling = None
        if kind == "llama3":
            scaling = self.llama3_scaling(name, parameters)
        elif kind != "default" or any(isinstance(value, dict) for value in parameters.values()):
            self.refuse(name, f"RoPE type {kind!r} is not supported here", "default and llama3 can be read", parameters)
        return {"rope_theta": float(theta), "rope_scaling": scaling}

    def llama3_scaling(self, name: str, parameters: dict) -> dict[str, object] | None:
        wrong = [key for key in _LLAMA3_SCALING if not _is_number(parameters.get(key)) or parameters[key] <= 0]
        if wrong:
            self.refuse(name, "llama3 scaling needs a positive " + ", ".join(wrong), "repair config.json", parameters)
            return None
        scaling = {ours: float(parameters[theirs]) for theirs, ours in _LLAMA3_SCALING.items()}
        return scaling | {"original_max_positions": int(parameters["original_max_position_embeddings"])}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
