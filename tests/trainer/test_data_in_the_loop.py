"""What a run does with the ends of its data: last batches, too few rows, the validation split."""

import itertools

import jax
import numpy as np
import pytest

from jaxpar.checkpoint.store import Store
from jaxpar.config import ConfigError
from jaxpar.data.dataset import load_dataset
from jaxpar.resume import restore
from tests.parity.harness import build, parity_config
from tests.trainer.runs import BATCH, SEQ_LEN, column, rows_of, run

PADDED = -1


def test_the_last_rows_are_dropped_and_counted(tmp_path):
    dropped = run(tmp_path, data={"num_samples": 20}, train={"stop_at": 4, "eval_batches": 3})
    epochs = [list(itertools.chain.from_iterable(column(dropped.rows, "ids")[i : i + 2])) for i in (0, 2)]
    for ids in epochs:
        assert len(set(ids)) == 16
        assert set(ids) < set(range(20))
    assert set(epochs[0]) != set(epochs[1])  # not the same rows are lost in every epoch
    log = (tmp_path / "log.txt").read_text()
    assert "4 rows (different ones each epoch) are left out" in log
    assert log.count("warning: train.eval_batches = 3 does nothing") == log.count("warning") == 1


def test_the_last_batch_is_padded_and_goes_on_after_it(tmp_path):
    data = {"num_samples": 20, "last_batch": "pad"}
    run(tmp_path, data=data, train={"stop_at": 3})
    padded = run(tmp_path, data=data, train={"stop_at": 4})
    first, second, third, fourth = column(padded.rows, "ids")
    assert sorted([*first, *second, *third[:4]]) == list(range(20))
    assert third[4:] == [PADDED] * 4
    assert PADDED not in fourth
    assert column(padded.rows, "tokens") == [128, 128, 64, 128]


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="3 < 8") as error:
        run(tmp_path / "run", data={"num_samples": 3})
    assert 'data.last_batch="pad"' in str(error.value)
    assert not (tmp_path / "run").exists()


def test_fewer_rows_than_a_batch_are_padded_and_the_loss_is_their_mean(tmp_path):
    """The oracle: the three rows alone, on one device, with the parameters after step 1."""
    few = run(tmp_path, data={"num_samples": 3, "last_batch": "pad"}, train={"stop_at": 2}, checkpoint={"every": 1})
    assert column(few.rows, "tokens") == [3 * SEQ_LEN] * 2
    assert [sorted(ids) for ids in column(few.rows, "ids")] == [[PADDED] * 5 + [0, 1, 2]] * 2

    alone = build(parity_config({}, data={"num_samples": 3}, train={"global_batch_size": 3}))
    with Store(tmp_path / "checkpoints") as store:
        state, _ = restore(store, 1, alone)
    rows = load_dataset(few.config.data, vocab_size=151, seed=0).train
    batch = {
        name: jax.device_put(np.stack([rows[i][name] for i in range(3)])[None], leaf.sharding)
        for name, leaf in alone.abstract_batch.items()
    }
    sums = alone.lower_eval_step().compile()(state.params, batch)
    assert few.rows[1]["cross_entropy"] == pytest.approx(float(sums["cross_entropy"] / sums["tokens"]), rel=1e-5)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """Two runs of one directory, to step 3 and on to step 6, validated every second step."""
    directory = tmp_path_factory.mktemp("validated")
    sections = {"data": {"num_samples": 40, "validation_fraction": 0.3}}
    first = run(directory, **sections, train={"eval_every": 2, "stop_at": 3})
    return first, run(directory, **sections, train={"eval_every": 2, "stop_at": 6})


def test_validation_before_the_first_step_every_second_and_after_the_last(validated):
    evaluations = rows_of(validated[1].directory / "eval.jsonl")
    assert column(evaluations, "step") == [0, 2, 3, 4, 6]
    assert validated[1].outcome.eval_loss == evaluations[-1]["eval_loss"]


def test_validation_loss_starts_at_a_uniform_guess_and_falls(validated):
    losses = column(rows_of(validated[1].directory / "eval.jsonl"), "eval_loss")
    assert losses[0] == pytest.approx(np.log(151), abs=0.1)
    assert losses[-1] < losses[0]


def test_validation_rows_are_all_counted_and_never_trained(validated):
    first, last = validated
    datasets = load_dataset(last.config.data, vocab_size=151, seed=0)
    assert len(datasets.validation) % BATCH, "the last batch of a pass should be padded here"
    for row in rows_of(last.directory / "eval.jsonl"):
        assert row["eval_tokens"] == len(datasets.validation) * SEQ_LEN
    trained = {i for ids in column(last.rows, "ids") for i in ids}
    tokens = {datasets.train[i]["tokens"].tobytes() for i in trained}
    held_out = {datasets.validation[i]["tokens"].tobytes() for i in range(len(datasets.validation))}
    assert not tokens & held_out
    assert len(datasets.train) + len(datasets.validation) == 40
    assert first.compilations.count("eval_step") == 1


def test_one_row_of_batch_on_eight_shards_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="fewer rows than the 8 batch shards") as error:
        run(tmp_path, mesh={"data": 1, "fsdp": 8, "tensor": 1}, train={"global_batch_size": 1, "microbatches": 1})
    assert error.value.problems[0].key == "train.global_batch_size"


def test_a_mesh_of_other_size_than_the_devices_that_are_there_is_refused(tmp_path):
    """Without runtime.cpu_devices, only the started backend knows how many there are."""
    with pytest.raises(ConfigError, match=r"= 4 devices, but there are 8") as error:
        run(tmp_path / "run", mesh={"data": 1}, runtime={"cpu_devices": 0})
    assert "mesh.data=2" in str(error.value) or "mesh.fsdp=4" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_fresh_config_writes_nothing_when_it_is_wrong(tmp_path):
    with pytest.raises(ConfigError):
        run(tmp_path / "run", train={"global_batch_size": 7})
    assert not (tmp_path / "run").exists()
