"""Initial weights: their spread, their zeros and ones, and that sharding changes no bit of them."""

import itertools
import math

import jax
import numpy as np
import pytest

from tests.parity.harness import build, parity_config

VOCAB, LAYERS, STD = 151, 3, 0.02
MODEL = {"family": "qwen2", "embed_dim": 64, "mlp_dim": 128, "num_layers": LAYERS, "init_std": STD}
INTO_THE_RESIDUAL = ("o", "down")
FROM_IT = ("q", "k", "v", "gate", "up")


@pytest.fixture(scope="module")
def whole() -> dict:
    """On one device, as numpy."""
    return jax.device_get(build(parity_config({}, model=MODEL)).init(0).params)


@pytest.fixture(scope="module")
def sharded() -> dict:
    """On four tensor shards, and with more padding of the vocabulary."""
    return build(parity_config({"tensor": 4}, model={**MODEL, "vocab_multiple": 64})).init(0).params


def assert_spread(values: np.ndarray, std: float) -> None:
    """Mean 0 and the given standard deviation, within five standard errors of a sample of this size."""
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert values.std() == pytest.approx(std, rel=5 / math.sqrt(2 * values.size))


@pytest.mark.parametrize("name", FROM_IT)
def test_projections_have_the_configured_spread(whole, name):
    assert_spread(whole["layers"][name], STD)


@pytest.mark.parametrize("name", INTO_THE_RESIDUAL)
def test_projections_into_the_residual_stream_shrink_with_depth(whole, name):
    assert_spread(whole["layers"][name], STD / math.sqrt(2 * LAYERS))


def test_embedding_and_head_have_the_configured_spread(whole):
    assert_spread(whole["embedding"][:VOCAB], STD)
    assert_spread(whole["head"][:, :VOCAB], STD)


def test_padding_of_the_vocabulary_is_zero(whole, sharded):
    for params, padded in ((whole, 152), (sharded, 192)):
        assert params["embedding"].shape == (padded, 64)
        assert params["head"].shape == (64, padded)
        assert not np.asarray(params["embedding"])[VOCAB:].any()
        assert not np.asarray(params["head"])[:, VOCAB:].any()


def test_norms_are_one_and_biases_zero(whole):
    layers = whole["layers"]
    for scale in (layers["attention_norm"], layers["mlp_norm"], whole["final_norm"]):
        assert (scale == 1).all()
    for name in ("q_bias", "k_bias", "v_bias"):
        assert layers[name].shape[0] == LAYERS
        assert not layers[name].any()


def test_sharding_and_padding_change_no_bit(whole, sharded):
    """Fan-in is that of the whole weight, and random numbers belong to places in it, not to shards."""
    parts = {
        "embedding": (slice(VOCAB),),
        "head": (slice(None), slice(VOCAB)),
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
        other = sharded
        for key in path:
            other = other[key.key]
        part = parts.get(path[-1].key, ())
        np.testing.assert_array_equal(leaf[part], np.asarray(other)[part], err_msg=jax.tree_util.keystr(path))


def test_no_two_shards_are_equal(sharded):
    for name in (*FROM_IT, *INTO_THE_RESIDUAL):
        leaf = sharded["layers"][name]
        assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape, f"{name} is not sharded"
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((a != b).any() for a, b in itertools.combinations(shards, 2)), f"{name}: equal shards"


def test_no_two_weights_are_equal(whole):
    """Layers differ from each other, and so do weights of one shape."""
    layers = whole["layers"]
    for name in (*FROM_IT, *INTO_THE_RESIDUAL):
        for one, other in itertools.combinations(layers[name], 2):
            assert (one != other).mean() > 0.99, f"two layers share {name}"
    for one, other in (("gate", "up"), ("k", "v")):
        assert (layers[one] != layers[other]).mean() > 0.99, f"{one} equals {other}"
    assert (whole["embedding"][:VOCAB] != whole["head"][:, :VOCAB].T).mean() > 0.99
