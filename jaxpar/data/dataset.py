"""From ``DataConfig`` to datasets: rows by index, for training and for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxpar.config.schema import DataConfig
from jaxpar.data.corpus import open_stores, open_token_corpora
from jaxpar.data.corpus_rows import check_fills_a_row, check_vocabulary, load_corpora
from jaxpar.data.packing import PackedRows, concatenate_documents
from jaxpar.data.rows import Datasets, Rows, TokenDataset
from jaxpar.data.sft import load_sft
from jaxpar.data.sources import find_files, read_documents
from jaxpar.data.split import document_scores, held_out, record_scores
from jaxpar.data.store import read_manifest
from jaxpar.data.synthetic import SyntheticRows
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Datasets", "Rows", "TokenDataset", "load_dataset", "tokenizer_vocab_size"]


def load_dataset(config: DataConfig, *, vocab_size: int, seed: int) -> Datasets:
    """Reads, tokenizes, splits and packs what ``config`` names.

    Args:
      config: the ``data`` section.
      vocab_size: ``model.vocab_size``; 0 takes the tokenizer's.
      seed: ``run.seed``; decides the synthetic rows, and nothing about text.

    Raises:
      ConfigError: no file matches, a file or the tokenizer cannot be read, a token id is outside the vocabulary, the
        training split does not fill one row, or the documents cannot be split.
      StoreError: a store is damaged.
    """
    if config.source == "synthetic":
        return _load_synthetic(config, vocab_size or load_tokenizer(config.tokenizer).vocab_size, seed)
    if config.source == "store":
        return load_corpora(open_stores(config), config, vocab_size)
    if config.source == "tokens":
        return load_corpora(open_token_corpora(config, vocab_size), config, vocab_size)
    tokenizer = load_tokenizer(config.tokenizer)
    check_vocabulary(vocab_size, tokenizer.vocab_size, f"the tokenizer ({config.tokenizer})")
    return load_sft(config, tokenizer) if config.source == "sft" else _load_text(config, tokenizer)


def tokenizer_vocab_size(config: DataConfig) -> int | None:
    """Returns how many ids the tokenizer of ``config`` has, reading no documents; None if nothing says it.

    Raises:
      ConfigError: the tokenizer or the store cannot be read.
    """
    if config.source == "store":
        return read_manifest(config.paths[0]).tokenizer["vocab_size"]
    if config.source == "tokens" and config.tokenizer == "bytes":
        return None
    return load_tokenizer(config.tokenizer).vocab_size


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
    check_fills_a_row(sum(map(len, training_documents)), len(train), config)
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
