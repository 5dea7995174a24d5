"""Gemma and GPT-2: which parameters they start with, what decays, and what is refused by name."""

import dataclasses
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.config import ConfigError, load_config
from jaxpar.config.schema import ModelConfig, OptimConfig, PrecisionConfig
from jaxpar.convert import plan_hf_import
from jaxpar.families import FAMILIES
from jaxpar.mesh import make_mesh
from jaxpar.model.decoder import Decoder, Numerics
from jaxpar.model.layers import layer_normalise, normalise_plus_one
from jaxpar.optim import decay_mask
from jaxpar.plan.parameters import param_count
from jaxpar.plan.resolve import resolve
from jaxpar.program import decoder_definition
from tests.parity.harness import DATA

DIMS = {"vocab_size": 151, "embed_dim": 64, "num_layers": 3, "num_heads": 4, "mlp_dim": 96}
GPT2 = ModelConfig(family="gpt2", max_positions=40, tie_embeddings=True, num_kv_heads=4, head_dim=16, **DIMS)
GEMMA = ModelConfig(family="gemma", tie_embeddings=True, num_kv_heads=1, head_dim=24, **DIMS)


def initial(model: ModelConfig) -> dict[tuple, np.ndarray]:
    """Parameters by path, made eagerly on one device."""
    decoder = Decoder(model, Numerics.of(PrecisionConfig()), nnx.Rngs(0))
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(nnx.to_pure_dict(nnx.state(decoder))).items()}


@pytest.mark.parametrize("model", [GPT2, GEMMA], ids=lambda model: model.family)
def test_parameters_are_those_that_the_plan_counts(model):
    model = dataclasses.replace(model, vocab_multiple=1)
    shapes = flatten_dict(decoder_definition(model, Numerics.of(PrecisionConfig())).abstract_params)
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == param_count(model)


def test_gpt2_starts_as_its_paper_says():
    """Section 2.3: weights that add into the residual stream are scaled by 1 / sqrt(number of residual layers)."""
    params = initial(GPT2)
    for path, values in params.items():
        name = path[-1]
        if name.endswith("bias"):
            assert not values.any(), path
        elif name.endswith("norm"):
            assert (values == 1).all(), path
        else:
            values = values[:151] if name == "embedding" else values
            std = 0.02 / math.sqrt(6) if name in ("o", "down") else 0.02
            assert values.std() == pytest.approx(std, rel=5 / math.sqrt(2 * values.size)), path
    names = {path[-1] for path in params}
    assert {"positions", "up_bias", "down_bias", "o_bias", "final_norm_bias", "mlp_norm_bias"} < names
    assert not names & {"gate", "head"}
    assert params[("positions",)].shape == (40, 64)


def test_gemma_starts_with_norms_that_multiply_by_one():
    norms = {path[-1]: values for path, values in initial(GEMMA).items() if path[-1].endswith("norm")}
    assert norms.keys() == {"attention_norm", "mlp_norm", "final_norm"}
    assert not any(values.any() for values in norms.values())


def test_norms_are_computed_in_float32():
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(5, 2, (3, 64)), rng.normal(size=64), rng.normal(size=64)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    vectors = (jnp.asarray(scale, jnp.float32), jnp.asarray(bias, jnp.float32))
    np.testing.assert_allclose(layer_normalise(jnp.asarray(x, jnp.float32), *vectors, 1e-5), expected, atol=2e-5)
    expected = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * (1 + scale)
    actual = normalise_plus_one(jnp.asarray(x, jnp.float32), vectors[0], 1e-5)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    # 1 + scale is not rounded to the scale's own type
    small = jnp.full((64,), 2.0**-9, jnp.bfloat16)
    actual = normalise_plus_one(jnp.asarray(x, jnp.float32), small, 1e-5)
    expected = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * (1 + 2.0**-9)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_weight_decay_knows_the_roles():
    axes = decoder_definition(GPT2, Numerics.of(PrecisionConfig())).logical_axes
    weights = {"q", "k", "v", "o", "up", "down"}

    def decaying(**options) -> set[str]:
        mask = flatten_dict(decay_mask(OptimConfig(**options), axes))
        return {path[-1] for path, decays in mask.items() if decays}

    assert decaying() == weights | {"embedding", "positions"}
    assert decaying(decay_embeddings=False) == weights
    norms = {"attention_norm", "mlp_norm", "final_norm"}
    assert decaying(decay_embeddings=False, decay_norms=True) == weights | norms
    biases = {f"{name}_bias" for name in (*weights, *norms)}
    assert decaying(decay_embeddings=False, decay_biases=True) == weights | biases


def test_rows_longer_than_the_position_table_are_refused():
    with pytest.raises(ConfigError, match=r"data\.seq_len = 2048: is longer than the learned position table"):
        resolve(load_config(None, ["model.preset=gpt2-124m", "data.seq_len=2048"]), num_devices=1)
    model = jaxpar.from_hf(DATA / "hf" / "gpt2")
    with pytest.raises(ValueError, match=r"rows have 129 tokens, but model\.max_positions is 128"):
        model(np.zeros((1, 129), np.int32))


def test_a_mesh_that_cuts_the_one_kv_head_is_refused():
    with pytest.raises(ConfigError, match=r"model\.num_kv_heads = 1") as caught:
        resolve(load_config(None, ["model.preset=gemma-2b", "mesh.tensor=2"]), num_devices=2)
    assert "tensor" in str(caught.value)
    assert resolve(load_config(None, ["model.preset=gemma-7b", "mesh.tensor=2"]), num_devices=2)


def test_published_gpt2_files_are_read(tmp_path):
    """They hold the bare decoder, without the prefix, and causal masks besides."""
    source = DATA / "hf" / "gpt2"
    tensors = {
        name.removeprefix("transformer."): values for name, values in load_file(source / "model.safetensors").items()
    }
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 128, 128), np.float32), "h.1.attn.masked_bias": np.float32(-1e4)}
    save_file({name: np.asarray(values) for name, values in tensors.items()}, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    ours, theirs = (plan_hf_import(str(path), mesh=None, dtype=None).reader for path in (tmp_path, source))
    assert ours.types == theirs.types
    for name, leaf in ours.types.items():
        box = [slice(0, size) for size in leaf.shape]
        assert np.array_equal(ours.read(name, box), theirs.read(name, box)), name


def test_every_family_names_a_rule_for_each_of_its_parameters():
    for name, family in FAMILIES.items():
        model = dataclasses.replace(GPT2 if family.learned_positions else GEMMA, family=name)
        if family.huggingface.experts:
            model = dataclasses.replace(model, num_experts=4, top_k=2, expert_mlp_dim=32)
        for tied in (True, False):
            definition = decoder_definition(
                dataclasses.replace(model, tie_embeddings=tied), Numerics.of(PrecisionConfig())
            )
            assert family.huggingface.keymap(tied).keys() == flatten_dict(definition.abstract_params).keys()


def test_the_embedding_is_scaled_in_the_compute_dtype():
    """As transformers does: the root of the width is rounded first (48 -> 6.9282 -> 6.9375 in bfloat16)."""
    model = dataclasses.replace(GEMMA, embed_dim=48, num_layers=1)
    program = decoder_definition(model, Numerics.of(PrecisionConfig(compute="bfloat16")))
    mesh = make_mesh({}, jax.devices()[:1])
    table = jnp.ones((256, 48), jnp.float32)
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.abstract_params)
        decoder = program.bind({**params, "embedding": table})
        tokens = jnp.zeros((1, 2), jnp.int32)
        embedded = jax.jit(decoder.embedded)(tokens, tokens, None)
    assert embedded.dtype == jnp.bfloat16
    assert (np.asarray(embedded, np.float32) == 6.9375).all()
