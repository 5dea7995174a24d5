import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.packing import ROW_DTYPES, PackedRows, concatenate_documents, empty_row

EOD = 999


def build(lengths, seq_len, pack):
    """Documents whose tokens are unique, so that a pair says which document and place it is from."""
    first = np.cumsum([0, *lengths])
    documents = [
        np.append(np.arange(a, a + n - 1) * 1000, EOD + 1000 * d)
        for d, (a, n) in enumerate(zip(first[:-1], lengths, strict=True))
    ]
    tokens, offsets = concatenate_documents(documents)
    return documents, PackedRows(tokens, offsets, seq_len, pack=pack)


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
    tokens, offsets = concatenate_documents([np.array([10, 11, 12, EOD]), np.array([20, 21, EOD])])
    row = PackedRows(tokens, offsets, 8, pack=True)[0]
    assert row["tokens"].tolist() == [10, 11, 12, 20, 21, 0, 0, 0]
    assert row["labels"].tolist() == [11, 12, EOD, 21, EOD, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert row["weights"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_long_document_continues_as_a_new_segment_and_loses_nothing_at_the_cut():
    tokens, offsets = concatenate_documents([np.array([1, 2, 3, 4, 5, 6, EOD])])
    rows = PackedRows(tokens, offsets, 4, pack=True)
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


def test_documents_without_tokens_and_wrong_offsets_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        PackedRows(np.arange(3), np.array([0, 0, 3]), 4, pack=True)
    with pytest.raises(ValueError, match=r"span \[0, 2\]"):
        PackedRows(np.arange(3), np.array([0, 2]), 4, pack=True)


def test_rows_are_assembled_from_one_token_array():
    # Memory: the tokens, 8 bytes per document and 8 per row; nothing per token besides.
    tokens, offsets = concatenate_documents([np.arange(1001, dtype=np.int32)] * 100)
    rows = PackedRows(tokens, offsets, 100, pack=True)
    held = [value for value in vars(rows).values() if isinstance(value, np.ndarray)]
    assert any(array is tokens for array in held)
    assert sum(array.nbytes for array in held) == tokens.nbytes + 8 * (len(offsets) + len(rows) + 1)


def test_empty_row_has_no_weight_and_no_segment():
    row = empty_row(3)
    assert row.keys() == ROW_DTYPES.keys()
    assert not any(array.any() for array in row.values())
