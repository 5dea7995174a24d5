"""Text to token ids: raw bytes, or any Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as HuggingFaceBackend

from jaxpar.config import ConfigError, Problem

# In this order: the tokenizer of a chat model has an end of document and an end of turn; the document's comes first.
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
)
"""Names under which the special tokens of a tokenizer.json are searched for the end-of-document id."""


class Tokenizer(Protocol):
    """What the data pipeline needs from a tokenizer."""

    vocab_size: int
    """Every id is below this."""
    eod_id: int
    """Id that ends each document; the pipeline appends it, ``encode`` does not."""
    fingerprint: str
    """Stable hash of everything that decides the ids; equal tokenizers have equal fingerprints on every machine."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of ``text``, int32 ``[n]``, with no special token added."""
        ...

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of ``text`` and the character of it where each begins, int32 and int64 ``[n]``."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids``; ids of special tokens have none."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte (0 to 255), and 256 for the end of a document."""

    vocab_size = 257
    eod_id = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of ``text``, int32 ``[n]``."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the UTF-8 bytes of ``text`` and the character of each, int32 and int64 ``[n]``."""
        num_bytes = [len(character.encode("utf-8")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), num_bytes)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids`` without end-of-document ids; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < self.eod_id].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    Ids are those of ``tokenizer(text, add_special_tokens=False)`` in transformers. Truncation and padding that the file
    may ask for are turned off: a document is never cut.
    """

    def __init__(self, backend: HuggingFaceBackend, eod_id: int, fingerprint: str):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Not the number of tokens: added tokens may leave gaps in the ids.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod_id = eod_id
        self.fingerprint = fingerprint

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of ``text``, int32 ``[n]``."""
        # The same ids as encode, but without their places in the text: a quarter less time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32)

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of ``text`` and the character of it where each begins, int32 and int64 ``[n]``."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.asarray(encoding.ids, np.int32), starts

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ``ids`` without special tokens."""
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that ``data.tokenizer`` names.

    Args:
      spec: "bytes", or the path of a ``tokenizer.json``, relative to the working directory.

    Raises:
      ConfigError: the file is missing or invalid, or has no end-of-document token.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        raise _tokenizer_error(spec, "is a directory", f"give the file itself: {path / 'tokenizer.json'}")
    if not path.is_file():
        message = f"no such file (working directory: {Path.cwd()})"
        raise _tokenizer_error(spec, message, 'write "bytes", or the path of an existing tokenizer.json')
    try:
        text = path.read_text(encoding="utf-8")
        definition = json.loads(text)
        backend = HuggingFaceBackend.from_str(text)
    # The library raises bare Exception for a file it cannot use.
    except Exception as error:
        remedy = "give a tokenizer.json as saved by the tokenizers library (tokenizer.save) or by transformers"
        raise _tokenizer_error(spec, f"is not a valid tokenizer.json: {error}", remedy) from error
    # Truncation and padding do not decide ids here, and the same tokenizer is saved with and without them.
    meaning = {key: value for key, value in definition.items() if key not in ("truncation", "padding")}
    fingerprint = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
    return HuggingFaceTokenizer(backend, _end_of_document_id(spec, backend), fingerprint)


def _end_of_document_id(spec: str, backend: HuggingFaceBackend) -> int:
    special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    for name in END_OF_DOCUMENT_NAMES:
        if name in special:
            return special[name]
    looked_for = ", ".join(END_OF_DOCUMENT_NAMES)
    found = ", ".join(sorted(special)) or "none"
    raise _tokenizer_error(
        spec,
        f"has no end-of-document token. Looked for {looked_for} among its special tokens, which are: {found}",
        'add one of these names as a special token, or use "bytes"',
    )


def _tokenizer_error(spec: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="data.tokenizer", value=spec, message=message, remedy=remedy)])
