import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data import packing
from jaxpar.data.packing import BLOCK, ROW_DTYPES, PackedRows, Shard, concatenate_documents, empty_row

EOD = 999


def build(lengths, seq_len, pack):
    """Documents whose tokens are unique, so that a pair says which document and place it is from."""
    first = np.cumsum([0, *lengths])
    documents = [
        np.append(np.arange(a, a + n - 1) * 1000, EOD + 1000 * d)
        for d, (a, n) in enumerate(zip(first[:-1], lengths, strict=True))
    ]
    return documents, PackedRows([concatenate_documents(documents)], seq_len, pack=pack)


cases = st.tuples(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 17), st.booleans())


@given(cases)
def test_every_pair_within_a_document_is_trained_exactly_once(case):
    documents, rows = build(*case)
    expected = [
        pair for document in documents for pair in zip(document[:-1].tolist(), document[1:].tolist(), strict=True)
    ]
    trained = []
    for i in range(len(rows)):
        row = rows[i]
        assert {name: (array.dtype, array.shape) for name, array in row.items()} == {
            name: (dtype, (rows.seq_len,)) for name, dtype in ROW_DTYPES.items()
        }
        real = row["weights"] == 1
        assert set(row["weights"].tolist()) <= {0.0, 1.0}
        trained += zip(row["tokens"][real].tolist(), row["labels"][real].tolist(), strict=True)
    # The order is kept too; and so the total weight is sum(len(document) - 1) and no label crosses a border.
    assert trained == expected
    assert rows.num_pairs == len(expected)


@given(cases)
def test_segments_and_positions_restart_with_each_document(case):
    documents, rows = build(*case)
    document_of = {int(token): d for d, document in enumerate(documents) for token in document}
    for i in range(len(rows)):
        row = rows[i]
        real = row["weights"] == 1
        num_real = int(real.sum())
        assert num_real > 0
        assert real[:num_real].all()
        owner = [document_of[int(token)] for token in row["tokens"][:num_real]]
        segment, position, expected = 0, 0, []
        for t, document in enumerate(owner):
            new = t == 0 or document != owner[t - 1]
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            expected.append((segment, position))
        assert (
            list(zip(row["segment_ids"][:num_real].tolist(), row["positions"][:num_real].tolist(), strict=True))
            == expected
        )
        for array in row.values():
            assert not array[num_real:].any()


@given(cases)
def test_only_the_last_packed_row_is_padded_and_unpacked_rows_hold_one_document(case):
    lengths, seq_len, pack = case
    _, rows = build(lengths, seq_len, pack)
    if pack:
        assert len(rows) == -(rows.num_pairs // -seq_len)
        assert all(rows[i]["weights"].all() for i in range(len(rows) - 1))
    else:
        assert len(rows) == sum(-((n - 1) // -seq_len) for n in lengths)
        assert all(rows[i]["segment_ids"].max() == 1 for i in range(len(rows)))


def test_two_documents_in_one_row():
    shard = concatenate_documents([np.array([10, 11, 12, EOD]), np.array([20, 21, EOD])])
    row = PackedRows([shard], 8, pack=True)[0]
    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 0, 0, 0]
    assert row["labels"].tolist() == [11, 12, EOD, 21, EOD, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert row["weights"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_long_document_continues_as_a_new_segment_and_loses_nothing_at_the_cut():
    rows = PackedRows([concatenate_documents([np.array([1, 2, 3, 4, 5, 6, EOD])])], 4, pack=True)
    assert [rows[i]["tokens"].tolist() for i in range(2)] == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert [rows[i]["labels"].tolist() for i in range(2)] == [[2, 3, 4, 5], [6, EOD, 0, 0]]
    assert rows[1]["positions"].tolist() == [0, 1, 0, 0]
    assert rows[1]["segment_ids"].tolist() == [1, 1, 0, 0]


def test_packed_and_separate_rows_train_the_same_pairs():
    # B17, data side: the same document gives the same tokens, labels and positions whichever way it is put in rows.
    lengths = [5, 9, 3]
    documents, packed = build(lengths, 32, True)
    _, separate = build(lengths, 32, False)
    row = packed[0]
    for d, document in enumerate(documents):
        mine = row["segment_ids"] == d + 1
        alone = separate[d]["weights"] == 1
        for name in ("tokens", "labels", "positions"):
            assert row[name][mine].tolist() == separate[d][name][alone].tolist()
        assert row["tokens"][mine].tolist() == document[:-1].tolist()


@pytest.mark.parametrize("i", [-1, 1])
def test_a_row_outside_is_an_index_error(i):
    with pytest.raises(IndexError, match=f"row {i} of 1"):
        build([3], 4, True)[1][i]


def test_documents_without_tokens_and_wrong_ends_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        PackedRows([Shard(np.arange(3), np.array([0, 3]))], 4, pack=True)
    with pytest.raises(ValueError, match="shard 1 end at 2, not at 3"):
        PackedRows([Shard(np.arange(3), np.array([3])), Shard(np.arange(3), np.array([2]))], 4, pack=True)


def test_rows_hold_a_few_bytes_per_block_of_documents():
    # Memory of the plan: nothing per token, per row or per document.
    shard = concatenate_documents([np.arange(11, dtype=np.int32)] * 100 * BLOCK)
    rows = PackedRows([shard], 10, pack=True)
    held = [value for value in vars(rows).values() if isinstance(value, np.ndarray)]
    assert len(rows) == 100 * BLOCK
    assert sum(array.nbytes for array in held) <= 3 * 8 * 101


many_shards = st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=5)


@settings(max_examples=60)
@given(many_shards, st.integers(1, 17), st.booleans(), st.sampled_from([1, 2, 512]))
def test_rows_do_not_depend_on_shards_and_blocks(lengths, seq_len, pack, block):
    first = np.cumsum([0, *(n for shard in lengths for n in shard)])
    documents = [np.arange(a, b) for a, b in itertools.pairwise(first)]
    counts = np.cumsum([0, *map(len, lengths)])
    shards = [concatenate_documents(documents[a:b]) for a, b in itertools.pairwise(counts)]
    with mock.patch.multiple(packing, BLOCK=block, _CHUNK=2 * block):
        several = PackedRows(shards, seq_len, pack=pack)
        rows = [several[i] for i in range(len(several))]
    one = PackedRows([concatenate_documents(documents)], seq_len, pack=pack)
    assert len(rows) == len(one)
    for i, row in enumerate(rows):
        for name, array in row.items():
            assert array.tolist() == one[i][name].tolist()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), st.integers(1, 17), st.booleans())
def test_rows_of_the_kept_documents_are_those_of_a_corpus_without_the_others(documents, seq_len, pack):
    first = np.cumsum([0, *(n for n, _ in documents)])
    arrays = [np.arange(a, b) for a, b in itertools.pairwise(first)]
    scores = np.array([kept for _, kept in documents], np.uint64)
    shard = dataclasses.replace(concatenate_documents(arrays), scores=scores)
    with mock.patch.multiple(packing, BLOCK=3, _CHUNK=6):
        rows = PackedRows([shard], seq_len, pack=pack, keep=lambda scores: scores == 1)
        found = [rows[i] for i in range(len(rows))]
    alone = PackedRows(
        [concatenate_documents([a for a, (_, kept) in zip(arrays, documents, strict=True) if kept])],
        seq_len,
        pack=pack,
    )
    assert rows.num_pairs == alone.num_pairs
    assert len(found) == len(alone)
    for i, row in enumerate(found):
        for name, array in row.items():
            assert array.tolist() == alone[i][name].tolist()


def test_labels_that_are_not_trained_have_no_weight():
    shard = concatenate_documents([np.array([1, 2, 3, 4]), np.array([5, 6])])
    shard = dataclasses.replace(shard, trained=np.array([0, 0, 1, 1, 0, 1], bool))
    row = PackedRows([shard], 5, pack=True)[0]
    assert row["labels"].tolist() == [2, 3, 4, 6, 0]
    assert row["weights"].tolist() == [0, 1, 1, 1, 0]


def test_empty_row_has_no_weight_and_no_segment():
    row = empty_row(3)
    assert row.keys() == ROW_DTYPES.keys()
    assert not any(array.any() for array in row.values())
