"""Supervised fine-tuning: conversations to training and validation rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.config.schema import DataConfig
from jaxpar.data.chat_template import find_chat_template, where_templates_are
from jaxpar.data.conversations import Example, RecordError, encode_record, invalid_record, read_records
from jaxpar.data.packing import Shard, concatenate_documents
from jaxpar.data.record_rows import RecordRows
from jaxpar.data.rows import Datasets, TokenDataset
from jaxpar.data.sources import find_files
from jaxpar.data.split import document_scores, held_out
from jaxpar.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Examples:
    """Records as tokens."""

    examples: list[Example]
    texts: list[str]
    """Of each the record as canonical JSON, which decides the side of the validation split."""
    num_cut: int
    """Records longer than a row, which were left out or cut."""


def load_sft(config: DataConfig, tokenizer: Tokenizer) -> Datasets:
    """Reads, tokenizes, splits and packs the records of ``data.paths``, in memory.

    Raises:
      ConfigError: no file matches, a record is malformed or too long, or messages have no chat template.
    """
    found = _read(config, tokenizer)
    shard = concatenate_documents([example.tokens for example in found.examples])
    trained = np.concatenate([example.trained for example in found.examples])
    shard = dataclasses.replace(shard, trained=trained)
    mask = held_out(document_scores(found.texts), config.validation_fraction)
    train, validation = (_dataset(shard, np.flatnonzero(side), config, tokenizer) for side in (~mask, mask))
    fill = train.rows.num_pairs / (len(train) * config.seq_len)
    notes = [
        f"sft: {len(found.texts):,} records, {len(shard.tokens):,} tokens, {trained.mean():.0%} of them in responses; "
        f"{len(train):,} training rows, {fill:.0%} full"
    ]
    if found.num_cut:
        what = {"drop": "are left out", "truncate": "are cut at the end of a row"}[config.too_long]
        notes.append(f"{found.num_cut:,} records are longer than data.seq_len = {config.seq_len} and {what}")
    if mask.any():
        notes.append(f"validation: {mask.sum():,} of {len(found.texts):,} records, {len(validation):,} rows")
    return Datasets(
        train=train,
        validation=validation if mask.any() else None,
        vocab_size_of_tokenizer=tokenizer.vocab_size,
        num_documents=len(found.texts),
        num_tokens=len(shard.tokens),
        notes=notes,
    )


def _read(config: DataConfig, tokenizer: Tokenizer) -> _Examples:
    # Looked for where messages need it: one beside the tokenizer may need a package that prompts and responses do not.
    find = functools.cache(functools.partial(find_chat_template, config.chat_template, config.tokenizer))
    if config.chat_template is not None:
        find()
    examples, texts, too_long = [], [], []
    for path in find_files(config.paths):
        for where, record in read_records(str(path)):
            try:
                template = find() if "messages" in record else None
                if "messages" in record and template is None:
                    raise _no_template(where, config)
                example = encode_record(record, tokenizer, template)
            except RecordError as error:
                raise invalid_record(where, str(error)) from error
            if len(example.tokens) > config.seq_len + 1:
                too_long.append((where, len(example.tokens)))
                example = _cut(example, config)
            if example is not None:
                examples.append(example)
                texts.append(json.dumps(record, sort_keys=True, ensure_ascii=False))
    if too_long and config.too_long == "error":
        raise _too_long(too_long, len(examples) + len(too_long), config)
    if not examples:
        message = f"{len(too_long)} of the records are longer than a row" if too_long else "there is no record"
        raise ConfigError([Problem(key="data.paths", value=config.paths, message=message, remedy="give JSONL records")])
    return _Examples(examples=examples, texts=texts, num_cut=len(too_long))


def _cut(example: Example, config: DataConfig) -> Example | None:
    """The part of a record that fits in a row; None if nothing of that is trained on, or it is not wanted."""
    length = config.seq_len + 1
    if config.too_long != "truncate" or not example.trained[1:length].any():
        return None
    return Example(example.tokens[:length], example.trained[:length])


def _too_long(too_long: Sequence[tuple[str, int]], num_records: int, config: DataConfig) -> ConfigError:
    where, longest = max(too_long, key=lambda record: record[1])
    message = (
        f"{len(too_long):,} of {num_records:,} records are longer than a row of {config.seq_len} pairs; the longest, "
        f"{where}, has {longest - 1:,}"
    )
    remedy = f'raise data.seq_len to {longest - 1}, or set data.too_long = "drop" or "truncate"'
    return ConfigError([Problem(key="data.seq_len", value=config.seq_len, message=message, remedy=remedy)])


def _no_template(where: str, config: DataConfig) -> ConfigError:
    message = f"{where} has messages, and there is no chat template ({where_templates_are(config.tokenizer)})"
    remedy = 'set data.chat_template to the path of a Jinja template, or to "chatml"'
    return ConfigError([Problem(key="data.chat_template", message=message, remedy=remedy)])


def _dataset(shard: Shard, records: np.ndarray, config: DataConfig, tokenizer: Tokenizer) -> TokenDataset:
    content = hashlib.sha256(records.astype("<i8").tobytes())
    for array, dtype in ((shard.ends, "<i8"), (shard.tokens, "<i4"), (shard.trained, "?")):
        content.update(array.astype(dtype, copy=False))
    identity = {
        "source": "sft 1",
        "content": content.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "pack": config.pack,
        "seq_len": config.seq_len,
    }
    return TokenDataset(RecordRows(shard, records, config.seq_len, pack=config.pack), identity)
