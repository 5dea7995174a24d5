"""From ``DataConfig`` to datasets: rows by index, for training and for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import DataConfig
from jaxpar.data.corpus import Corpus, open_stores, open_token_files
from jaxpar.data.packing import PackedRows, concatenate_documents
from jaxpar.data.rows import Datasets, Rows, TokenDataset
from jaxpar.data.sources import find_files, read_documents
from jaxpar.data.split import document_scores, held_out, record_scores, split_records
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
        return _rows_of(open_stores(config), config, vocab_size)
    if config.source == "tokens":
        return _rows_of([open_token_files(config, vocab_size)], config, vocab_size)
    tokenizer = load_tokenizer(config.tokenizer)
    _check_vocabulary(vocab_size, tokenizer.vocab_size, f"the tokenizer ({config.tokenizer})")
    return _load_text(config, tokenizer)


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


def _check_vocabulary(vocab_size: int, needed: int, whose: str) -> None:
    if vocab_size and needed > vocab_size:
        message = f"{whose} has ids up to {needed - 1}"
        remedy = f"set model.vocab_size to at least {needed}, or to 0 to take the tokenizer's"
        raise ConfigError([Problem(key="model.vocab_size", value=vocab_size, message=message, remedy=remedy)])


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


def _rows_of(corpora: Sequence[Corpus], config: DataConfig, vocab_size: int) -> Datasets:
    """Rows of documents that are token ids already; nothing is read but where documents end, and their scores."""
    needed = corpora[0].vocab_size
    _check_vocabulary(vocab_size, needed, f"the tokenizer of {corpora[0].name}")
    shards = [shard for corpus in corpora for shard in corpus.shards]
    scores = [shard.scores for shard in shards if shard.scores is not None]
    split = split_records(scores, config.validation_fraction)
    content = "\n".join(corpus.content for corpus in corpora)

    def dataset(side: str) -> TokenDataset:
        keep = None if split is None else split.trained if side == "train" else split.held_out
        rows = PackedRows(shards, config.seq_len, pack=config.pack, keep=keep)
        split_content = f"{content}\n{config.validation_fraction!r} {side}".encode()
        identity = {
            "source": f"{config.source} 1",
            "content": hashlib.sha256(split_content).hexdigest(),
            "tokenizer": corpora[0].tokenizer,
            "pack": config.pack,
            "seq_len": config.seq_len,
        }
        return TokenDataset(rows, identity)

    train = dataset("train")
    validation = None if split is None else dataset("validation")
    num_documents, num_tokens = (sum(getattr(c, name) for c in corpora) for name in ("num_documents", "num_tokens"))
    _check_fills_a_row(train.rows.num_pairs + 1, len(train), config)
    notes = [f"{config.source}: {num_documents:,} documents, {num_tokens:,} tokens, {len(train):,} training rows"]
    if validation is not None:
        held = sum(int(split.held_out(part).sum()) for part in scores)
        notes.append(f"validation: {held:,} of {num_documents:,} documents, {len(validation):,} rows")
    return Datasets(
        train=train,
        validation=validation,
        vocab_size_of_tokenizer=needed,
        num_documents=num_documents,
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
