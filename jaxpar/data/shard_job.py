"""One shard of a store: tokenized, hashed while it is written, and recorded once it is whole."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np

from jaxpar.data.records import Part, Reading, read_documents_of
from jaxpar.data.split import document_score
from jaxpar.data.store import ShardFacts, StoreError, file_sha256
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.data.workers import Report

PROGRESS_DIR = ".progress"
"""Where an unfinished store keeps the records of its finished shards."""

_WRITE_BYTES = 2**20
_REPORT_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardJob:
    """One shard to write."""

    number: int
    """Counted from 0 over the whole store."""
    directory: str
    """The unfinished store."""
    parts: tuple[Part, ...]
    reading: Reading
    tokenizer: str
    fingerprint: str
    """Of the tokenizer, so that every worker has the same."""
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A shard that is done."""

    facts: ShardFacts
    skipped: Mapping[str, int]
    """Records left out, by reason."""


def shard_of(job: ShardJob, report: Report) -> tuple[ShardRecord, bool]:
    """Returns the record of a shard, and whether an earlier run had written it."""
    path = Path(job.directory, PROGRESS_DIR, f"{job.number:05}.json")
    record = _read_record(path)
    if record is not None and _is_whole(Path(job.directory), record.facts):
        report((sum(part.num_bytes for part in job.parts), record.facts.num_documents, record.facts.num_tokens))
        return record, True
    record = _write_shard(job, report)
    write_whole(path, json.dumps(dataclasses.asdict(record)).encode())
    return record, False


def _read_record(path: Path) -> ShardRecord | None:
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return ShardRecord(facts=ShardFacts(**fields["facts"]), skipped=fields["skipped"])


def _is_whole(directory: Path, facts: ShardFacts) -> bool:
    try:
        found = [file_sha256(directory / name) for name in (facts.tokens_name, facts.documents_name)]
    except OSError:
        return False
    return found == [facts.tokens_sha256, facts.documents_sha256]


def _write_shard(job: ShardJob, report: Report) -> ShardRecord:
    """Tokenizes the documents of a piece; holds a document, a buffer and 16 bytes per document."""
    tokenizer = _tokenizer(job.tokenizer, job.fingerprint)
    directory = Path(job.directory)
    facts = ShardFacts(number=job.number, num_tokens=0, num_documents=0, tokens_sha256="", documents_sha256="")
    ends, scores = array.array("Q"), array.array("Q")
    skipped: collections.Counter[str] = collections.Counter()
    tally = _Tally(report, sum(part.num_bytes for part in job.parts))
    with _Writer(directory / facts.tokens_name) as tokens:
        for part in job.parts:
            for text, num_bytes in read_documents_of(part, job.reading, skipped):
                ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eod_id))
                tokens.write(ids.astype(np.dtype(job.dtype).newbyteorder("<")).tobytes())
                tally.add(num_bytes, len(ids))
                ends.append(tally.num_tokens)
                scores.append(document_score(text))
    with _Writer(directory / facts.documents_name) as documents:
        np.save(documents, np.array([ends, scores], "<u8").reshape(2, len(ends)))
    tally.finish()
    facts = dataclasses.replace(
        facts,
        num_tokens=tally.num_tokens,
        num_documents=len(ends),
        tokens_sha256=tokens.digest.hexdigest(),
        documents_sha256=documents.digest.hexdigest(),
    )
    return ShardRecord(facts=facts, skipped=dict(sorted(skipped.items())))


class _Tally:
    """Counts what a shard has got, and reports it now and then."""

    def __init__(self, report: Report, num_bytes: int):
        self.num_tokens = 0
        self._report = report
        self._left = num_bytes
        self._new = [0, 0, 0]

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """One more document."""
        self.num_tokens += num_tokens
        self._new = [self._new[0] + num_bytes, self._new[1] + 1, self._new[2] + num_tokens]
        if self._new[0] >= _REPORT_BYTES:
            self._send(self._new[0])

    def finish(self) -> None:
        """Reports the rest; bytes that held no document are part of it."""
        self._send(self._left)

    def _send(self, num_bytes: int) -> None:
        self._left -= num_bytes
        self._report((num_bytes, *self._new[1:]))
        self._new = [0, 0, 0]


class _Writer:
    """A file that is hashed while it is written, and has its name once it is whole and on the disk."""

    def __init__(self, path: Path):
        self.digest = hashlib.sha256()
        self._path = path
        self._temporary = _temporary(path)

    def __enter__(self) -> Self:
        self._file = self._temporary.open("wb", buffering=_WRITE_BYTES)
        return self

    def write(self, content: bytes) -> int:
        """Appends to the file."""
        self.digest.update(content)
        return self._file.write(content)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is None:
            self._temporary.replace(self._path)


def _temporary(path: Path) -> Path:
    """A name that no other process writes to."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that has its name only once it is whole."""
    with _Writer(path) as file:
        file.write(content)


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str, fingerprint: str) -> Tokenizer:
    """Loaded once per process."""
    tokenizer = load_tokenizer(spec)
    if tokenizer.fingerprint != fingerprint:
        raise StoreError(f"the tokenizer {spec} was changed while the store was being written")
    return tokenizer
