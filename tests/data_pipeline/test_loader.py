import collections
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data.dataset import load_dataset
from jaxpar.data.loader import Loader, rows_of_devices, validation_loader
from jaxpar.data.order import PADDED, GlobalOrder, Position
from jaxpar.data.packing import ROW_DTYPES, empty_row

S = 8


def sharding_over(shape, names, spec):
    devices = np.array(jax.devices()[: np.prod(shape, dtype=int)]).reshape(shape)
    return NamedSharding(Mesh(devices, names, axis_types=(AxisType.Explicit,) * len(names)), PartitionSpec(*spec))


ONE = ((1,), ("data",), (None, "data", None))
LAYOUTS = {
    "one device": ONE,
    "data 4": ((4,), ("data",), (None, "data", None)),
    "data 8": ((8,), ("data",), (None, "data", None)),
    "data 2 x fsdp 2": ((2, 2), ("data", "fsdp"), (None, ("data", "fsdp"), None)),
    "data 2 x fsdp 2 x tensor 2, rows shared": ((2, 2, 2), ("data", "fsdp", "tensor"), (None, ("data", "fsdp"), None)),
    "data 2 x context 4": ((2, 4), ("data", "context"), (None, "data", "context")),
    "tensor 8, all shared": ((8,), ("tensor",), (None, None, None)),
    "microbatches sharded too": ((2, 4), ("stage", "data"), ("stage", "data", None)),
    "outer tensor": ((2, 4), ("tensor", "data"), (None, "data", None)),
}
START = Position()


class NumberedRows:
    """Row i holds i everywhere; counts how often each row is read, and may be slow or fail."""

    def __init__(self, num_rows, seq_len=S, fail_at=None, delay_s=0.0):
        self.num_rows, self.seq_len, self.fail_at, self.delay_s = num_rows, seq_len, fail_at, delay_s
        self.reads = collections.Counter()
        self._lock = threading.Lock()

    def __len__(self):
        return self.num_rows

    def __getitem__(self, i):
        time.sleep(self.delay_s)
        if i == self.fail_at:
            raise OSError("disk on fire")
        with self._lock:
            self.reads[i] += 1
        row = empty_row(self.seq_len)
        for array in row.values():
            array[:] = i
        row["segment_ids"][:] = row["weights"][:] = 1
        return row


@pytest.fixture
def make():
    """Makes loaders and closes them after the test."""
    loaders = []

    def make(dataset, layout=ONE, *, seed=0, shuffle=True, position=START, batch=8, microbatches=1, **kwargs):
        settings = {"last_batch": "drop", "num_threads": 2, "prefetch": 2, **kwargs}
        loaders.append(
            Loader(
                dataset,
                order=GlobalOrder(len(dataset), seed=seed, shuffle=shuffle),
                position=position,
                global_batch_size=batch,
                microbatches=microbatches,
                sharding=sharding_over(*layout),
                **settings,
            )
        )
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(DataConfig(num_samples=21, seq_len=S), vocab_size=50, seed=0).train


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("microbatches", [1, 2])
def test_batches_are_the_rows_of_the_order_on_every_mesh(make, dataset, layout, microbatches):
    order = GlobalOrder(21, seed=4, shuffle=True)
    if layout is LAYOUTS["data 8"]:
        microbatches = 1
    if layout is LAYOUTS["microbatches sharded too"]:
        microbatches = 2
    loader = make(dataset, layout, seed=4, microbatches=microbatches, last_batch="pad", num_steps=4)
    position = Position()
    batches = list(loader)
    assert len(batches) == 4
    for batch in batches:
        ids, after = order.next_batch(position, 8, "pad")
        assert batch.ids.tolist() == ids.tolist()
        assert (batch.before, batch.after) == (position, after)
        position = after
        rows = [empty_row(S) if i == PADDED else dataset[i] for i in ids]
        assert batch.arrays.keys() == ROW_DTYPES.keys()
        for name, array in batch.arrays.items():
            expected = np.stack([row[name] for row in rows]).reshape(microbatches, 8 // microbatches, S)
            assert array.dtype == ROW_DTYPES[name]
            assert array.sharding == sharding_over(*layout)
            assert array.committed
            np.testing.assert_array_equal(np.asarray(array), expected)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_each_row_is_read_once_however_many_devices_hold_it(make, layout):
    rows = NumberedRows(16)
    microbatches = 2 if layout is LAYOUTS["microbatches sharded too"] else 1
    list(make(rows, layout, num_steps=2, microbatches=microbatches))
    assert rows.reads == dict.fromkeys(range(16), 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_together_hold_each_row_and_devices_of_one_batch_shard_hold_the_same(layout, num_processes):
    # B2, A2, A3: what a process reads follows from the sharding alone, so there is no state of a process to lose.
    shape = (2, 8, S)
    index_map = sharding_over(*layout).devices_indices_map(shape)
    devices = sorted(index_map, key=lambda device: device.id)
    parts = [part.tolist() for part in np.array_split(np.array(devices, object), num_processes) if len(part)]
    held = [rows_of_devices({device: index_map[device] for device in part}, 2, 8) for part in parts]
    assert sorted(set(np.concatenate(held))) == list(range(16))
    for part, rows in zip(parts, held, strict=True):
        on_devices = [np.arange(16).reshape(2, 8)[index_map[device][:2]].ravel() for device in part]
        assert rows.tolist() == sorted(set(np.concatenate(on_devices)))
    batch_shards = {"data 8": 8, "data 4": 4}.get(next(k for k, v in LAYOUTS.items() if v is layout))
    if batch_shards and num_processes > 1:
        assert sum(map(len, held)) == 16
        assert held[0].tolist() == [m * 8 + r for m in range(2) for r in range(8 // num_processes)]


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_resume_on_another_mesh_goes_on_with_the_next_row(make, stop):
    # B1, A2: mid epoch 0, at the boundary, mid epoch 1; and prefetched batches were not consumed.
    rows = NumberedRows(10)
    uninterrupted = [batch.ids.tolist() for batch in make(rows, batch=2, num_steps=12)]
    first = make(rows, batch=2, prefetch=4)
    batches = [next(first) for _ in range(stop)]
    layout = ((2, 4), ("data", "tensor"), (None, "data", None))
    rest = make(rows, layout, batch=2, position=batches[-1].after, num_steps=12 - stop)
    assert [batch.ids.tolist() for batch in batches] + [batch.ids.tolist() for batch in rest] == uninterrupted


def test_resume_twice_and_with_another_batch_size_and_accumulation(make):
    # B3, B5, B13.
    rows, order = NumberedRows(64), GlobalOrder(64, seed=0, shuffle=True)
    seen, position = [], Position()
    for batch, microbatches in ((4, 4), (8, 1), (2, 2)):
        for taken in make(rows, batch=batch, microbatches=microbatches, position=position, num_steps=3):
            tokens = np.asarray(taken.arrays["tokens"])
            assert tokens.shape == (microbatches, batch // microbatches, S)
            assert tokens[:, :, 0].ravel().tolist() == taken.ids.tolist()
            seen += taken.ids.tolist()
            position = taken.after
    assert position == Position(0, 42)
    assert seen == order.rows(0, 0, 42).tolist()


def test_padded_rows_weigh_nothing(make, dataset):
    # B7: 3 records, batch 4.
    batch = next(make(NumberedRows(3), batch=4, last_batch="pad"))
    assert sorted(batch.ids) == [PADDED, 0, 1, 2]
    weights = np.asarray(batch.arrays["weights"])[0]
    assert weights.sum() == 3 * S
    assert not weights[3].any()
    assert not np.asarray(batch.arrays["segment_ids"])[0, 3].any()
    loss = np.asarray(batch.arrays["tokens"])[0]
    assert (loss * weights).sum() / weights.sum() == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="3 < 4"):
        make(NumberedRows(3), batch=4)


def test_rows_that_are_left_out_or_padded_are_said(make):
    # B10: 145 records in batches of 48.
    rows = NumberedRows(145)
    assert "1 rows (different ones each epoch) are left out" in make(rows, batch=48).notes[0]
    assert "the same ones each epoch" in make(rows, batch=48, shuffle=False).notes[0]
    assert "padded with 47 rows of weight 0" in make(rows, batch=48, last_batch="pad").notes[0]
    assert make(NumberedRows(96), batch=48).notes == []


@pytest.mark.parametrize(
    ("num_rows", "num_batches", "expected"), [(21, 0, 3), (16, 0, 2), (3, 0, 1), (21, 2, 2), (3, 9, 1)]
)
def test_validation_is_one_pass_in_order(num_rows, num_batches, expected):
    rows = NumberedRows(num_rows)
    loader = validation_loader(
        rows,
        global_batch_size=8,
        microbatches=2,
        sharding=sharding_over(*LAYOUTS["data 4"]),
        num_threads=2,
        prefetch=2,
        num_batches=num_batches,
    )
    batches = list(loader)
    loader.close()
    assert len(batches) == expected
    ids = np.concatenate([batch.ids for batch in batches])
    num_real = min(num_rows, 8 * expected)
    assert ids.tolist() == [*range(num_real), *[PADDED] * (8 * expected - num_real)]
    assert sum(float(batch.arrays["weights"].sum()) for batch in batches) == num_real * S
    assert rows.reads == dict.fromkeys(range(num_real), 1)


@pytest.mark.parametrize(
    ("batch", "microbatches", "layout", "message"),
    [
        (10, 4, ONE, r"global_batch_size = 10: does not divide by train.microbatches = 4, remainder 2"),
        (10, 1, LAYOUTS["data 4"], r"global_batch_size = 10.*\[1, 10, 8\] does not divide"),
        (8, 4, LAYOUTS["data 4"], r"global_batch_size = 8.*\[4, 2, 8\] does not divide"),
        (1, 1, LAYOUTS["data 8"], r"global_batch_size = 1.*\[1, 1, 8\] does not divide"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(make, batch, microbatches, layout, message):
    # C18, C19, C22.
    with pytest.raises(ConfigError, match=message):
        make(NumberedRows(32), layout, batch=batch, microbatches=microbatches)


def test_a_position_of_other_data_is_refused_at_once(make):
    with pytest.raises(ValueError, match="not within epochs of 10 rows"):
        make(NumberedRows(10), batch=2, position=Position(0, 50))


def test_batches_are_prepared_ahead_and_the_wait_is_measured(make):
    rows = NumberedRows(64, delay_s=0.05)
    loader = make(rows, batch=4, prefetch=2)
    next(loader)
    assert loader.wait_s >= 0.19
    deadline = time.perf_counter() + 20
    while sum(rows.reads.values()) < 12 and time.perf_counter() < deadline:
        time.sleep(0.02)
    # The first batch and exactly two more: prefetch bounds what is prepared.
    time.sleep(0.2)
    assert sum(rows.reads.values()) == 12
    next(loader)
    assert loader.wait_s < 0.15


def test_what_a_thread_raises_reaches_the_caller_with_the_row_and_closes_the_loader(make):
    loader = make(NumberedRows(16, fail_at=9), batch=4, shuffle=False)
    assert [next(loader).ids[0] for _ in range(2)] == [0, 4]
    with pytest.raises(OSError, match="disk on fire") as caught:
        next(loader)
    assert "while reading row 9 of the dataset" in caught.value.__notes__
    # Not the batch after the one that failed.
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def grain_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


def test_close_ends_the_threads_and_may_be_called_twice(make):
    before = set(grain_threads())
    loader = make(NumberedRows(64), prefetch=2)
    next(loader)
    threads = set(grain_threads()) - before
    assert threads
    loader.close()
    loader.close()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_dropping_a_loader_ends_its_threads():
    before = set(grain_threads())
    loader = Loader(
        NumberedRows(64),
        order=GlobalOrder(64, seed=0, shuffle=True),
        position=Position(),
        global_batch_size=8,
        microbatches=1,
        sharding=sharding_over(*ONE),
        last_batch="drop",
        num_threads=2,
        prefetch=2,
    )
    next(loader)
    threads = set(grain_threads()) - before
    assert threads
    del loader
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_process_that_abandons_its_loader_ends():
    program = """if True:
        import jax, numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
        from jaxpar.config.schema import DataConfig
        from jaxpar.data import GlobalOrder, Loader, Position, load_dataset
        train = load_dataset(DataConfig(num_samples=64, seq_len=16), vocab_size=50, seed=0).train
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
        loader = Loader(
            train, order=GlobalOrder(64, 0, True), position=Position(), global_batch_size=8, microbatches=1,
            sharding=NamedSharding(mesh, PartitionSpec(None, "data", None)), last_batch="drop", num_threads=4,
            prefetch=8,
        )
        print(next(loader).ids.tolist())
        raise SystemExit(7)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == str(GlobalOrder(64, 0, True).rows(0, 0, 8).tolist())
    assert "Traceback" not in done.stderr
