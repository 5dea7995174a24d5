"""config.json written back: read again it is the same model, and it says what transformers wrote for its own."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.huggingface_export import write_model_settings
from jaxpar.config.presets import PRESETS
from jaxpar.config.schema import ModelConfig, RopeScaling
from jaxpar.families import FAMILIES

HF = Path(__file__).parents[1] / "data" / "hf"
ORACLES = ("llama", "llama31", "qwen2", "qwen3", "gemma", "gpt2", "mixtral", "qwen3_moe")

LEFT_ASIDE = {
    "bos_token_id": "the tokenizer's, not the model's",
    "eos_token_id": "the tokenizer's, not the model's",
    "pad_token_id": "the tokenizer's, not the model's",
    "pretraining_tp": "1 is what an absent key means; it changes no result",
    "transformers_version": "says who wrote the file",
    "summary_activation": "of another head than the language model's, as are the next four",
    "summary_first_dropout": "",
    "summary_proj_to_labels": "",
    "summary_type": "",
    "summary_use_proj": "",
}
"""Keys of transformers' own files that are not written unless an original has them."""


def read_back(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_settings(tmp_path)


def settings_of(model):
    """What read_model_settings gives for a model, from the model itself."""
    names = ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "family", "num_kv_heads", "head_dim")
    names += ("tie_embeddings", "norm_eps")
    if model.num_experts:
        names += ("num_experts", "top_k", "expert_mlp_dim", "norm_topk")
    if FAMILIES[model.family].learned_positions:
        return {name: getattr(model, name) for name in (*names, "max_positions")}
    scaling = None if model.rope_scaling is None else dataclasses.asdict(model.rope_scaling)
    return {name: getattr(model, name) for name in (*names, "rope_theta")} | {"rope_scaling": scaling}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_back(name, tmp_path):
    model = PRESETS[name].model
    assert read_back(write_model_settings(model, "bfloat16", max_positions=4096), tmp_path) == settings_of(model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=2.0, original_max_positions=16)])
@pytest.mark.parametrize("head_dim", [0, 24])
def test_every_family_reads_back_with_every_option(family, scaling, head_dim, tmp_path):
    model = ModelConfig(
        family=family,
        vocab_size=11,
        embed_dim=64,
        num_layers=3,
        num_heads=4,
        head_dim=head_dim,
        mlp_dim=7,
        rope_scaling=scaling,
        rope_theta=7.5,
        norm_eps=3e-5,
        tie_embeddings=True,
    )
    expected = settings_of(dataclasses.replace(model, num_kv_heads=4, head_dim=head_dim or 16))
    config = write_model_settings(model, "float32", max_positions=10)
    assert read_back(config, tmp_path) == expected
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert read_back(flat, tmp_path) == expected, "as transformers 4 reads it"
    nested = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_back(nested, tmp_path) == expected, "as transformers 5 reads it"


@pytest.mark.parametrize("name", ORACLES)
def test_what_transformers_wrote_is_written_again(name):
    theirs = json.loads((HF / name / "config.json").read_text())
    model = ModelConfig(**read_model_settings(HF / name))
    ours = write_model_settings(model, "float32", max_positions=128)
    assert {key: ours.get(key, "absent") for key in theirs if key not in LEFT_ASIDE} == {
        key: value for key, value in theirs.items() if key not in LEFT_ASIDE
    }
    older = set() if FAMILIES[model.family].learned_positions else {"rope_theta", "rope_scaling"}
    older |= {"num_experts"} if name == "qwen3_moe" else set()
    assert ours.keys() - theirs.keys() == {*older, "torch_dtype"}
    again = write_model_settings(model, "float32", original=theirs)
    assert {key: again[key] for key in theirs} == theirs
    assert list(again) == sorted(again)


def test_the_original_keeps_its_keys_but_not_its_dimensions(tmp_path):
    original = json.loads((HF / "llama31" / "config.json").read_text())
    original |= {"torch_dtype": "float16", "eos_token_id": [1, 2], "custom": {"a": 1}, "rope_scaling": {"factor": 3}}
    original |= {"attention_bias": True, "quantization_config": {"quant_method": "fp8"}}
    original |= {"initializer_range": 0.5, "max_position_embeddings": 77}
    model = ModelConfig(**read_model_settings(HF / "llama"))
    written = write_model_settings(model, "bfloat16", original=original)
    assert (written["torch_dtype"], written["dtype"]) == ("bfloat16", "bfloat16")
    assert (written["eos_token_id"], written["custom"], written["initializer_range"]) == ([1, 2], {"a": 1}, 0.5)
    assert (written["max_position_embeddings"], written["rope_scaling"]) == (77, None)
    assert read_back(written, tmp_path) == read_model_settings(HF / "llama")
    assert write_model_settings(model, "bfloat16", original=original, max_positions=9)["max_position_embeddings"] == 9


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"family": "gpt2"}, {}, "model.num_kv_heads = 4: GPT2LMHeadModel"),
        ({"family": "gpt2", "num_kv_heads": 8, "head_dim": 32}, {}, "model.head_dim = 32"),
        ({"vocab_size": 0}, {}, "model.vocab_size"),
        ({"mlp_dim": 0}, {}, "model.mlp_dim"),
        ({}, {"original": {"model_type": "qwen3"}}, "model_type 'qwen3'"),
        ({}, {"max_positions": None}, "max_position_embeddings: a RoPE model has no number of positions"),
    ],
)
def test_what_cannot_be_written_is_named(changes, options, named):
    model = dataclasses.replace(PRESETS["tiny-bytes"].model, **changes)
    with pytest.raises(ConfigError) as caught:
        write_model_settings(model, "float32", **({"max_positions": 8} | options))
    assert named in str(caught.value)


@pytest.mark.parametrize("mlp_dim", [256, 100])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_reads_back_with_every_option(mlp_dim, tied, tmp_path):
    dims = {"embed_dim": 64, "num_layers": 3, "num_heads": 4, "mlp_dim": mlp_dim, "max_positions": 9}
    model = ModelConfig(family="gpt2", vocab_size=11, norm_eps=3e-5, tie_embeddings=tied, **dims)
    config = write_model_settings(model, "float32", max_positions=5)
    assert config["n_inner"] == (None if mlp_dim == 256 else mlp_dim)
    assert "max_position_embeddings" not in config  # the table's length is the model's own
    assert read_back(config, tmp_path) == settings_of(dataclasses.replace(model, num_kv_heads=4, head_dim=16))
