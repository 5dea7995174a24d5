import contextlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data.dataset import load_dataset
from jaxpar.data.order import GlobalOrder


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Twenty documents of different lengths, each saying its number."""
    monkeypatch.chdir(tmp_path)
    for i in range(20):
        Path(f"{i:02}.txt").write_text(f"<{i:02}>" + "abcdefghij" * i)
    return tmp_path


def text(**fields):
    return DataConfig(source="text", paths=("*.txt",), seq_len=16, **fields)


def all_rows(dataset):
    return [dataset[i] for i in range(len(dataset))]


def stacked(dataset, name="tokens"):
    return np.stack([row[name] for row in all_rows(dataset)])


def test_text_rows_hold_the_documents_in_the_order_of_the_files(corpus):
    datasets = load_dataset(text(), vocab_size=0, seed=0)
    expected = b"".join(Path(f"{i:02}.txt").read_bytes() for i in range(20))
    rows = all_rows(datasets.train)
    inputs = np.concatenate([row["tokens"][row["weights"] == 1] for row in rows])
    assert inputs.astype(np.uint8).tobytes() == expected
    assert (datasets.num_documents, datasets.num_tokens) == (20, len(expected) + 20)
    assert (datasets.vocab_size_of_tokenizer, datasets.train.seq_len) == (257, 16)
    assert datasets.validation is None
    assert f"20 documents, {len(expected) + 20:,} tokens" in datasets.notes[0]
    labels = np.concatenate([row["labels"][row["weights"] == 1] for row in rows])
    assert (labels == 256).sum() == 20


def test_not_packed_puts_one_document_in_a_row(corpus):
    datasets = load_dataset(text(pack=False), vocab_size=0, seed=0)
    assert stacked(datasets.train, "segment_ids").max() == 1
    assert len(datasets.train) == sum(-((4 + 10 * i) // -16) for i in range(20))


def test_validation_documents_never_train(corpus):
    datasets = load_dataset(text(validation_fraction=0.3), vocab_size=0, seed=0)
    whole = load_dataset(text(), vocab_size=0, seed=0)

    def pairs(dataset):
        return sum(float(row["weights"].sum()) for row in all_rows(dataset))

    assert pairs(datasets.train) + pairs(datasets.validation) == pairs(whole.train)
    train, validation = (
        b"".join(row["tokens"][row["weights"] == 1].astype(np.uint8).tobytes() for row in all_rows(dataset))
        for dataset in (datasets.train, datasets.validation)
    )
    sides = [(b"<%02d>" % i in train, b"<%02d>" % i in validation) for i in range(20)]
    assert set(sides) == {(True, False), (False, True)}
    held_out = sum(side == (False, True) for side in sides)
    assert any(f"validation: {held_out} of 20 documents" in note for note in datasets.notes)


def test_text_does_not_depend_on_the_seed_and_synthetic_rows_do(corpus):
    for config, same in ((text(validation_fraction=0.3), True), (DataConfig(num_samples=8, seq_len=16), False)):
        first, second = (load_dataset(config, vocab_size=0, seed=seed) for seed in (0, 1))
        assert (first.train.fingerprint == second.train.fingerprint) is same
        assert np.array_equal(stacked(first.train), stacked(second.train)) is same


def test_fingerprint_covers_content_tokenizer_packing_and_length(corpus):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save("words.json")
    configs = [
        text(),
        text(pack=False),
        DataConfig(source="text", paths=("*.txt",), seq_len=8),
        text(tokenizer="words.json"),
        DataConfig(num_samples=8, seq_len=16),
        DataConfig(num_samples=9, seq_len=16),
    ]
    identities = [load_dataset(config, vocab_size=0, seed=0).train for config in configs]
    Path("05.txt").write_text("changed")
    identities.append(load_dataset(text(), vocab_size=0, seed=0).train)
    fingerprints = [dataset.fingerprint for dataset in identities]
    assert len(set(fingerprints)) == len(fingerprints)
    differing = [key for key in identities[0].identity if identities[0].identity[key] != identities[-1].identity[key]]
    assert differing == ["content"]


def test_another_process_has_the_same_rows(corpus):
    program = """if True:
        import hashlib
        from jaxpar.config.schema import DataConfig
        from jaxpar.data.dataset import load_dataset
        for config in (
            DataConfig(source="text", paths=("*.txt",), seq_len=16, validation_fraction=0.3),
            DataConfig(num_samples=4, seq_len=8),
        ):
            datasets = load_dataset(config, vocab_size=0, seed=3)
            rows = b"".join(datasets.train[i]["tokens"].tobytes() for i in range(len(datasets.train)))
            print(datasets.train.fingerprint, hashlib.sha256(rows).hexdigest())
    """
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}).stdout
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(program, {})
    assert other == here.getvalue()
    assert len(other.split()) == 4


def test_synthetic_row_depends_on_seed_and_record_only():
    few, many = (load_dataset(DataConfig(num_samples=n, seq_len=32), vocab_size=50, seed=7).train for n in (4, 40))
    assert np.array_equal(stacked(few), stacked(many)[:4])
    split = load_dataset(DataConfig(num_samples=40, seq_len=32, validation_fraction=0.2), vocab_size=50, seed=7)
    both = {row["tokens"].tobytes() for side in (split.train, split.validation) for row in all_rows(side)}
    assert len(split.train) + len(split.validation) == 40
    assert both == {row["tokens"].tobytes() for row in all_rows(many)}
    assert not {r["tokens"].tobytes() for r in all_rows(split.train)} & {
        r["tokens"].tobytes() for r in all_rows(split.validation)
    }


def test_synthetic_rows_are_whole_and_within_the_vocabulary():
    datasets = load_dataset(DataConfig(num_samples=50, seq_len=64), vocab_size=11, seed=0)
    tokens, labels = stacked(datasets.train), stacked(datasets.train, "labels")
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    assert set(np.unique(tokens)) == set(range(11))
    assert stacked(datasets.train, "weights").all()
    assert (stacked(datasets.train, "segment_ids") == 1).all()
    assert (stacked(datasets.train, "positions") == np.arange(64)).all()
    assert datasets.vocab_size_of_tokenizer == 11


def test_synthetic_tokens_can_be_predicted_from_the_one_before():
    # Each token has one likely successor: a bigram table gets about 3/4 right, chance is 1/50.
    datasets = load_dataset(DataConfig(num_samples=100, seq_len=64), vocab_size=50, seed=0)
    counts = np.zeros((50, 50))
    np.add.at(counts, (stacked(datasets.train), stacked(datasets.train, "labels")), 1)
    accuracy = counts.max(axis=1).sum() / counts.sum()
    assert 0.7 < accuracy < 0.8
    assert len(set(counts.argmax(axis=1))) == 50


def test_synthetic_vocabulary_defaults_to_the_tokenizers():
    assert load_dataset(DataConfig(num_samples=2), vocab_size=0, seed=0).vocab_size_of_tokenizer == 257


@pytest.mark.parametrize("seq_len", [8, 3000])
def test_fewer_tokens_than_a_row_is_refused_with_both_numbers(tmp_path, monkeypatch, seq_len):
    # B8: a packed row that is longer than the whole corpus.
    monkeypatch.chdir(tmp_path)
    Path("tiny.txt").write_text("12345")
    with pytest.raises(ConfigError, match=rf"data.seq_len.*6 tokens.*seq_len \+ 1 = {seq_len + 1}(?s:.*)at most 5"):
        load_dataset(DataConfig(source="text", paths=("*.txt",), seq_len=seq_len), vocab_size=0, seed=0)
    exact = load_dataset(DataConfig(source="text", paths=("*.txt",), seq_len=5), vocab_size=0, seed=0)
    assert len(exact.train) == 1
    padded = load_dataset(DataConfig(source="text", paths=("*.txt",), seq_len=64, pack=False), vocab_size=0, seed=0)
    assert padded.train[0]["weights"].sum() == 5


def test_a_hundred_documents_and_a_batch_of_one_more_is_refused(tmp_path, monkeypatch):
    # B8: 100 records, batch 101, drop.
    datasets = load_dataset(DataConfig(num_samples=100, seq_len=4), vocab_size=0, seed=0)
    with pytest.raises(ConfigError, match="100 < 101"):
        GlobalOrder(len(datasets.train), seed=0, shuffle=True).check(101, "drop")


@pytest.mark.parametrize("vocab_size", [256, 100])
def test_a_vocabulary_below_the_tokenizers_is_refused(corpus, vocab_size):
    with pytest.raises(ConfigError, match=rf"model.vocab_size = {vocab_size}.*ids up to 256(?s:.*)at least 257"):
        load_dataset(text(), vocab_size=vocab_size, seed=0)
    assert load_dataset(text(), vocab_size=257, seed=0).vocab_size_of_tokenizer == 257


def test_one_document_cannot_be_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("only.txt").write_text("one document " * 20)
    with pytest.raises(ConfigError, match=r"data.validation_fraction.*1 different"):
        load_dataset(text(validation_fraction=0.5), vocab_size=0, seed=0)
    with pytest.raises(ConfigError, match=r"data.validation_fraction.*1 different"):
        load_dataset(DataConfig(num_samples=1, validation_fraction=0.5), vocab_size=0, seed=0)
