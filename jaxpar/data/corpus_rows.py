"""Corpora of token ids -> training and validation rows: split, packed, mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import DataConfig
from jaxpar.data.corpus import Corpus
from jaxpar.data.mixture import Mixture, exact_shares
from jaxpar.data.packing import PackedRows
from jaxpar.data.rows import ConcatenatedRows, Datasets, TokenDataset
from jaxpar.data.split import Split, split_records


def load_corpora(corpora: Sequence[Corpus], config: DataConfig, vocab_size: int) -> Datasets:
    """Returns the rows of documents that are token ids already. Reads only where documents end, and their scores.

    Args:
      corpora: one per path if ``data.weights`` are given.
      config: the ``data`` section.
      vocab_size: ``model.vocab_size``; 0 takes the corpora's.

    Raises:
      ConfigError: ids are outside the vocabulary, documents cannot be split, or do not fill a row.
    """
    needed = max(corpus.vocab_size for corpus in corpora)
    check_vocabulary(vocab_size, needed, f"the tokenizer of {corpora[0].name}")
    scores = [shard.scores for corpus in corpora for shard in corpus.shards if shard.scores is not None]
    split = split_records(scores, config.validation_fraction)
    train = _train(corpora, config, split)
    validation = None if split is None else _validation(corpora, config, split)
    num_documents, num_tokens = (sum(getattr(c, name) for c in corpora) for name in ("num_documents", "num_tokens"))
    notes = [f"{config.source}: {num_documents:,} documents, {num_tokens:,} tokens, {len(train):,} training rows"]
    if split is not None and validation is not None:
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


def _train(corpora: Sequence[Corpus], config: DataConfig, split: Split | None) -> TokenDataset:
    identity = _identity(corpora, config, "train")
    keep = None if split is None else split.trained
    if not config.weights:
        rows = PackedRows(_shards(corpora), config.seq_len, pack=config.pack, keep=keep)
        check_fills_a_row(rows.num_pairs + 1, len(rows), config)
        return TokenDataset(rows, identity)
    parts = [PackedRows(corpus.shards, config.seq_len, pack=config.pack, keep=keep) for corpus in corpora]
    for corpus, part in zip(corpora, parts, strict=True):
        check_fills_a_row(part.num_pairs + 1, len(part), config, f"the training documents of {corpus.name}")
    shares = exact_shares(config.weights)
    mixture = Mixture(names=tuple(c.name for c in corpora), num_rows=tuple(map(len, parts)), shares=shares)
    return TokenDataset(ConcatenatedRows(parts), {**identity, "weights": " : ".join(map(str, shares))}, mixture=mixture)


def _validation(corpora: Sequence[Corpus], config: DataConfig, split: Split) -> TokenDataset:
    """All held-out documents once, whatever the weights."""
    rows = PackedRows(_shards(corpora), config.seq_len, pack=config.pack, keep=split.held_out)
    return TokenDataset(rows, _identity(corpora, config, "validation"))


def _shards(corpora: Sequence[Corpus]) -> list:
    return [shard for corpus in corpora for shard in corpus.shards]


def _identity(corpora: Sequence[Corpus], config: DataConfig, side: str) -> dict[str, str | int | bool]:
    content = "\n".join([*(corpus.content for corpus in corpora), f"{config.validation_fraction!r} {side}"])
    return {
        "source": f"{config.source} 1",
        "content": hashlib.sha256(content.encode()).hexdigest(),
        "tokenizer": corpora[0].tokenizer,
        "pack": config.pack,
        "seq_len": config.seq_len,
    }


def check_vocabulary(vocab_size: int, needed: int, whose: str) -> None:
    """Raises ConfigError where ``model.vocab_size`` is set, and below the ``needed`` ids of a tokenizer."""
    if vocab_size and needed > vocab_size:
        message = f"{whose} has ids up to {needed - 1}"
        remedy = f"set model.vocab_size to at least {needed}, or to 0 to take the tokenizer's"
        raise ConfigError([Problem(key="model.vocab_size", value=vocab_size, message=message, remedy=remedy)])


def check_fills_a_row(
    num_tokens: int, num_rows: int, config: DataConfig, whose: str = "the training documents"
) -> None:
    """Refuses training data that is less than a row: a mistake in the paths or in seq_len, not a corpus."""
    needed = config.seq_len + 1 if config.pack else 2
    if num_rows and num_tokens >= needed:
        return
    remedy = "give more text"
    if config.pack and num_tokens > 1:
        remedy += f", lower data.seq_len to at most {num_tokens - 1}, or set data.pack = false"
    message = f"{whose} have {num_tokens} tokens, and one row needs seq_len + 1 = {needed}"
    if not config.pack:
        message = f"{whose} have {num_tokens} tokens and make {num_rows} rows"
    raise ConfigError([Problem(key="data.seq_len", value=config.seq_len, message=message, remedy=remedy)])
