"""Records of prompts and responses, or of messages, to tokens of which only the responses are trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.config import ConfigError, Problem
from jaxpar.data.chat_template import ChatTemplate, TemplateError
from jaxpar.data.records import open_decompressed
from jaxpar.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A record as tokens."""

    tokens: np.ndarray
    """int32 ``[n]``."""
    trained: np.ndarray
    """Whether each token is trained on as a label, bool ``[n]``."""


class RecordError(ValueError):
    """What is wrong with a record."""


def read_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where each record of a JSONL file stands, as FILE:LINE, and the record.

    Raises:
      ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        with open_decompressed(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield f"{path}:{number}", _record(line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        problem = Problem(key="data.paths", value=path, message=f"cannot be read: {error}", remedy="give JSONL files")
        raise ConfigError([problem]) from error


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise invalid_record(where, f"not JSON in UTF-8: {error}") from error
    if not isinstance(record, dict):
        raise invalid_record(where, f"a line must be a JSON object, and this is {type(record).__name__}")
    return record


def invalid_record(where: str, message: str) -> ConfigError:
    """Returns the error of a record."""
    remedy = 'write {"prompt": "...", "response": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'
    return ConfigError([Problem(key=where, message=message, remedy=remedy)])


def encode_record(record: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None) -> Example:
    """Returns the tokens of a record.

    ``{"prompt", "response"}``: the two are tokenized each on its own, as they are when the model answers a prompt, and
    the response is ended by the end-of-document id. ``{"messages"}``: the text of the template, tokenized as a whole;
    what it adds for each message of the role "assistant" is trained on, the end of the turn included.

    Args:
      record: one JSON object.
      tokenizer: of the model.
      template: for messages; None if there is none.

    Raises:
      RecordError: the record is neither, the template refuses it, or no label of it would be trained on.
    """
    if "messages" in record:
        if template is None:
            raise RecordError("has messages, and there is no chat template")
        example = _encode_messages(record, tokenizer, template)
    elif "prompt" in record and "response" in record:
        example = _encode_pair(record["prompt"], record["response"], tokenizer)
    else:
        raise RecordError(f"has neither prompt and response nor messages, but {', '.join(map(repr, record))}")
    if not example.trained[1:].any():
        raise RecordError("has no response, so nothing in it would be trained on")
    return example


def _encode_pair(prompt: object, response: object, tokenizer: Tokenizer) -> Example:
    for name, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str):
            raise RecordError(f"{name} is not a string, but {type(text).__name__}")
    if not response:
        raise RecordError("response is empty")
    asked, answered = tokenizer.encode(prompt), tokenizer.encode(response)
    tokens = np.concatenate([asked, answered, [tokenizer.eod_id]]).astype(np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(asked))


def _encode_messages(record: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate) -> Example:
    messages = record["messages"]
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not all({"role", "content"} <= message.keys() for message in messages):
        raise RecordError("messages is not a list of objects with role and content")
    try:
        text, spans = _text_and_answers(messages, record.get("tools"), template)
    except TemplateError as error:
        raise RecordError(str(error)) from error
    tokens, starts = tokenizer.encode_with_starts(text)
    trained = np.zeros(len(tokens), bool)
    for start, stop in spans:
        # A token that began before the answer was part of the prompt when the model answered.
        trained |= (starts >= start) & (starts < stop)
    return Example(tokens, trained)


def _text_and_answers(
    messages: Sequence[Mapping[str, Any]], tools: object, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """The whole text, and where the answers are in it: between the prompt for one and the text that has it."""
    text = template(messages, add_generation_prompt=False, tools=tools)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template(messages[:i], add_generation_prompt=True, tools=tools)
        answered = template(messages[: i + 1], add_generation_prompt=False, tools=tools)
        if not answered.startswith(prompt) or not text.startswith(answered):
            raise RecordError(
                f"the chat template writes the messages up to number {i + 1} in another way when more follow, so the "
                "answer has no place of its own: make a record of its own for each answer"
            )
        spans.append((len(prompt), len(answered)))
    return text, spans
