import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import ConfigError
from jaxpar.data.tokenizers import load_tokenizer

CORPUS = ["the cat sat on the mat", "a dog sat on the log", "cats and dogs"]


def save_bpe(path, special):
    """Trains a small byte-level BPE tokenizer and saves it with ``special`` tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(path))
    return backend


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == text
    assert tokenizer.eod_id not in ids


def test_bytes_vocabulary_holds_every_byte_and_the_end_of_document():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)


def test_tokenizer_json_gives_the_ids_of_the_library(tmp_path):
    backend = save_bpe(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("the cat 猫 sat")
    assert ids.dtype == np.int32
    assert ids.tolist() == backend.encode("the cat 猫 sat", add_special_tokens=False).ids
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eod_id == backend.token_to_id("<|endoftext|>")
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == "the cat 猫 sat"


def test_no_special_tokens_are_added_and_nothing_is_truncated_or_padded(tmp_path):
    path = tmp_path / "tokenizer.json"
    backend = save_bpe(path, ["<s>", "</s>"])
    expected = backend.encode("the cat sat").ids
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(path))
    assert load_tokenizer(str(path)).encode("the cat sat").tolist() == expected


def test_the_end_of_document_comes_before_the_end_of_turn(tmp_path):
    backend = save_bpe(tmp_path / "tokenizer.json", ["<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.eod_id == backend.token_to_id("<|end_of_text|>")


def test_only_special_tokens_end_documents(tmp_path):
    # Tokenizers have HTML tags as ordinary added tokens, and </s> is one.
    path = tmp_path / "tokenizer.json"
    backend = save_bpe(path, ["<|im_end|>"])
    backend.add_tokens(["</s>"])
    backend.save(str(path))
    assert load_tokenizer(str(path)).eod_id == backend.token_to_id("<|im_end|>")


def test_vocab_size_covers_ids_after_a_gap(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_bpe(path, ["</s>"])
    definition = json.loads(path.read_text())
    definition["added_tokens"][0]["id"] = definition["model"]["vocab"]["</s>"] = 999
    path.write_text(json.dumps(definition))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (999, 1000)


def test_fingerprint_is_of_the_meaning_and_not_of_the_file(tmp_path):
    first, second, other = (tmp_path / name for name in ("first.json", "second.json", "other.json"))
    backend = save_bpe(first, ["</s>"])
    backend.enable_truncation(8)
    second.write_text(json.dumps(json.loads(backend.to_str()), indent=3))
    save_bpe(other, ["</s>", "<x>"])
    fingerprints = [load_tokenizer(str(path)).fingerprint for path in (first, second, other)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert load_tokenizer("bytes").fingerprint not in fingerprints


def test_missing_file_is_named_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)data.tokenizer = 'none/tokenizer.json'.*no such file") as caught:
        load_tokenizer("none/tokenizer.json")
    assert str(tmp_path) in str(caught.value)


def test_a_directory_is_refused_with_the_file_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"is a directory(?s:.*)tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [b"{not json", b"{}", b'{"model": {"type": "unknown"}}', b"\xff\xfe", b"[1]"])
def test_invalid_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not a valid tokenizer\.json"):
        load_tokenizer(str(path))


def test_no_end_of_document_token_lists_what_was_looked_for_and_found(tmp_path):
    save_bpe(tmp_path / "tokenizer.json", ["<mine>"])
    with pytest.raises(ConfigError, match=r"no end-of-document token.*<\|endoftext\|>.*</s>.*<mine>"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
