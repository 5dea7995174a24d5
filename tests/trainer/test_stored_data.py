"""Training from token stores and mixtures: resumed, with another batch size, and refused where the data has changed."""

import itertools
import json
from pathlib import Path

import pytest

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data.dataset import load_dataset
from jaxpar.data.order import Position
from jaxpar.data.prepare import Request, prepare
from tests.data_pipeline.jobs import Counts
from tests.trainer.runs import BATCH, SEQ_LEN, column, rows_of, run

TOKENIZER = Path(__file__).parents[1] / "data" / "sft" / "tokenizer.json"


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    """Two stores of 60 and 10 documents."""
    folder = tmp_path_factory.mktemp("stores")
    for name, count in (("large", 60), ("small", 10), ("other", 10)):
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": f"{name} {i} " * 5}) + "\n" for i in range(count)))
        request = Request(patterns=(str(source),), out=folder / name, shard_bytes=800, tokenizer=str(TOKENIZER))
        prepare(request, num_workers=1, progress=Counts())
    return folder


def mixture(stores: Path, second: str = "small", **fields) -> dict:
    paths = (str(stores / "large"), str(stores / second))
    return {"source": "store", "paths": paths, "weights": (0.7, 0.3)} | fields


def all_ids(run_dir: Path) -> list[int]:
    return list(itertools.chain.from_iterable(column(rows_of(run_dir / "metrics.jsonl"), "ids")))


def order_of(data: dict):
    dataset = load_dataset(DataConfig(**data, seq_len=SEQ_LEN), vocab_size=151, seed=0).train
    return dataset.order(seed=0, shuffle=True)


def test_a_mixture_goes_on_at_the_next_sample_and_other_data_is_refused_by_name(stores, tmp_path):
    data = mixture(stores)
    order = order_of(data)
    run(tmp_path, data=data, train={"stop_at": 3})
    assert all_ids(tmp_path) == order.rows(0, 3 * BATCH).tolist()
    log = (tmp_path / "log.txt").read_text()
    assert "exact over every 10 samples" in log
    assert order.progress(Position(0, 3 * BATCH)) in log
    for changed, key in (
        ({"weights": (0.6, 0.4)}, "data.weights"),
        ({"second": "other"}, r"data \(rows\)"),
        ({"weights": ()}, "data.weights"),
    ):
        with pytest.raises(ConfigError, match=rf"{key} = .*step 3 of .* was trained with"):
            run(tmp_path, data=mixture(stores, **changed), train={"stop_at": 6})
    run(tmp_path, data=data, train={"stop_at": 6})
    assert all_ids(tmp_path) == order.rows(0, 6 * BATCH).tolist()


@pytest.mark.proof
def test_another_batch_size_goes_on_at_the_next_sample(stores, tmp_path):
    data = mixture(stores)
    run(tmp_path, data=data, train={"stop_at": 3})
    run(tmp_path, data=data, train={"stop_at": 6, "global_batch_size": 4, "microbatches": 1})
    assert all_ids(tmp_path) == order_of(data).rows(0, 3 * BATCH + 3 * 4).tolist()


def test_a_run_that_must_not_repeat_is_refused_with_the_steps_that_there_are_rows_for(stores, tmp_path):
    data = mixture(stores, repeat=False)
    small = order_of(data).mixture.num_rows[1]
    with pytest.raises(ConfigError, match=rf"data.repeat = False.*small has {small} rows.*enough for 10 steps"):
        run(tmp_path / "run", data=data)
    assert run(tmp_path / "run", data=data, train={"stop_at": 2}).outcome.step == 2


def test_fine_tuning_counts_the_tokens_of_responses_only(tmp_path):
    source = tmp_path / "sums.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{i}+1=", "response": f"{i + 1}"}) + "\n" for i in range(40)))
    data = {"source": "sft", "paths": (str(source),), "tokenizer": str(TOKENIZER)}
    tuned = run(tmp_path / "run", data=data, train={"stop_at": 2})
    dataset = load_dataset(DataConfig(**data, seq_len=SEQ_LEN), vocab_size=151, seed=0).train
    for row in tuned.rows:
        assert row["tokens"] == sum(int(dataset[i]["weights"].sum()) for i in row["ids"])
        assert row["tokens"] < sum(int((dataset[i]["segment_ids"] > 0).sum()) for i in row["ids"])
