import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data.dataset import load_dataset
from jaxpar.data.mixture import MAX_PERIOD, Mixture, MixtureOrder, exact_shares, interleave
from jaxpar.data.order import GlobalOrder, Position
from jaxpar.data.prepare import Request, prepare
from tests.data_pipeline.jobs import Counts

mixtures = st.lists(st.tuples(st.integers(2, 30), st.integers(1, 12)), min_size=1, max_size=4).map(
    lambda sources: Mixture(
        names=tuple(f"s{k}" for k in range(len(sources))),
        num_rows=tuple(size for size, _ in sources),
        shares=exact_shares([share for _, share in sources]),
    )
)


def order_of(num_rows=(10, 4, 7), shares=(5, 3, 2), seed=0, shuffle=True):
    names = tuple(f"s{k}" for k in range(len(num_rows)))
    return MixtureOrder(Mixture(names=names, num_rows=num_rows, shares=shares), seed, shuffle)


def sources_of(order, rows):
    """Source and row within it of global row ids."""
    starts = np.cumsum([0, *order.mixture.num_rows])
    sources = np.searchsorted(starts, rows, side="right") - 1
    return sources, rows - starts[sources]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_every_prefix_has_each_source_within_one_row_of_its_share(weights):
    shares = exact_shares(weights)
    period = sum(shares)
    sources = np.tile(interleave(shares), 2)
    counts = np.stack([np.cumsum(sources == k) for k in range(len(shares))])
    exact = np.outer(shares, np.arange(1, 2 * period + 1)) / period
    assert np.abs(counts - exact).max() < 1
    assert counts[:, period - 1].tolist() == list(shares)


@settings(max_examples=25, deadline=None)
@given(mixtures, st.integers(0, 3), st.booleans(), st.integers(0, 5), st.integers(1, 120))
def test_every_row_of_a_source_comes_once_in_each_of_its_epochs(mixture, seed, shuffle, start, count):
    order = MixtureOrder(mixture, seed, shuffle)
    sources, rows = sources_of(order, order.rows(0, start + count))
    for k, size in enumerate(mixture.num_rows):
        mine = rows[sources == k].tolist()
        for epoch, seen in enumerate(itertools.batched(mine, size)):
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(range(size))
            # The first source comes in the order that it has alone; without shuffling all do.
            if k == 0 or not shuffle:
                assert list(seen) == GlobalOrder(size, seed, shuffle).rows(epoch, 0, len(seen)).tolist()
    # Any stretch is read without what comes before it.
    assert order.rows(start, start + count).tolist() == order.rows(0, start + count)[start:].tolist()


def test_epochs_of_a_source_are_different_permutations_and_sources_have_their_own():
    order = order_of(num_rows=(20, 20), shares=(1, 1))
    sources, rows = sources_of(order, order.rows(0, 120))
    epochs = [tuple(epoch) for k in (0, 1) for epoch in itertools.batched(rows[sources == k].tolist(), 20)]
    assert len(set(epochs)) == 6
    assert order_of(num_rows=(20, 20), shares=(1, 1), seed=1).rows(0, 120).tolist() != order.rows(0, 120).tolist()


@settings(max_examples=25, deadline=None)
@given(mixtures, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4))
def test_another_batch_size_goes_on_at_exactly_the_next_sample(mixture, parts):
    # Within a batch, in the middle of epochs, and at their borders alike: there is one index and nothing else.
    position, seen = Position(), []
    for global_batch_size, count in parts:
        order = MixtureOrder(mixture, seed=0, shuffle=True)
        for _ in range(count):
            ids, position = order.next_batch(position, global_batch_size, "drop")
            seen += ids.tolist()
    assert position == Position(0, len(seen))
    assert seen == MixtureOrder(mixture, seed=0, shuffle=True).rows(0, len(seen)).tolist()


@pytest.mark.parametrize("stop", [1, 2, 5, 8, 9, 10, 20, 21])
def test_resuming_at_borders_and_in_between(stop):
    # 10, 4 and 7 rows at 5 : 3 : 2: source 0 ends an epoch at sample 20, source 1 within every 14.
    order = order_of()
    uninterrupted = [order.batch(Position(), i, 2, "drop")[0].tolist() for i in range(30)]
    _, _, position = order.batch(Position(), stop - 1, 2, "drop")
    resumed = [order_of().batch(position, i, 2, "drop") for i in range(30 - stop)]
    assert [ids.tolist() for ids, _, _ in resumed] == uninterrupted[stop:]
    assert resumed[0][1] == Position(0, 2 * stop)


@settings(max_examples=25, deadline=None)
@given(mixtures, st.integers(0, 60), st.integers(1, 9), st.integers(0, 12))
def test_a_run_that_must_not_repeat_ends_where_the_first_source_does(mixture, start, global_batch_size, num_steps):
    order = MixtureOrder(mixture, seed=0, shuffle=True)
    position = Position(0, start)

    def repeats(steps):
        rows = order.rows(0, start + steps * global_batch_size)
        return len(set(rows.tolist())) < len(rows)

    if not repeats(num_steps):
        order.check_enough(position, num_steps, global_batch_size, "drop")
        return
    with pytest.raises(ConfigError) as caught:
        order.check_enough(position, num_steps, global_batch_size, "drop")
    enough_for = min(
        int(problem.message.rpartition("enough for ")[2].split()[0].replace(",", ""))
        for problem in caught.value.problems
    )
    assert enough_for == max((steps for steps in range(num_steps) if not repeats(steps)), default=0)


def test_without_repetition_one_data_set_ends_with_its_epoch():
    order = GlobalOrder(10, seed=0, shuffle=True)
    order.check_enough(Position(), 5, 2, "drop")
    order.check_enough(Position(0, 4), 2, 3, "drop")
    order.check_enough(Position(0, 4), 2, 4, "pad")
    for position, steps, size, last_batch in (
        (Position(), 6, 2, "drop"),
        (Position(0, 4), 2, 4, "drop"),
        (Position(1, 0), 1, 2, "pad"),
    ):
        with pytest.raises(ConfigError, match=r"data.repeat = False: the data has 10 rows(?s:.*)data.repeat=true"):
            order.check_enough(position, steps, size, last_batch)


def test_epochs_are_told():
    order = order_of(num_rows=(1000, 40), shares=(7, 3))
    notes = order.notes(Position(0, 100), 19, 100, "drop")
    assert notes[0].startswith("mixture: 0.7 s0 (1,000 rows), 0.3 s1 (40 rows); exact over every 10 samples")
    assert notes[1].endswith("sample 2,000: 1.40 epochs of s0, 15.00 epochs of s1")
    assert GlobalOrder(8, 0, True).progress(Position(2, 4)) == "2.50 epochs of the data (8 rows)"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], (7, 3)),
        ([7, 3], (7, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.4], (1,)),
        ([0.123456, 0.876544], (1929, 13696)),
        ([2e-3, 1], (1, 500)),
    ],
)
def test_weights_mean_the_decimals_that_they_print_as(weights, shares):
    assert exact_shares(weights) == shares


def test_weights_that_are_no_short_ratio_are_refused():
    with pytest.raises(ConfigError, match=rf"data.weights.*more than {MAX_PERIOD:,}(?s:.*)fewer digits"):
        exact_shares([0.123457, 0.876544])


def test_a_position_with_an_epoch_is_refused():
    with pytest.raises(ValueError, match="one endless epoch"):
        order_of().batch(Position(1, 0), 0, 2, "drop")


@pytest.fixture
def stores(tmp_path, monkeypatch):
    """Three stores of different sizes, whose documents say which they are from."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 90), ("b", 20), ("c", 40)):
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name * 17}{i:03}"}) + "\n" for i in range(count))
        )
        request = Request(patterns=(f"{name}.jsonl",), out=Path(name), shard_bytes=500)
        prepare(request, num_workers=1, progress=Counts())


def load(*paths, **fields):
    return load_dataset(DataConfig(**{"source": "store", "paths": paths, "seq_len": 10} | fields), vocab_size=0, seed=0)


def test_stores_are_mixed_by_rows(stores):
    train = load("a", "b", "c", weights=(0.5, 0.3, 0.2)).train
    assert train.mixture == Mixture(names=("a", "b", "c"), num_rows=(180, 40, 80), shares=(5, 3, 2))
    order = train.order(seed=0, shuffle=True)
    assert order.num_rows == len(train) == 300
    letters = [chr(train[int(i)]["tokens"][0]) for i in order.rows(0, 200)]
    assert [letters.count(letter) for letter in "abc"] == [100, 60, 40]
    assert [letters[:10].count(letter) for letter in "abc"] == [5, 3, 2]
    alone = load("b").train
    assert [train[180 + i]["tokens"].tolist() for i in range(40)] == [alone[i]["tokens"].tolist() for i in range(40)]
    with pytest.raises(IndexError):
        train[300]


def test_weights_are_part_of_the_identity_and_their_scale_is_not(stores):
    base = load("a", "b", weights=(0.7, 0.3)).train
    assert load("a", "b", weights=(7, 3)).train.identity == base.identity
    for other in (load("a", "b", weights=(3, 7)), load("b", "a", weights=(0.7, 0.3)), load("a", "b")):
        assert other.train.fingerprint != base.fingerprint
    assert load("a", "b").train.mixture is None


def test_validation_of_a_mixture_is_every_held_out_document_once(stores):
    mixed = load("a", "b", weights=(1, 9), validation_fraction=0.5, pack=False)
    plain = load("a", "b", validation_fraction=0.5, pack=False)
    assert mixed.validation.fingerprint == plain.validation.fingerprint
    assert mixed.validation.mixture is None
    assert len(mixed.train) == len(plain.train)


def test_token_files_are_mixed_by_path(stores):
    for name in ("x0", "x1", "y0"):
        np.full(101, ord(name[0]), np.uint16).tofile(f"{name}.bin")
    config = DataConfig(source="tokens", paths=("x*.bin", "y*.bin"), weights=(1, 1), eod_id=256, seq_len=10)
    train = load_dataset(config, vocab_size=257, seed=0).train
    assert train.mixture == Mixture(names=("x*.bin", "y*.bin"), num_rows=(20, 10), shares=(1, 1))


def test_a_source_without_a_row_is_named(stores):
    with pytest.raises(ConfigError, match=r"training documents of b have 401 tokens"):
        load("a", "b", weights=(1, 1), seq_len=500)
