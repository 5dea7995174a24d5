"""Hugging Face config.json: what is read, and what is refused by name."""

import json
from pathlib import Path

import pytest

from jaxpar.config import ConfigError, load_config, load_with_sources
from jaxpar.config.huggingface import read_model_settings
from jaxpar.config.schema import RopeScaling

HF = Path(__file__).parents[1] / "data" / "hf"


def directory_with(tmp_path, base, changes, removed=()):
    config = json.loads((HF / base / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if key not in removed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def message_of(directory, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"model.init_from=hf:{directory}", *overrides])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "family", "head_dim", "tied"),
    [
        ("llama", "llama", 8, False),
        ("llama31", "llama", 8, True),
        ("qwen2", "qwen2", 8, False),
        ("qwen3", "qwen3", 16, False),
    ],
)
def test_dims_come_from_the_directory(name, family, head_dim, tied):
    loaded = load_with_sources(None, [f"model.init_from=hf:{HF / name}"])
    model = loaded.config.model
    assert (model.vocab_size, model.embed_dim, model.num_layers, model.num_heads) == (160, 64, 4, 8)
    assert (model.num_kv_heads, model.mlp_dim, model.rope_theta, model.norm_eps) == (4, 112, 500000.0, 1e-5)
    assert (model.family, model.head_dim, model.tie_embeddings) == (family, head_dim, tied)
    expected = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=16)
    assert model.rope_scaling == (expected if name == "llama31" else None)
    assert loaded.sources["model.embed_dim"] == f"hf:{HF / name / 'config.json'}"
    assert loaded.warnings == ()


def test_gemma_comes_from_the_directory():
    settings = read_model_settings(HF / "gemma")
    assert {name: settings[name] for name in ("family", "num_kv_heads", "head_dim", "mlp_dim", "tie_embeddings")} == {
        "family": "gemma",
        "num_kv_heads": 1,
        "head_dim": 16,
        "mlp_dim": 112,
        "tie_embeddings": True,
    }
    assert (settings["rope_theta"], settings["norm_eps"]) == (500000.0, 1e-5)


def test_gpt2_comes_from_the_directory(tmp_path):
    settings = read_model_settings(HF / "gpt2")
    assert settings == {
        "family": "gpt2",
        "vocab_size": 160,
        "embed_dim": 64,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 8,
        "mlp_dim": 256,
        "max_positions": 128,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
    }
    absent = ["n_inner", "layer_norm_epsilon", "tie_word_embeddings", "scale_attn_weights", "activation_function"]
    # dropout rates, which the published files have, say nothing about the weights
    changes = {"attn_pdrop": 0.1, "n_ctx": 1024}
    assert read_model_settings(directory_with(tmp_path, "gpt2", changes, removed=absent)) == settings
    assert read_model_settings(directory_with(tmp_path, "gpt2", {"n_inner": 96}))["mlp_dim"] == 96


def test_the_first_gemma_files_name_another_activation_than_they_mean(tmp_path):
    """transformers 4 reads hidden_act = "gelu" without hidden_activation as the authors' tanh form."""
    old = {"hidden_act": "gelu", "hidden_activation": None}
    assert read_model_settings(directory_with(tmp_path, "gemma", old)) == read_model_settings(HF / "gemma")


def test_keys_of_transformers_4(tmp_path):
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    old = {"rope_theta": 123.0, "rope_scaling": scaling}
    settings = read_model_settings(directory_with(tmp_path, "llama", old, removed=["rope_parameters"]))
    assert settings["rope_theta"] == 123.0
    assert settings["rope_scaling"]["factor"] == 32.0
    assert settings["rope_scaling"]["original_max_positions"] == 8192


def test_absent_keys_mean_what_transformers_means(tmp_path):
    absent = ["head_dim", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "hidden_act"]
    settings = read_model_settings(directory_with(tmp_path, "llama", {}, removed=absent))
    assert (settings["head_dim"], settings["num_kv_heads"], settings["tie_embeddings"]) == (8, 8, False)
    assert (settings["rope_theta"], settings["norm_eps"], settings["rope_scaling"]) == (10000.0, 1e-6, None)
    assert read_model_settings(directory_with(tmp_path, "qwen3", {}, removed=["head_dim"]))["head_dim"] == 128
    assert read_model_settings(directory_with(tmp_path, "gemma", {}, removed=["head_dim"]))["head_dim"] == 256
    for name in ("qwen3", "gemma"):
        directory = directory_with(tmp_path, name, {}, removed=["num_key_value_heads"])
        assert "num_key_value_heads" in message_of(directory)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2}}, "linear"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 2}}, "yarn"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ("llama", {"model_type": "gpt_neox"}, "gpt_neox"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("llama", {"hidden_size": 0}, "hidden_size"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"hidden_size": 60, "head_dim": None}, "head_dim"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma", {"hidden_act": "relu", "hidden_activation": None}, "hidden_act"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_positions": 0}, "n_positions"),
        ("gpt2", {"n_embd": 60}, "head_dim"),
        ("gpt2", {"n_layer": None}, "n_layer"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(tmp_path, base, changes, named):
    assert named in message_of(directory_with(tmp_path, base, changes))


def test_every_refused_key_is_named_at_once(tmp_path):
    message = message_of(directory_with(tmp_path, "llama", {"mlp_bias": True, "hidden_act": "relu", "hidden_size": -1}))
    assert all(key in message for key in ("mlp_bias", "hidden_act", "hidden_size"))


@pytest.mark.parametrize(("name", "width"), [("mixtral", 112), ("qwen3_moe", 48)])
def test_experts_come_from_the_directory(name, width, tmp_path):
    model = load_config(None, [f"model.init_from=hf:{HF / name}"]).model
    assert (model.family, model.num_experts, model.top_k, model.expert_mlp_dim) == (name, 8, 2, width)
    assert model.norm_topk
    assert "model.num_experts" in message_of(HF / name, ["model.num_experts=4"])
    other = {"num_experts": 8, "norm_topk_prob": False}
    settings = read_model_settings(directory_with(tmp_path, "qwen3_moe", other, removed=["num_local_experts"]))
    assert (settings["num_experts"], settings["norm_topk"]) == (8, False)


def test_biases_of_qwen2_do_not_depend_on_attention_bias(tmp_path):
    assert read_model_settings(directory_with(tmp_path, "qwen2", {"attention_bias": True}))["family"] == "qwen2"


@pytest.mark.parametrize(
    "argument", ["model.embed_dim=128", "model.num_kv_heads=8", "model.tie_embeddings=true", "model.family=qwen3"]
)
def test_a_contradicting_shape_names_both(argument):
    key = argument.partition("=")[0]
    message = message_of(HF / "llama", [argument])
    assert key in message
    assert f"override contradicts hf:{HF / 'llama' / 'config.json'}" in message


def test_the_length_of_a_position_table_is_a_shape():
    message = message_of(HF / "gpt2", ["model.max_positions=64"])
    assert "model.max_positions" in message
    assert "which has 128" in message


def test_the_same_dims_may_be_repeated():
    assert load_config(None, [f"model.init_from=hf:{HF / 'llama'}", "model.embed_dim=64"]).model.embed_dim == 64


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("model.rope_theta=1e6", "model.rope_theta = 1000000.0 replaces 500000.0"),
        ("model.rope_scaling=none", "model.rope_scaling = None replaces"),
        ("model.rope_scaling.factor=16", "'factor': 16"),
    ],
)
def test_other_mathematics_on_the_same_arrays_is_a_warning(argument, shown):
    (warning,) = load_with_sources(None, [f"model.init_from=hf:{HF / 'llama31'}", argument]).warnings
    assert shown in warning


def test_a_preset_that_is_another_model_is_refused():
    message = message_of(HF / "llama", ["model.preset=llama-3.1-8b"])
    assert "embed_dim 4096 against 64" in message
    assert "rope_scaling" in message


def test_a_preset_without_the_scaling_of_the_checkpoint_is_refused(tmp_path):
    dims = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    dims |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "tie_word_embeddings": False}
    directory = directory_with(tmp_path, "llama31", dims)
    assert "rope_scaling" in message_of(directory, ["model.preset=llama-3-8b"])


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_unreadable_config_json(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in message_of(tmp_path)
    assert "no directory" in message_of("")


def test_a_saved_run_config_loads_without_the_directory(tmp_path):
    dims = ["embed_dim=64", "num_layers=4", "num_heads=8", "mlp_dim=112"]
    config = load_config(None, [f"model.init_from=hf:{tmp_path / 'gone'}", *(f"model.{dim}" for dim in dims)])
    assert config.model.embed_dim == 64
