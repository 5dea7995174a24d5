"""Training rows from stores and files of token ids: the rows of the same documents as text."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.config import ConfigError
from jaxpar.config.schema import DataConfig
from jaxpar.data import corpus as corpus_module
from jaxpar.data.dataset import load_dataset, tokenizer_vocab_size
from jaxpar.data.packing import BLOCK
from jaxpar.data.prepare import Request, prepare
from jaxpar.data.tokenizers import load_tokenizer
from tests.data_pipeline.jobs import Counts
from tests.data_pipeline.test_tokenizers import save_bpe

TEXTS = [f"<{i:03}>" + "the cat sat on the mat " * (i % 7) for i in range(200)]


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    """The same documents as text files and as JSONL."""
    monkeypatch.chdir(tmp_path)
    for i, text in enumerate(TEXTS):
        Path(f"{i:03}.txt").write_text(text)
    Path("all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    save_bpe("tokenizer.json", ["</s>"])


def store(out="store", *patterns, **fields):
    request = Request(**{"patterns": patterns or ("all.jsonl",), "out": Path(out), "shard_bytes": 2000} | fields)
    return prepare(request, num_workers=1, progress=Counts())


def load(source, *paths, vocab_size=0, **fields):
    config = DataConfig(**{"source": source, "paths": paths, "seq_len": 16} | fields)
    return load_dataset(config, vocab_size=vocab_size, seed=0)


def rows_of(dataset):
    return [{name: array.tolist() for name, array in dataset[i].items()} for i in range(len(dataset))]


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer.json"])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("validation_fraction", [0.0, 0.2])
def test_a_store_gives_the_rows_of_the_text(tokenizer, pack, validation_fraction):
    manifest = store(tokenizer=tokenizer)
    assert len(manifest.shards) > 3
    options = {"pack": pack, "validation_fraction": validation_fraction}
    stored = load("store", "store", **options)
    text = load("text", "*.txt", tokenizer=tokenizer, **options)
    assert rows_of(stored.train) == rows_of(text.train)
    assert (stored.validation is None) == (text.validation is None)
    if validation_fraction:
        assert rows_of(stored.validation) == rows_of(text.validation)
        assert stored.notes[-1] == text.notes[-1]
    for name in ("vocab_size_of_tokenizer", "num_documents", "num_tokens"):
        assert getattr(stored, name) == getattr(text, name)


def test_several_stores_follow_each_other():
    store("first", "0*.txt")
    store("second", "1*.txt")
    both = load("store", "first", "second")
    assert rows_of(both.train) == rows_of(load("text", "*.txt").train)
    other = load("store", "second", "first")
    assert other.train.fingerprint != both.train.fingerprint
    # A shard's files alone decide its content: the same documents from elsewhere are the same store.
    assert load("store", "first").train.fingerprint == load("store", "first").train.fingerprint


def save_ids(path, texts, tokenizer, dtype, last_eod=True):
    ids = np.concatenate([[*tokenizer.encode(text), tokenizer.eod_id] for text in texts]).astype(dtype)
    ids = ids if last_eod else ids[:-1]
    np.save(path, ids) if path.endswith(".npy") else ids.tofile(path)
    return ids


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "int64"), ("a.npy", "uint16")]
)
@pytest.mark.parametrize("pack", [True, False])
def test_files_of_ids_give_the_rows_of_the_text(monkeypatch, name, dtype, pack):
    monkeypatch.setattr(corpus_module, "_CHUNK", 1000)
    tokenizer = load_tokenizer("tokenizer.json")
    save_ids(f"0{name}", TEXTS[:150], tokenizer, dtype)
    save_ids(f"1{name}", TEXTS[150:], tokenizer, dtype)
    options = {"tokenizer": "tokenizer.json", "pack": pack}
    given = {"token_dtype": dtype} if name.endswith(".bin") else {}
    ids = load("tokens", f"*{name}", **options, **given)
    assert rows_of(ids.train) == rows_of(load("text", "*.txt", **options).train)
    assert (ids.num_documents, ids.vocab_size_of_tokenizer) == (200, tokenizer.vocab_size)
    # The ids and the id that ends documents are all that is needed.
    without = load("tokens", f"*{name}", eod_id=tokenizer.eod_id, vocab_size=500, pack=pack, **given)
    assert rows_of(without.train) == rows_of(ids.train)
    assert without.vocab_size_of_tokenizer == 500


def test_the_last_document_of_a_file_may_lack_its_end_and_does_not_go_on_in_the_next():
    tokenizer = load_tokenizer("bytes")
    save_ids("a.bin", ["one", "two"], tokenizer, "uint16", last_eod=False)
    save_ids("b.bin", ["three"], tokenizer, "uint16")
    row = load("tokens", "*.bin", eod_id=256, vocab_size=257, seq_len=10).train[0]
    assert row["segment_ids"][:10].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert row["labels"][:10].tolist() == [*b"ne", 256, *b"wo", *b"hree", 256]


def test_validation_of_ids_is_by_document_and_leaves_the_rest_alone():
    tokenizer = load_tokenizer("bytes")
    for i in (0, 100):
        save_ids(f"{i:03}.npy", TEXTS[i : i + 100], tokenizer, "uint16")
    save_ids("whole.npy", TEXTS, tokenizer, "int32")
    parts, whole = (
        load("tokens", name, eod_id=256, vocab_size=257, validation_fraction=0.2) for name in ("[01]*.npy", "whole.npy")
    )
    assert rows_of(parts.train) == rows_of(whole.train)
    assert rows_of(parts.validation) == rows_of(whole.validation)
    everything = load("tokens", "whole.npy", eod_id=256, vocab_size=257)
    assert parts.train.rows.num_pairs + parts.validation.rows.num_pairs == everything.train.rows.num_pairs
    assert 10 < int(parts.notes[-1].split()[1]) < 80


def test_the_identity_names_what_has_changed():
    store("one")
    store("two", "0*.txt")
    store("bpe", tokenizer="tokenizer.json")
    base = load("store", "one").train.identity

    def changed(*args, **fields):
        identity = load("store", *args, **fields).train.identity
        return {name for name in base if base[name] != identity[name]}

    assert changed("one") == set()
    assert changed("two") == {"content"}
    assert changed("bpe") == {"content", "tokenizer"}
    assert changed("one", validation_fraction=0.1) == {"content"}
    assert changed("one", pack=False, seq_len=8) == {"pack", "seq_len"}
    split = load("store", "one", validation_fraction=0.1)
    assert split.train.fingerprint != split.validation.fingerprint
    ids = [save_ids("a.bin", [text], load_tokenizer("bytes"), "uint16") for text in ("abcdef", "abcdeg")]
    assert len(ids[0]) == 7
    same = [load("tokens", "a.bin", eod_id=e, vocab_size=257, seq_len=2).train.fingerprint for e in (256, 256, 97)]
    assert same[0] == same[1] != same[2]
    save_ids("a.bin", ["abcdef"], load_tokenizer("bytes"), "uint16")
    assert load("tokens", "a.bin", eod_id=256, vocab_size=257, seq_len=2).train.fingerprint not in same


def test_the_plan_of_a_large_store_holds_no_tokens_and_no_documents(monkeypatch):
    texts = "".join(json.dumps({"text": "ab"}) + "\n" for _ in range(40 * BLOCK))
    Path("many.jsonl").write_text(texts)
    store("many", "many.jsonl", shard_bytes=2**20)
    rows = load("store", "many", seq_len=2).train.rows
    held = [value for value in vars(rows).values() if isinstance(value, np.ndarray)]
    assert len(rows) == 40 * BLOCK
    assert sum(array.nbytes for array in held) < 3 * 8 * 50
    assert all(isinstance(shard.tokens, np.memmap) for shard in rows._shards)
    assert not any(shard.ends.flags.owndata for shard in rows._shards)


def test_other_tokenizers_are_refused_by_name():
    store("bytes store")
    store("bpe", tokenizer="tokenizer.json")
    save_bpe("other.json", ["</s>", "<x>"])
    with pytest.raises(ConfigError, match=r"data.paths = 'bpe': was made with another tokenizer .*than bytes store"):
        load("store", "bytes store", "bpe")
    with pytest.raises(ConfigError, match=r"'bpe'.*than data.tokenizer = 'other.json'"):
        load("store", "bpe", tokenizer="other.json")
    assert load("store", "bpe", tokenizer="tokenizer.json").num_documents == 200
    with pytest.raises(ConfigError, match=r"model.vocab_size = 200: the tokenizer of bytes store has ids up to 256"):
        load("store", "bytes store", vocab_size=200)
    sizes = {"bytes store": 257, "bpe": load_tokenizer("tokenizer.json").vocab_size}
    for path, size in sizes.items():
        assert tokenizer_vocab_size(DataConfig(source="store", paths=(path,))) == size


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (b"\x00\x00\x01", {}, r"data.paths = 'a.bin'"),
        (b"", {}, r"data.paths = 'a.bin'"),
        (b"\x05\x00\x2c\x01", {}, r"'a.bin': token 1 is 300, and the vocabulary has 257 ids(?s:.*)data.token_dtype"),
        (b"\x05\x00\x05\x00", {"token_dtype": "uint32"}, r"token 0 is 327685"),
        (b"\x05\x00\x05\x00", {"eod_id": None}, r"data.eod_id: token files do not say the id that ends a document"),
        (b"\x05\x00\x05\x00", {"vocab_size": 0}, r"model.vocab_size: token files do not say how many ids there are"),
    ],
)
def test_files_that_are_not_ids_are_refused(content, fields, message):
    Path("a.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load("tokens", "a.bin", **{"eod_id": 256, "vocab_size": 257} | fields)


def test_arrays_of_another_kind_are_refused():
    np.save("a.npy", np.zeros((2, 3), np.int32))
    with pytest.raises(ConfigError, match=r"holds int32 \[2, 3\], not one dimension of integers"):
        load("tokens", "a.npy", eod_id=256, vocab_size=257)
    np.save("b.npy", np.array([1, -1]))
    with pytest.raises(ConfigError, match=r"token 1 is -1"):
        load("tokens", "b.npy", eod_id=256, vocab_size=257)
    with pytest.raises(ConfigError, match=r"neither .bin nor .npy"):
        load("tokens", "000.txt", eod_id=256, vocab_size=257)


def test_less_than_a_row_is_refused():
    store("store", "001.txt")
    with pytest.raises(ConfigError, match=r"data.seq_len = 4096.*29 tokens.*4097"):
        load("store", "store", seq_len=4096)
