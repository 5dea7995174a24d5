"""Documents out of the files that ``jaxpar data prepare`` takes, in parts that can be read on their own.

What is a part depends on the format: a range of bytes of a JSONL file (the lines that start in it), a range of row
groups of a Parquet file, of rows of a Hugging Face data set, or a whole text file.
"""

from __future__ import annotations

import bz2
import collections
import dataclasses
import functools
import gzip
import itertools
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxpar.config import ConfigError, Problem
from jaxpar.data.sources import find_files

HF_PREFIX = "hf:"
"""Patterns with this prefix name a data set that the ``datasets`` library loads: hf:NAME[:CONFIG]:SPLIT."""

_OPENERS: dict[str, Callable[[str], BinaryIO]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_ROWS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Documents that are read together."""

    path: str
    """File, or ``hf:`` name."""
    format: str
    """jsonl, parquet, text or hf."""
    start: int
    """First byte, row group or row; 0 for text."""
    stop: int
    """One after the last."""
    num_bytes: int
    """Size on disk, about."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are taken from parts."""

    field: str
    """Name of the field (JSONL) or column (Parquet, ``hf:``) that holds the text."""
    skip_invalid: bool
    """Whether records that cannot be read are left out and counted, instead of being an error."""


def find_parts(patterns: Sequence[str], file_format: str, part_bytes: int) -> list[Part]:
    """Returns the parts of every file, in the order of the documents; those of ``hf:`` names come last.

    Args:
      patterns: globs as in ``data.paths``, or ``hf:`` names.
      file_format: jsonl, parquet, text, or auto, which goes by the name of each file.
      part_bytes: parts are at most this large where the format lets them be cut.

    Raises:
      ConfigError: no file matches, a file cannot be read, or a format needs a package that is not installed.
    """
    names = [pattern for pattern in patterns if pattern.startswith(HF_PREFIX)]
    files = [pattern for pattern in patterns if not pattern.startswith(HF_PREFIX)]
    parts: list[Part] = []
    for path in find_files(files, key="data prepare") if files or not names else []:
        kind = _format_of(str(path)) if file_format == "auto" else file_format
        parts += _CUTTERS[kind](str(path), part_bytes)
    for name in names:
        parts += _hf_parts(name, part_bytes)
    return parts


def read_documents_of(part: Part, reading: Reading, skipped: collections.Counter[str]) -> Iterator[tuple[str, int]]:
    """Yields the text of each document, and the bytes that were read since the one before.

    Args:
      part: one of ``find_parts``.
      reading: how.
      skipped: counts what is left out, by reason.

    Raises:
      ConfigError: a record cannot be read; names file and line (row).
    """
    for text, num_bytes in _READERS[part.format](part, reading, skipped):
        if text:
            yield text, num_bytes
        else:
            skipped["empty"] += 1


def open_decompressed(path: str) -> BinaryIO:
    """Opens a file for reading bytes; one that is named .gz, .bz2 or .xz is decompressed."""
    return _OPENERS.get(Path(path).suffix, open)(path, "rb")


def _format_of(path: str) -> str:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _OPENERS]
    last = suffixes[-1] if suffixes else ""
    if last in _JSONL_SUFFIXES:
        return "jsonl"
    if last == ".zst" or Path(path).suffix in _OPENERS:
        remedy = "decompress it first; JSONL may be .gz, .bz2 or .xz"
        raise ConfigError(
            [Problem(key="data prepare", value=path, message="compressed in this way: not read", remedy=remedy)]
        )
    return "parquet" if last == ".parquet" else "text"


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> ConfigError:
    remedy = "make the file readable, or write patterns that leave it out"
    return ConfigError([Problem(key=path, message=f"cannot be read: {error}", remedy=remedy)])


def _ranges(num_items: int, num_ranges: int) -> list[tuple[int, int]]:
    """Cuts ``range(num_items)`` into ranges of about equal size."""
    num_ranges = max(1, min(num_ranges, num_items))
    borders = [num_items * i // num_ranges for i in range(num_ranges + 1)]
    return list(itertools.pairwise(borders))


def _text_parts(path: str, part_bytes: int) -> list[Part]:
    del part_bytes  # one file is one document
    return [Part(path=path, format="text", start=0, stop=0, num_bytes=_size_of(path))]


def _read_text(part: Part, reading: Reading, skipped: collections.Counter[str]) -> Iterator[tuple[str, int]]:
    del reading  # files that are not text are left out, as data.source = "text" leaves them out
    try:
        yield Path(part.path).read_bytes().decode("utf-8"), part.num_bytes
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
    except OSError as error:
        raise _unreadable(part.path, error) from error


def _jsonl_parts(path: str, part_bytes: int) -> list[Part]:
    size = _size_of(path)
    if Path(path).suffix in _OPENERS:
        # Cannot be read from the middle.
        return [Part(path=path, format="jsonl", start=0, stop=-1, num_bytes=size)]
    ranges = _ranges(size, math.ceil(size / part_bytes))
    return [Part(path=path, format="jsonl", start=a, stop=b, num_bytes=b - a) for a, b in ranges]


def _read_jsonl(part: Part, reading: Reading, skipped: collections.Counter[str]) -> Iterator[tuple[str, int]]:
    try:
        for line, position, num_bytes in _lines(part):
            if line.isspace():
                continue
            text = _text_of(line, reading.field)
            if isinstance(text, str):
                yield text, num_bytes
            elif reading.skip_invalid:
                skipped["invalid"] += 1
            else:
                raise _invalid(f"{part.path}:{_line_number(part.path, position)}", text.args[0])
    # What a compressed file raises when it is cut short or damaged is EOFError, zlib.error or LZMAError.
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(part.path, error) from error


def _lines(part: Part) -> Iterator[tuple[bytes, int, int]]:
    """The lines that start in a part, each with where it starts and the bytes of the file that were read for it."""
    opener = _OPENERS.get(Path(part.path).suffix)
    with open(part.path, "rb") as raw, opener(raw) if opener else raw as file:
        if part.start:
            # A line that starts before the part belongs to the part before, unless it ends exactly here.
            file.seek(part.start - 1)
            file.readline()
        position, read = file.tell(), part.start
        while (part.stop < 0 or position < part.stop) and (line := file.readline()):
            start, position = position, position + len(line)
            now = position if opener is None else raw.tell()
            yield line, start, now - read
            read = now


def _text_of(line: bytes, field: str) -> str | ValueError:
    """The text of a record, or what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        return ValueError(f"not JSON in UTF-8: {error}")
    if not isinstance(record, dict):
        return ValueError(f"a line must be a JSON object, and this is {type(record).__name__}")
    if field not in record:
        return ValueError(f'has no field "{field}", but {", ".join(map(repr, record)) or "no field at all"}')
    if not isinstance(record[field], str):
        return ValueError(f'field "{field}" is not a string, but {type(record[field]).__name__}')
    try:
        record[field].encode("utf-8")
    except UnicodeEncodeError:
        return ValueError(f'field "{field}" holds a lone surrogate, which is not text')
    return record[field]


def _line_number(path: str, position: int) -> int:
    with open_decompressed(path) as file:
        return 1 + sum(file.read(min(2**20, position - at)).count(b"\n") for at in range(0, position, 2**20))


def _invalid(where: str, message: str) -> ConfigError:
    remedy = "mend the record, choose the field with --field, or leave such records out with --skip-invalid"
    return ConfigError([Problem(key=where, message=message, remedy=remedy)])


def _parquet_file(path: str) -> object:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        remedy = "pip install 'jaxpar[parquet]'"
        raise ConfigError([Problem(key=path, message="Parquet needs the package pyarrow", remedy=remedy)]) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _parquet_parts(path: str, part_bytes: int) -> list[Part]:
    metadata = _parquet_file(path).metadata
    parts: list[Part] = []
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    first, size = 0, 0
    for i, group in enumerate(sizes):
        size += group
        if size >= part_bytes or i + 1 == len(sizes):
            parts.append(Part(path=path, format="parquet", start=first, stop=i + 1, num_bytes=size))
            first, size = i + 1, 0
    return parts


def _read_parquet(part: Part, reading: Reading, skipped: collections.Counter[str]) -> Iterator[tuple[str, int]]:
    file = _parquet_file(part.path)
    names = list(file.schema_arrow.names)
    if reading.field not in names:
        message = f'has no column "{reading.field}", but {", ".join(map(repr, names))}'
        raise ConfigError([Problem(key=part.path, message=message, remedy="choose the column with --field")])
    groups = list(range(part.start, part.stop))
    num_rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    batches = file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=groups, columns=[reading.field])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    return _rows(texts, num_rows, part, reading, skipped)


@functools.lru_cache(maxsize=1)
def _hf_dataset(name: str) -> object:
    words = name.removeprefix(HF_PREFIX).split(":")
    if len(words) not in (2, 3) or not all(words):
        remedy = "write hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, e.g. hf:wikitext:wikitext-2-raw-v1:train"
        raise ConfigError([Problem(key="data prepare", value=name, message="names no data set", remedy=remedy)])
    try:
        import datasets
    except ModuleNotFoundError:
        remedy = "pip install 'jaxpar[hf]'"
        raise ConfigError([Problem(key=name, message="needs the package datasets", remedy=remedy)]) from None
    try:
        return datasets.load_dataset(*words[:-1], split=words[-1])
    # The library raises many kinds for a name, configuration or split that does not exist, or no network.
    except Exception as error:
        remedy = "check the name, the configuration and the split"
        raise ConfigError([Problem(key=name, message=f"cannot be loaded: {error}", remedy=remedy)]) from error


def _hf_parts(name: str, part_bytes: int) -> list[Part]:
    dataset = _hf_dataset(name)
    size, num_rows = dataset.data.nbytes, len(dataset)
    ranges = _ranges(num_rows, math.ceil(size / part_bytes))
    return [
        Part(path=name, format="hf", start=a, stop=b, num_bytes=size * (b - a) // max(1, num_rows)) for a, b in ranges
    ]


def _read_hf(part: Part, reading: Reading, skipped: collections.Counter[str]) -> Iterator[tuple[str, int]]:
    dataset = _hf_dataset(part.path)
    if reading.field not in dataset.column_names:
        message = f'has no column "{reading.field}", but {", ".join(map(repr, dataset.column_names))}'
        raise ConfigError([Problem(key=part.path, message=message, remedy="choose the column with --field")])
    starts = range(part.start, part.stop, _ROWS_AT_A_TIME)
    texts = (text for at in starts for text in dataset[at : min(at + _ROWS_AT_A_TIME, part.stop)][reading.field])
    return _rows(texts, part.stop - part.start, part, reading, skipped)


def _rows(
    texts: Iterator[object], num_rows: int, part: Part, reading: Reading, skipped: collections.Counter[str]
) -> Iterator[tuple[str, int]]:
    """Texts of a column; those that are null or no strings are invalid."""
    for i, text in enumerate(texts):
        if isinstance(text, str):
            yield text, part.num_bytes // num_rows
        elif reading.skip_invalid:
            skipped["invalid"] += 1
        else:
            kind = "null" if text is None else f"of type {type(text).__name__}"
            raise _invalid(f"{part.path}, row {i} of part {part.start}", f'"{reading.field}" is {kind}, not a string')


_CUTTERS = {"jsonl": _jsonl_parts, "parquet": _parquet_parts, "text": _text_parts}
_READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text, "hf": _read_hf}
