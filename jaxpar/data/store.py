"""The token store: tokenized documents on disk, in shards that are read by memory map. What ``jaxpar data`` makes.

A store is a directory:

- ``manifest.json``: format version, counts, dtype, tokenizer, sources, and of each shard the counts and checksums;
- ``tokens-00000.bin``: the tokens of a shard's documents one after the other, little-endian, each document ended by the
  end-of-document id;
- ``documents-00000.npy``: uint64 ``[2, num_documents]``: where each document ends in the shard's tokens, and the hash
  of its text that decides the validation split (``jaxpar.data.split``);
- ``sources.jsonl``: every input file with its size.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.data.packing import Shard

FORMAT = "jaxpar token store"
FORMAT_VERSION = 1
MANIFEST, SOURCES = "manifest.json", "sources.jsonl"

_CHUNK_BYTES = 2**22


class StoreError(RuntimeError):
    """A store is damaged, or could not be written; the message names the shard and what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """What the manifest says of one shard."""

    number: int
    num_tokens: int
    """End-of-document tokens included."""
    num_documents: int
    tokens_sha256: str
    """Of the whole file, like the next."""
    documents_sha256: str

    @property
    def tokens_name(self) -> str:
        """File of the tokens."""
        return f"tokens-{self.number:05}.bin"

    @property
    def documents_name(self) -> str:
        """File of the documents' ends and hashes."""
        return f"documents-{self.number:05}.npy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store holds and what it was made from."""

    format: str = FORMAT
    version: int = FORMAT_VERSION
    dtype: str
    """Of the tokens: uint16 or uint32."""
    num_tokens: int
    num_documents: int
    content: str
    """Hash of all shards in order: equal for stores with the same tokens, documents and shards."""
    tokenizer: Mapping[str, str | int]
    """name as it was given, fingerprint, vocab_size, eod_id."""
    sources: Mapping[str, object]
    """patterns as they were given, field, num_files, num_bytes, and the checksum of ``sources.jsonl``."""
    skipped: Mapping[str, int]
    """Records that were left out, by reason."""
    shards: tuple[ShardFacts, ...]

    def to_json(self) -> str:
        """As the file has it."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def token_dtype(vocab_size: int) -> str:
    """Returns the smallest of uint16 and uint32 that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def content_hash(shards: Sequence[ShardFacts]) -> str:
    """Returns the hash of ``Manifest.content``."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.tokens_sha256} {shard.documents_sha256}\n".encode())
    return digest.hexdigest()


def read_manifest(directory: str | Path, *, key: str = "data.paths") -> Manifest:
    """Returns what a store says of itself; reads nothing else.

    Args:
      directory: the store.
      key: what named it, for errors.

    Raises:
      ConfigError: there is no store, or one of a later format.
      StoreError: the manifest is damaged.
    """
    path = Path(directory) / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        unfinished = Path(f"{Path(directory)}.partial").is_dir()
        message = f"is not a token store: {MANIFEST}: {error.strerror or error} (working directory: {Path.cwd()})"
        remedy = (
            "it is unfinished: repeat the `jaxpar data prepare` command that began it, which goes on where it stopped"
            if unfinished
            else "name a directory that `jaxpar data prepare` has written"
        )
        raise ConfigError([Problem(key=key, value=str(directory), message=message, remedy=remedy)]) from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        message, remedy = f"{path} is not the manifest of a token store", "name a store of `jaxpar data prepare`"
        raise ConfigError([Problem(key=key, value=str(directory), message=message, remedy=remedy)])
    if fields["version"] != FORMAT_VERSION:
        message = f"has format version {fields['version']}, and this jaxpar reads version {FORMAT_VERSION}"
        remedy = "use the jaxpar that wrote it, or prepare the data again"
        raise ConfigError([Problem(key=key, value=str(directory), message=message, remedy=remedy)])
    try:
        shards = tuple(ShardFacts(**shard) for shard in fields.pop("shards"))
        manifest = Manifest(**fields, shards=shards)
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    _check_sums(path, manifest)
    return manifest


def open_shards(directory: str | Path, manifest: Manifest) -> list[Shard]:
    """Maps every shard that has documents; reads only the headers.

    Raises:
      StoreError: a file is missing, or not as long as the manifest says.
    """
    return [_open_shard(Path(directory), shard, manifest.dtype) for shard in manifest.shards if shard.num_documents]


def damaged_parts(
    directory: str | Path, manifest: Manifest, *, num_threads: int = 4, advance: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """Yields, for each damaged file, its name and what is wrong with it: recomputes every checksum.

    Args:
      directory: the store.
      manifest: of that store.
      num_threads: files that are read at a time.
      advance: is told of bytes that have been read.
    """
    directory = Path(directory)
    files = {SOURCES: str(manifest.sources["sha256"])}
    for shard in manifest.shards:
        files |= {shard.tokens_name: shard.tokens_sha256, shard.documents_name: shard.documents_sha256}
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        found = threads.map(lambda name: _damage(directory / name, files[name], advance), files)
        yield from (f"{name}: {why}" for name, why in zip(files, found, strict=True) if why)


def file_sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Returns the SHA-256 of a file; ``advance`` is told of bytes that have been read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _damage(path: Path, expected: str, advance: Callable[[int], None]) -> str | None:
    try:
        found = file_sha256(path, advance)
    except OSError as error:
        return str(error.strerror or error)
    return None if found == expected else f"checksum {found[:12]}..., and the manifest says {expected[:12]}..."


def _check_sums(path: Path, manifest: Manifest) -> None:
    facts = {
        "num_tokens": sum(shard.num_tokens for shard in manifest.shards),
        "num_documents": sum(shard.num_documents for shard in manifest.shards),
        "content": content_hash(manifest.shards),
    }
    for name, value in facts.items():
        if getattr(manifest, name) != value:
            raise StoreError(f"{path} is damaged: {name} is {getattr(manifest, name)}, and its shards make {value}")


def _open_shard(directory: Path, facts: ShardFacts, dtype: str) -> Shard:
    path = directory / facts.tokens_name
    try:
        tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
        path = directory / facts.documents_name
        documents = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {error}; `jaxpar data verify {directory}` checks the whole store") from error
    path = directory / facts.tokens_name
    if len(tokens) != facts.num_tokens or documents.shape != (2, facts.num_documents):
        raise StoreError(
            f"{path} has {len(tokens):,} tokens in {documents.shape[-1]:,} documents, and the manifest says "
            f"{facts.num_tokens:,} in {facts.num_documents:,}"
        )
    return Shard(tokens=tokens, ends=documents[0].view(np.int64), scores=documents[1])
