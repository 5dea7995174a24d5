"""Layers shared out over stages and chunks: nothing lost, nothing floored, padding marked."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.schedule import split_layers


@given(st.integers(1, 16), st.integers(1, 4), st.data())
def test_every_layer_has_one_place_and_padding_repeats_a_layer_of_the_same_virtual_stage(stages, chunks, data):
    virtuals = stages * chunks
    counts = data.draw(st.lists(st.integers(1, 9), min_size=virtuals, max_size=virtuals))
    split = split_layers(sum(counts), num_stages=stages, num_chunks=chunks, layers_per_stage=counts)
    assert split.max_layers == max(counts)
    assert split.layer_of_place.shape == split.mask.shape == (chunks, stages, max(counts))
    layer = 0
    for virtual, count in enumerate(counts):
        chunk, stage = divmod(virtual, stages)
        places, mask = split.layer_of_place[chunk, stage].tolist(), split.mask[chunk, stage].tolist()
        assert mask == [True] * count + [False] * (max(counts) - count)
        assert places[:count] == list(range(layer, layer + count))
        assert set(places[count:]) <= set(places[:count])
        layer += count
    assert split.layer_of_place.reshape(-1)[split.place_of_layer].tolist() == list(range(sum(counts)))
    assert split.padding_share == 1 - Fraction(sum(counts), max(counts) * virtuals)


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 4))
def test_balanced_differs_by_at_most_one_layer(layers, stages, chunks):
    if layers < stages * chunks:
        with pytest.raises(ValueError, match="fewer"):
            split_layers(layers, num_stages=stages, num_chunks=chunks, layers_per_stage="balanced")
        return
    split = split_layers(layers, num_stages=stages, num_chunks=chunks, layers_per_stage="balanced")
    assert split.counts.sum() == layers
    assert split.counts.max() - split.counts.min() <= 1
    assert split.counts.flatten().tolist() == sorted(split.counts.flatten(), reverse=True)
    assert np.ptp(split.counts.sum(0)) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "places", "padding"),
    [(126, 16, 8, Fraction(2, 128)), (61, 16, 4, Fraction(3, 64)), (94, 48, 2, Fraction(2, 96))],
)
def test_published_models(layers, stages, places, padding):
    """Llama 3.1 405B, DeepSeek-V3 and Qwen3-235B-A22B on stage counts that do not divide them."""
    remainder = layers % stages
    with pytest.raises(ValueError, match=f"{layers} not divisible by {stages} .*remainder {remainder}"):
        split_layers(layers, num_stages=stages)
    split = split_layers(layers, num_stages=stages, layers_per_stage="balanced")
    assert (split.max_layers, split.padding_share) == (places, padding)


def test_even_pads_nothing():
    split = split_layers(24, num_stages=4, num_chunks=3)
    assert split.mask.all()
    assert split.layer_of_place[1].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


@pytest.mark.parametrize(
    ("layers", "given", "message"),
    [
        (10, [3, 3, 3], "has 3 entries, not 4"),
        (10, [3, 3, 3, 3], "adds up to 12, but the model has 10 layers"),
        (10, [5, 5, 0, 0], "holds 0; every stage needs at least 1 layer"),
        (10, "floor", "'floor' is not even, balanced or a list"),
        (10, "even", r"10 not divisible by 4 \(4 stages\), remainder 2; use .*balanced.*3 layers on 2 of them, 2 on"),
        (3, "balanced", "3 layers are fewer than 4"),
        (0, "balanced", "each must be at least 1"),
    ],
)
def test_what_does_not_fit_says_what_would(layers, given, message):
    with pytest.raises(ValueError, match=message):
        split_layers(layers, num_stages=4, layers_per_stage=given)


def test_chunks_count_as_stages():
    with pytest.raises(ValueError, match=r"12 not divisible by 8 \(4 stages x 2 chunks\), remainder 4"):
        split_layers(12, num_stages=4, num_chunks=2)
