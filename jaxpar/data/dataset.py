"""From ``DataConfig`` to datasets: rows by index, for training and for validation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import DataConfig
from jaxpar.data.packing import PackedRows, concatenate_documents
from jaxpar.data.sources import find_files, read_documents
from jaxpar.data.split import document_scores, held_out, record_scores
from jaxpar.data.synthetic import SyntheticRows
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer


class Rows(Protocol):
    """Rows by index. Reading must be safe from several threads at once, and depend on nothing but the index."""

    seq_len: int

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class TokenDataset:
    """Rows by index, with the identity of what they were made from."""

    rows: Rows
    identity: Mapping[str, str | int | bool]
    """What decides the rows: content, tokenizer, packing, seq_len. A resumed run can name the part that has changed."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row ``i``: the arrays of ``jaxpar.data.packing.ROW_DTYPES``, each ``[seq_len]``."""
        return self.rows[i]

    @property
    def seq_len(self) -> int:
        """Positions per row."""
        return self.rows.seq_len

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of ``identity``: equal on every process and machine that has the same rows."""
        return hashlib.sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run trains and validates on."""

    train: TokenDataset
    validation: TokenDataset | None
    """None when ``data.validation_fraction`` is 0."""
    vocab_size_of_tokenizer: int
    """Every token id of the rows is below this; what ``model.vocab_size = 0`` stands for."""
    num_documents: int
    """Documents of both splits (synthetic: rows)."""
    num_tokens: int
    """Tokens of both splits, end-of-document tokens included."""
    notes: list[str]
    """What the user should be told: sizes, skipped files, the split."""


def load_dataset(config: DataConfig, *, vocab_size: int, seed: int) -> Datasets:
    """Reads, tokenizes, splits and packs what ``config`` names.

    Args:
      config: the ``data`` section.
      vocab_size: ``model.vocab_size``; 0 takes the tokenizer's.
      seed: ``run.seed``; decides the synthetic rows, and nothing about text.

    Raises:
      ConfigError: no file matches, a file or the tokenizer cannot be read, a token id is outside the vocabulary, the
        training split does not fill one row, or the documents cannot be split.
    """
    if config.source == "synthetic":
        return _load_synthetic(config, vocab_size or load_tokenizer(config.tokenizer).vocab_size, seed)
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size and tokenizer.vocab_size > vocab_size:
        message = f"the tokenizer ({config.tokenizer}) has ids up to {tokenizer.vocab_size - 1}"
        remedy = f"set model.vocab_size to at least {tokenizer.vocab_size}, or to 0 to take the tokenizer's"
        raise ConfigError([Problem(key="model.vocab_size", value=vocab_size, message=message, remedy=remedy)])
    return _load_text(config, tokenizer)


def _load_synthetic(config: DataConfig, vocab_size: int, seed: int) -> Datasets:
    mask = held_out(record_scores(config.num_samples), config.validation_fraction)

    def dataset(records: np.ndarray) -> TokenDataset:
        rows = SyntheticRows(records, vocab_size=vocab_size, seq_len=config.seq_len, seed=seed)
        content = hashlib.sha256(records.astype("<i8").tobytes()).hexdigest()
        identity = {
            "source": "synthetic 1",
            "content": content,
            "seed": seed,
            "vocab_size": vocab_size,
            "seq_len": config.seq_len,
        }
        return TokenDataset(rows, identity)

    train, validation = (dataset(np.flatnonzero(side)) for side in (~mask, mask))
    num_tokens = config.num_samples * (config.seq_len + 1)
    notes = [f"synthetic data: {config.num_samples:,} rows, {num_tokens:,} tokens"]
    if len(validation):
        notes.append(f"validation: {len(validation):,} of {config.num_samples:,} rows")
    return Datasets(
        train=train,
        validation=validation if len(validation) else None,
        vocab_size_of_tokenizer=vocab_size,
        num_documents=config.num_samples,
        num_tokens=num_tokens,
        notes=notes,
    )


def _load_text(config: DataConfig, tokenizer: Tokenizer) -> Datasets:
    texts, notes = read_documents(find_files(config.paths))
    mask = held_out(document_scores(texts), config.validation_fraction)
    eod = np.array([tokenizer.eod_id], np.int32)
    documents = [np.concatenate([tokenizer.encode(text), eod]) for text in texts]
    training_documents = [document for document, out in zip(documents, mask, strict=True) if not out]
    validation_documents = [document for document, out in zip(documents, mask, strict=True) if out]
    train = _pack(training_documents, config, tokenizer)
    validation = _pack(validation_documents, config, tokenizer)
    _check_fills_a_row(sum(map(len, training_documents)), len(train), config)
    num_tokens = sum(map(len, documents))
    notes.insert(0, f"text: {len(texts):,} documents, {num_tokens:,} tokens, {len(train):,} training rows")
    if mask.any():
        notes.append(f"validation: {mask.sum():,} of {len(texts):,} documents, {len(validation):,} rows")
    return Datasets(
        train=train,
        validation=validation if mask.any() else None,
        vocab_size_of_tokenizer=tokenizer.vocab_size,
        num_documents=len(texts),
        num_tokens=num_tokens,
        notes=notes,
    )


def _pack(documents: Sequence[np.ndarray], config: DataConfig, tokenizer: Tokenizer) -> TokenDataset:
    shard = concatenate_documents(documents)
    content = hashlib.sha256(np.append(0, shard.ends).astype("<i8").tobytes())
    content.update(shard.tokens.astype("<i4", copy=False))
    identity = {
        "source": "text",
        "content": content.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "pack": config.pack,
        "seq_len": config.seq_len,
    }
    return TokenDataset(PackedRows([shard], config.seq_len, pack=config.pack), identity)


def _check_fills_a_row(num_tokens: int, num_rows: int, config: DataConfig) -> None:
    """Refuses training data that is less than a row: a mistake in the paths or in seq_len, not a corpus."""
    needed = config.seq_len + 1 if config.pack else 2
    if num_rows and num_tokens >= needed:
        return
    remedy = "give more text"
    if config.pack and num_tokens > 1:
        remedy += f", lower data.seq_len to at most {num_tokens - 1}, or set data.pack = false"
    message = f"the training documents have {num_tokens} tokens, and one row needs seq_len + 1 = {needed}"
    if not config.pack:
        message = f"the training documents have {num_tokens} tokens and make {num_rows} rows"
    raise ConfigError([Problem(key="data.seq_len", value=config.seq_len, message=message, remedy=remedy)])
