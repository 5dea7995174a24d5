"""Documents that are token ids already: stores of ``jaxpar data prepare``, and files of ids. All memory-mapped."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import DataConfig
from jaxpar.data.packing import Shard
from jaxpar.data.sources import find_files
from jaxpar.data.split import token_scores
from jaxpar.data.store import open_shards, read_manifest
from jaxpar.data.tokenizers import load_tokenizer

_CHUNK = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in shards, and what they are."""

    name: str
    """Path, for people."""
    shards: Sequence[Shard]
    num_documents: int
    num_tokens: int
    content: str
    """Hash of everything that the shards hold."""
    tokenizer: str
    """Fingerprint."""
    vocab_size: int
    """Every id is below this."""


def open_stores(config: DataConfig) -> list[Corpus]:
    """Opens the stores that ``data.paths`` names, in that order; reads no tokens.

    Raises:
      ConfigError: a path is no store, or the tokenizers differ, among each other or from ``data.tokenizer``.
      StoreError: a store is damaged.
    """
    if not config.paths:
        message, remedy = "no stores are named", "give the directories that `jaxpar data prepare` has written"
        raise ConfigError([Problem(key="data.paths", value=(), message=message, remedy=remedy)])
    manifests = {path: read_manifest(path) for path in config.paths}
    _check_one_tokenizer(config, {path: manifest.tokenizer for path, manifest in manifests.items()})
    return [
        Corpus(
            name=path,
            shards=open_shards(path, manifest),
            num_documents=manifest.num_documents,
            num_tokens=manifest.num_tokens,
            content=manifest.content,
            tokenizer=manifest.tokenizer["fingerprint"],
            vocab_size=manifest.tokenizer["vocab_size"],
        )
        for path, manifest in ((path, manifests[path]) for path in config.paths)
    ]


def _check_one_tokenizer(config: DataConfig, tokenizers: dict[str, dict]) -> None:
    first, *others = tokenizers
    expected, whose = tokenizers[first]["fingerprint"], first
    if config.tokenizer != "bytes":
        expected, whose = load_tokenizer(config.tokenizer).fingerprint, f"data.tokenizer = {config.tokenizer!r}"
        others = [first, *others]
    problems = [
        Problem(
            key="data.paths",
            value=path,
            message=f"was made with another tokenizer ({tokenizers[path]['name']}) than {whose}",
            remedy="prepare it again with the same tokenizer, or leave it out",
        )
        for path in others
        if tokenizers[path]["fingerprint"] != expected
    ]
    if problems:
        raise ConfigError(problems)


def open_token_corpora(config: DataConfig, vocab_size: int) -> list[Corpus]:
    """Opens the files of ``data.paths``: as one corpus, or as one per path if ``data.weights`` are given.

    Arguments and errors are those of ``open_token_files``.
    """
    groups = [(path,) for path in config.paths] if config.weights else [config.paths]
    return [open_token_files(dataclasses.replace(config, paths=paths), vocab_size) for paths in groups]


def open_token_files(config: DataConfig, vocab_size: int) -> Corpus:
    """Opens the ``.bin`` and ``.npy`` files of ``data.paths`` as one corpus; reads each once, to find the documents.

    A file's last document may lack its end-of-document id; no document goes on in the next file.

    Args:
      config: the ``data`` section.
      vocab_size: ``model.vocab_size``; 0 takes that of ``data.tokenizer``.

    Raises:
      ConfigError: a file is none of the two kinds, an id is outside the vocabulary, or it is not known which id ends a
        document, or how many ids there are.
    """
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer != "bytes" else None
    eod_id = config.eod_id if config.eod_id is not None else tokenizer.eod_id if tokenizer else None
    vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    if eod_id is None or not vocab_size:
        key, what = ("data.eod_id", "the id that ends a document") if eod_id is None else _VOCAB_SIZE
        remedy = f"set {key}, or data.tokenizer to the tokenizer.json that made the ids"
        raise ConfigError([Problem(key=key, message=f"token files do not say {what}", remedy=remedy)])
    paths = find_files(config.paths)
    with concurrent.futures.ThreadPoolExecutor(config.num_threads) as threads:
        found = list(threads.map(lambda path: _open_token_file(path, config, eod_id, vocab_size), paths))
    return Corpus(
        name=", ".join(config.paths),
        shards=[shard for shard, _ in found],
        num_documents=sum(len(shard.ends) for shard, _ in found),
        num_tokens=sum(len(shard.tokens) for shard, _ in found),
        content=hashlib.sha256("\n".join(content for _, content in found).encode()).hexdigest(),
        tokenizer=tokenizer.fingerprint if tokenizer else "unknown",
        vocab_size=vocab_size,
    )


_VOCAB_SIZE = ("model.vocab_size", "how many ids there are")


def _open_token_file(path: Path, config: DataConfig, eod_id: int, vocab_size: int) -> tuple[Shard, str]:
    """The documents of a file, and the hash of its ids and of the id that ends documents."""
    tokens = _map_ids(path, config)
    ends, digest = [], hashlib.sha256(f"{eod_id} {tokens.dtype.str}\n".encode())
    for start in range(0, len(tokens), _CHUNK):
        chunk = np.ascontiguousarray(tokens[start : start + _CHUNK])
        outside = (chunk >= vocab_size) | (chunk < 0)
        if outside.any():
            place = int(outside.argmax())
            message = f"token {start + place:,} is {chunk[place]}, and the vocabulary has {vocab_size:,} ids"
            remedy = "check data.token_dtype, data.tokenizer and model.vocab_size"
            raise ConfigError([Problem(key="data.paths", value=str(path), message=message, remedy=remedy)])
        ends.append(np.flatnonzero(chunk == eod_id) + start + 1)
        digest.update(chunk)
    ends = np.concatenate(ends)
    if not len(ends) or ends[-1] < len(tokens):
        ends = np.append(ends, len(tokens))
    scores = token_scores(tokens, ends) if config.validation_fraction else None
    return Shard(tokens=tokens, ends=ends, scores=scores), digest.hexdigest()


def _map_ids(path: Path, config: DataConfig) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".bin":
            tokens = np.memmap(path, np.dtype(config.token_dtype).newbyteorder("<"), mode="r")
        else:
            raise ValueError("is neither .bin nor .npy")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            raise ValueError(f"holds {tokens.dtype} {list(tokens.shape)}, not one dimension of integers")
    except (OSError, ValueError) as error:
        remedy = "give .bin files of data.token_dtype, or .npy files of one dimension of integers"
        raise ConfigError([Problem(key="data.paths", value=str(path), message=str(error), remedy=remedy)]) from error
    return tokens
