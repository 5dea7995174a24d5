import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.data.split import document_scores, held_out, record_scores

fractions = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(st.lists(st.text(max_size=4), min_size=2, max_size=20, unique=True), fractions)
def test_both_sides_have_a_document(texts, fraction):
    mask = held_out(document_scores(texts), fraction)
    assert 0 < mask.sum() < len(texts)


@given(st.lists(st.text(max_size=2), min_size=1, max_size=20), fractions, st.randoms())
def test_copies_are_on_one_side_and_the_order_of_files_does_not_matter(texts, fraction, random):
    shuffled = random.sample(texts, len(texts))
    if len(set(texts)) < 2:
        with pytest.raises(ConfigError, match=r"data.validation_fraction.*1 different"):
            held_out(document_scores(texts), fraction)
        return
    sides = [dict(zip(order, held_out(document_scores(order), fraction), strict=True)) for order in (texts, shuffled)]
    assert sides[0] == sides[1]
    assert held_out(document_scores(texts), fraction).tolist() == [sides[0][text] for text in texts]


def test_the_share_is_met_on_average_and_grows_monotonically():
    scores = record_scores(20_000)
    tenth, half = held_out(scores, 0.1), held_out(scores, 0.5)
    assert abs(tenth.mean() - 0.1) < 0.01
    assert abs(half.mean() - 0.5) < 0.02
    assert half[tenth].all()


def test_a_record_stays_on_its_side_when_records_are_added():
    assert np.array_equal(held_out(record_scores(1000), 0.2), held_out(record_scores(2000), 0.2)[:1000])


def test_the_split_is_the_same_in_every_release():
    # A held-out document that trains after an upgrade would make every validation loss a lie.
    assert np.flatnonzero(held_out(record_scores(30), 0.2)).tolist() == [12, 20, 25, 28]
    texts = [f"document {i}" for i in range(30)]
    assert np.flatnonzero(held_out(document_scores(texts), 0.2)).tolist() == [3, 8, 13, 24, 29]


def test_fraction_zero_holds_nothing_out():
    assert not held_out(record_scores(3), 0.0).any()
