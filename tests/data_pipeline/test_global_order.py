import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.data.order import PADDED, GlobalOrder, Position


def take(order, position, global_batch_size, count, last_batch="drop"):
    """Row ids of the next ``count`` batches, and the position after them."""
    batches = []
    for _ in range(count):
        ids, position = order.next_batch(position, global_batch_size, last_batch)
        batches.append(ids.tolist())
    return batches, position


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 7, 9, 10, 12])
@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_resume_goes_on_where_the_run_stopped(stop, last_batch):
    # B1: mid epoch 0, mid epoch 1, at the boundaries, in epoch 2; 10 records, batch 2.
    order = GlobalOrder(10, seed=3, shuffle=True)
    uninterrupted, _ = take(order, Position(), 2, 20, last_batch)
    before, position = take(order, Position(), 2, stop, last_batch)
    assert position == Position(*divmod(2 * stop, 10))
    resumed = GlobalOrder(10, seed=3, shuffle=True)
    after, _ = take(resumed, position, 2, 20 - stop, last_batch)
    assert before + after == uninterrupted


def test_epochs_are_different_permutations_and_the_same_on_a_rerun():
    # B14.
    epochs = [GlobalOrder(8, seed=0, shuffle=True).rows(epoch, 0, 8).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [GlobalOrder(8, seed=0, shuffle=True).rows(epoch, 0, 8).tolist() for epoch in range(3)] == epochs


def test_epochs_of_one_seed_are_not_those_of_the_next():
    by_seed = [[tuple(GlobalOrder(20, seed, True).rows(epoch, 0, 20)) for epoch in range(5)] for seed in range(5)]
    assert len({epoch for epochs in by_seed for epoch in epochs}) == 25


def test_shuffle_is_global():
    # B12: a corpus sorted by label; each batch, and each process's half of it, has both labels, and every row comes.
    order = GlobalOrder(1000, seed=0, shuffle=True)
    batches, _ = take(order, Position(), 50, 20)
    labels = np.array(batches) >= 500
    for part in (labels, labels[:, :25], labels[:, 25:]):
        assert (abs(part.mean(axis=1) - 0.5) < 0.4).all()
    assert sorted(np.ravel(batches)) == list(range(1000))


def test_without_shuffle_rows_come_in_order_in_every_epoch():
    order = GlobalOrder(5, seed=0, shuffle=False)
    assert take(order, Position(), 2, 4, "pad")[0] == [[0, 1], [2, 3], [4, PADDED], [0, 1]]


def test_drop_leaves_the_tail_out_and_pad_fills_it():
    order = GlobalOrder(7, seed=1, shuffle=True)
    dropped, position = take(order, Position(), 3, 3)
    assert (dropped, position) == (
        [order.rows(0, 0, 3).tolist(), order.rows(0, 3, 6).tolist(), order.rows(1, 0, 3).tolist()],
        Position(1, 3),
    )
    padded, position = take(order, Position(), 3, 3, "pad")
    assert (padded[2], position) == ([order.row(0, 6), PADDED, PADDED], Position(1, 0))


def test_three_records_and_a_batch_of_four():
    # B7.
    order = GlobalOrder(3, seed=0, shuffle=True)
    with pytest.raises(ConfigError, match=r"train.global_batch_size = 4: 3 < 4(?s:.*)at most 3(?s:.*)pad"):
        order.next_batch(Position(), 4, "drop")
    ids, position = order.next_batch(Position(), 4, "pad")
    assert sorted(ids) == [PADDED, 0, 1, 2]
    assert (ids[3], position) == (PADDED, Position(1, 0))


def test_resuming_twice_is_one_run():
    # B3: a checkpoint that is written after a resume has to hold the whole position.
    order = GlobalOrder(10, seed=2, shuffle=True)
    uninterrupted, _ = take(order, Position(), 2, 12)
    position, seen = Position(), []
    for _ in range(3):
        batches, position = take(GlobalOrder(10, seed=2, shuffle=True), position, 2, 4)
        seen += batches
    assert seen == uninterrupted


def test_positions_count_samples_and_not_microbatches_or_steps():
    # B5: accumulation 4, microbatches of 1 row, 100 of them per epoch, stop at step 10: microbatch 40 is next.
    order = GlobalOrder(100, seed=0, shuffle=True)
    _, position = take(order, Position(), 4, 10)
    assert position == Position(0, 40)
    assert order.next_batch(position, 4, "drop")[0][0] == order.row(0, 40)
    _, position = take(order, position, 4, 15)
    assert position == Position(1, 0)


@settings(max_examples=50)
@given(st.integers(1, 30), st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=4))
def test_another_batch_size_goes_on_at_the_same_sample(num_rows, parts):
    # B13: no row is skipped or repeated within an epoch but the tail that cannot fill a batch.
    order = GlobalOrder(num_rows, seed=0, shuffle=True)
    position, seen = Position(), []
    for global_batch_size, count in parts:
        assume(global_batch_size <= num_rows)
        for _ in range(count):
            before = position
            ids, position = order.next_batch(position, global_batch_size, "drop")
            start = before.offset if before.offset + global_batch_size <= num_rows else None
            if start is None:
                assert num_rows - before.offset < global_batch_size
                before = Position(before.epoch + 1, 0)
            seen.append((before.epoch, ids.tolist()))
    for epoch in range(position.epoch + 1):
        ids = [i for e, batch in seen if e == epoch for i in batch]
        assert ids == order.rows(epoch, 0, len(ids)).tolist()


def test_two_batches_of_two_then_batches_of_four():
    # B13 as reported: the position after 2 batches of 2 is sample 4, not batch 2 of 4.
    order = GlobalOrder(12, seed=0, shuffle=True)
    first, position = take(order, Position(), 2, 2)
    then, _ = take(order, position, 4, 2)
    assert [i for batch in first + then for i in batch] == order.rows(0, 0, 12).tolist()


@given(
    st.integers(1, 20),
    st.integers(1, 25),
    st.sampled_from(["drop", "pad"]),
    st.integers(0, 3),
    st.integers(0, 20),
    st.integers(0, 30),
)
def test_any_batch_is_found_without_the_ones_before_it(num_rows, global_batch_size, last_batch, epoch, offset, index):
    assume(offset <= num_rows)
    assume(last_batch == "pad" or global_batch_size <= num_rows)
    order = GlobalOrder(num_rows, seed=0, shuffle=False)
    position = Position(epoch, offset)
    for _ in range(index):
        _, position = order.next_batch(position, global_batch_size, last_batch)
    expected_ids, expected_after = order.next_batch(position, global_batch_size, last_batch)
    ids, before, after = order.batch(Position(epoch, offset), index, global_batch_size, last_batch)
    assert (ids.tolist(), after) == (expected_ids.tolist(), expected_after)
    assert before.offset < num_rows
    assert ids[0] == order.row(before.epoch, before.offset)


@pytest.mark.parametrize(
    ("num_rows", "global_batch_size", "drop", "pad"), [(145, 48, 3, 4), (10, 4, 2, 3), (8, 4, 2, 2)]
)
def test_batches_per_epoch(num_rows, global_batch_size, drop, pad):
    # B10, B11: one count for the run, so no process has a batch more or less than another.
    order = GlobalOrder(num_rows, seed=0, shuffle=True)
    assert order.batches_per_epoch(global_batch_size, "drop") == drop
    assert order.batches_per_epoch(global_batch_size, "pad") == pad
    batches, position = take(order, Position(), global_batch_size, pad, "pad")
    assert sorted(i for batch in batches for i in batch if i != PADDED) == list(range(num_rows))
    assert position == Position(1, 0)


def test_no_rows_are_refused():
    with pytest.raises(ConfigError, match="0 rows"):
        GlobalOrder(0, seed=0, shuffle=True)


@pytest.mark.parametrize("position", [Position(0, 11), Position(0, -1), Position(-1, 0)])
def test_a_position_beyond_the_data_is_refused(position):
    with pytest.raises(ValueError, match="is not within epochs of 10 rows"):
        GlobalOrder(10, seed=0, shuffle=True).next_batch(position, 2, "drop")
