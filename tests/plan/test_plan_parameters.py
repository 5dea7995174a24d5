"""Parameter counts against the public numbers, FLOPs against published tables."""

import tomllib
from pathlib import Path

import pytest

from jaxpar.config import PRESETS, ConfigError
from jaxpar.config.schema import ModelConfig
from jaxpar.plan.flops import CONVENTIONS, model_flops_utilisation, training_flops_per_token
from jaxpar.plan.parameters import (
    count_parameters,
    dim_sizes,
    padded_vocab_size,
    padding_param_count,
    param_count,
    param_count_of,
    param_kinds,
)

MODELS = tomllib.loads((Path(__file__).parents[1] / "data" / "planner_models.toml").read_text())
DENSE = {name: model for name, model in MODELS.items() if "experts" not in model}


@pytest.mark.parametrize("name", DENSE)
def test_dense_counts_are_exact(name):
    assert param_count_of(name) == DENSE[name]["params"]


@pytest.mark.parametrize("name", DENSE)
def test_preset_dims_are_the_public_ones(name):
    model, facts = PRESETS[name].model, DENSE[name]
    assert (model.vocab_size, model.embed_dim, model.num_layers) == (facts["V"], facts["d"], facts["L"])
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (facts["H"], facts["K"], facts["hd"])
    assert (model.mlp_dim, model.max_positions) == (facts["ff"], facts.get("learned_positions", 0))
    assert model.tie_embeddings == facts.get("tied", False)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-13b", 13_015_864_320),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_other_published_counts(name, published):
    assert param_count_of(name) == published


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(DENSE)))
def test_mixture_of_experts_counts_are_exact(name):
    model, facts = PRESETS[name].model, MODELS[name]
    count = count_parameters(model)
    assert (count.total, count.active(model)) == (facts["params"], facts["active"])
    assert (model.num_experts, model.top_k, model.expert_mlp_dim) == (facts["experts"], facts["top_k"], facts["ff"])


def test_every_public_model_is_a_preset():
    assert set(MODELS) <= set(PRESETS)
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b"):
        param_count_of("Llama-3.1-8B-x")


def test_the_breakdown_adds_up():
    count = count_parameters(PRESETS["llama-3.1-8b"].model)
    assert count.embedding == count.head == 128256 * 4096
    assert count.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert count.mlp == 32 * 3 * 4096 * 14336
    assert count.norms == 65 * 4096
    assert count.positions == 0
    assert count.total == 8_030_261_248
    tied = count_parameters(PRESETS["qwen3-0.6b"].model)
    assert tied.head == 0
    assert tied.norms == 28 * (2 * 1024 + 2 * 128) + 1024


def test_kinds_name_every_array_once():
    for preset in PRESETS.values():
        kinds = param_kinds(preset.model)
        assert len({kind.name for kind in kinds}) == len(kinds)
        assert {dim for kind in kinds for dim in kind.dims} <= set(dim_sizes(preset.model))


def test_quickstart_model_is_small_and_splits():
    model = PRESETS["tiny-bytes"].model
    assert 1_000_000 < param_count(model) < 2_000_000
    assert model.embed_dim % 8 == model.num_kv_heads % 4 == model.mlp_dim % 4 == 0


def test_padding_does_not_count_as_parameters():
    model = ModelConfig(vocab_size=50257, embed_dim=128, num_layers=6, num_heads=4, mlp_dim=512)
    assert padded_vocab_size(model) == 50304
    assert padding_param_count(model) == 2 * (50304 - 50257) * 128
    assert count_parameters(model).embedding == 50257 * 128


def test_counting_needs_dims_and_a_vocabulary():
    with pytest.raises(ConfigError, match=r"model\.embed_dim"):
        param_count(ModelConfig(vocab_size=5))
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        param_count(ModelConfig(embed_dim=8, num_layers=1, num_heads=1, mlp_dim=8))


@pytest.mark.parametrize(
    ("name", "published"), [("llama-3.1-8b", 5.147e10), ("llama-3.1-70b", 4.492e11), ("llama-3.1-405b", 2.524e12)]
)
def test_convention_a_is_that_of_nvidias_tables(name, published):
    assert training_flops_per_token(PRESETS[name].model, 8192, "A") == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "seq_len", "tokens_per_s", "percent"),
    [
        ("llama-3-8b", 8192, 2904, 56.8),
        ("llama-3-70b", 8192, 331, 51.7),
        ("llama-2-13b", 4096, 2162, 61.1),
        ("llama-2-70b", 4096, 355, 50.8),
    ],
)
def test_convention_b_is_that_of_torchtitans_a100_rows(name, seq_len, tokens_per_s, percent):
    flops = training_flops_per_token(PRESETS[name].model, seq_len, "B")
    assert 100 * model_flops_utilisation(tokens_per_s, flops, 312e12) == pytest.approx(percent, abs=0.05)


def test_convention_a_keeps_a_tied_head():
    sizes = {"vocab_size": 1000, "embed_dim": 64, "num_layers": 2, "num_heads": 4, "mlp_dim": 128}
    tied = training_flops_per_token(ModelConfig(tie_embeddings=True, **sizes), 16, "A")
    untied = training_flops_per_token(ModelConfig(tie_embeddings=False, **sizes), 16, "A")
    assert tied == untied  # the same matrix products, whoever owns the matrix


def test_conventions_are_named():
    assert set(CONVENTIONS) == {"A", "B"}
    with pytest.raises(ValueError, match="no FLOPs convention 'C'"):
        training_flops_per_token(PRESETS["tiny-bytes"].model, 16, "C")
