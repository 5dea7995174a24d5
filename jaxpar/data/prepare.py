"""Files of documents -> a token store, by several processes, resumable after a kill, never overwriting.

The input is cut into pieces by a plan that depends on the files and the shard size alone; each piece becomes one shard.
So the store is the same, byte for byte, whatever the number of workers and however often the work was interrupted.

While it is being written the store is ``OUT.partial``. A shard counts as done once its record is in
``OUT.partial/.progress``; records are written last, and a resumed run recomputes the checksums they hold. The finished
directory is renamed to ``OUT``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from jaxpar.config import ConfigError, Problem
from jaxpar.data.records import HF_PREFIX, Part, Reading, find_parts
from jaxpar.data.shard_job import PROGRESS_DIR, ShardJob, ShardRecord, shard_of, write_whole
from jaxpar.data.store import (
    FORMAT_VERSION,
    MANIFEST,
    SOURCES,
    Manifest,
    StoreError,
    content_hash,
    token_dtype,
)
from jaxpar.data.tokenizers import Tokenizer, load_tokenizer
from jaxpar.data.workers import WorkerDied, run_jobs

SHARD_BYTES = 2**28
"""Input bytes per shard unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be prepared."""

    patterns: tuple[str, ...]
    """Globs, or ``hf:`` names."""
    out: Path
    """Directory of the store; must not exist."""
    tokenizer: str = "bytes"
    """As ``data.tokenizer``."""
    format: str = "auto"
    """jsonl, parquet, text, or auto: by the name of each file."""
    field: str = "text"
    """Field or column of the text."""
    skip_invalid: bool = False
    """Leave out, and count, records that cannot be read."""
    shard_bytes: int = SHARD_BYTES
    """Input bytes per shard, about."""


class Progress(Protocol):
    """Is told how far the work has come."""

    def start(self, num_shards: int, num_bytes: int) -> None:
        """The plan is made: shards and input bytes in all."""

    def advance(self, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """So much more is done."""

    def shard(self, kept: bool) -> None:
        """One more shard is done; ``kept`` if an earlier run had finished it and its checksums are right."""


def prepare(request: Request, *, num_workers: int, progress: Progress) -> Manifest:
    """Writes the store, or goes on where an earlier run of the same request stopped.

    Args:
      request: what to prepare.
      num_workers: processes.
      progress: is told how far the work has come.

    Returns:
      The manifest of the finished store.

    Raises:
      ConfigError: the store exists, an unfinished one was begun from other input, another process works on it, or an
        input cannot be read.
      StoreError: it cannot be written, or a worker died. What is finished is kept.
    """
    out = request.out
    if out.exists():
        message, remedy = "exists, and is never overwritten", "name another directory, or remove it"
        raise ConfigError([Problem(key="--out", value=str(out), message=message, remedy=remedy)])
    tokenizer = load_tokenizer(request.tokenizer)
    parts = find_parts(request.patterns, request.format, request.shard_bytes)
    pieces = _pieces(parts, request.shard_bytes)
    partial = out.with_name(f"{out.name}.partial")
    jobs = _jobs(pieces, request, tokenizer, partial)
    progress.start(len(jobs), sum(part.num_bytes for part in parts))
    with _writing(partial), _locked(partial):
        _begin(partial, _plan(request, tokenizer, parts))
        records: dict[int, ShardRecord] = {}
        work = run_jobs(shard_of, jobs, num_workers=num_workers, report=lambda message: _tell(progress, message))
        with contextlib.closing(work):
            for number, (record, kept) in work:
                records[number] = record
                progress.shard(kept)
        manifest = _finish(partial, request, tokenizer, parts, [records[number] for number in range(len(jobs))])
        partial.rename(out)
    shutil.rmtree(out / PROGRESS_DIR)
    return manifest


def _pieces(parts: Sequence[Part], shard_bytes: int) -> list[tuple[Part, ...]]:
    """Groups neighbouring parts so that each group has at most ``shard_bytes``, or one part."""
    pieces: list[list[Part]] = []
    size = 0
    for part in parts:
        if not pieces or size + part.num_bytes > shard_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(part)
        size += part.num_bytes
    return [tuple(piece) for piece in pieces]


def _jobs(pieces: Sequence[tuple[Part, ...]], request: Request, tokenizer: Tokenizer, partial: Path) -> list[ShardJob]:
    return [
        ShardJob(
            number=number,
            directory=str(partial),
            parts=piece,
            reading=Reading(field=request.field, skip_invalid=request.skip_invalid),
            tokenizer=request.tokenizer,
            fingerprint=tokenizer.fingerprint,
            dtype=token_dtype(tokenizer.vocab_size),
        )
        for number, piece in enumerate(pieces)
    ]


@contextlib.contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Says of what goes wrong on the machine that nothing is lost."""
    try:
        (partial / PROGRESS_DIR).mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, WorkerDied) as error:
        hint = ", for want of memory perhaps: fewer --workers need less" if isinstance(error, WorkerDied) else ""
        raise StoreError(f"{error}{hint}; finished shards are kept in {partial}: the same command goes on") from error


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keeps a second process from writing the same store; the kernel drops the lock of a process that dies."""
    with (partial / PROGRESS_DIR / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message, remedy = "another process is writing it", "wait for that process, or stop it"
            raise ConfigError([Problem(key="--out", value=str(partial), message=message, remedy=remedy)]) from None
        except OSError:
            pass  # a file system without locks (some network mounts)
        yield


def _plan(request: Request, tokenizer: Tokenizer, parts: Sequence[Part]) -> dict[str, object]:
    """What must not change between an interrupted run and the one that goes on."""
    files = {}
    for path in dict.fromkeys(part.path for part in parts if not part.path.startswith(HF_PREFIX)):
        facts = os.stat(path)
        files[path] = [facts.st_size, facts.st_mtime_ns]
    return {
        "version": FORMAT_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "field": request.field,
        "skip_invalid": request.skip_invalid,
        "shard_bytes": request.shard_bytes,
        "files": files,
        "parts": [list(dataclasses.astuple(part)) for part in parts],
    }


def _begin(partial: Path, plan: dict[str, object]) -> None:
    """Writes the plan down, or checks that it is the one that was begun."""
    path = partial / PROGRESS_DIR / "plan.json"
    if not path.exists():
        write_whole(path, json.dumps(plan).encode())
        return
    begun = json.loads(path.read_bytes())
    changed = [name for name in plan if name != "parts" and plan[name] != begun.get(name)]
    if "files" in changed:
        before, now = begun["files"], plan["files"]
        changed += [path for path in before | now if before.get(path) != now.get(path)][:3]
    finished = [entry for entry in (partial / PROGRESS_DIR).glob("*.json") if entry != path]
    if begun != plan and not finished:  # nothing is lost by beginning with the new input
        write_whole(path, json.dumps(plan).encode())
    elif begun != plan:
        message = f"was begun from other input; changed: {', '.join(changed) or 'parts'}"
        remedy = f"give the same input again, or name another --out, or remove {partial}"
        raise ConfigError([Problem(key="--out", value=str(partial), message=message, remedy=remedy)])


def _tell(progress: Progress, message: tuple[int, int, int]) -> None:
    progress.advance(*message)


def _finish(
    partial: Path, request: Request, tokenizer: Tokenizer, parts: Sequence[Part], records: Sequence[ShardRecord]
) -> Manifest:
    """Writes sources and manifest, and removes what interrupted runs have left."""
    skipped = sum((collections.Counter(record.skipped) for record in records), collections.Counter())
    shards = tuple(record.facts for record in records)
    num_documents = sum(shard.num_documents for shard in shards)
    if not num_documents:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        message, remedy = f"no document has text ({left_out or 'no record'})", "check the files and --field"
        raise ConfigError([Problem(key="data prepare", value=request.patterns, message=message, remedy=remedy)])
    sizes: dict[str, int] = collections.defaultdict(int)
    for part in parts:
        sizes[part.path] += part.num_bytes
    listing = "".join(json.dumps({"path": path, "bytes": size}) + "\n" for path, size in sizes.items()).encode()
    for leftover in partial.glob("*.tmp"):
        leftover.unlink()
    write_whole(partial / SOURCES, listing)
    manifest = Manifest(
        dtype=token_dtype(tokenizer.vocab_size),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=num_documents,
        content=content_hash(shards),
        tokenizer={
            "name": request.tokenizer,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        sources={
            "patterns": list(request.patterns),
            "field": request.field,
            "num_files": len(sizes),
            "num_bytes": sum(sizes.values()),
            "sha256": hashlib.sha256(listing).hexdigest(),
        },
        skipped=dict(sorted(skipped.items())),
        shards=shards,
    )
    write_whole(partial / MANIFEST, manifest.to_json().encode())
    return manifest
