"""From messages to the text of a conversation, as the files of a tokenizer say it is written."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxpar.config import ConfigError, Problem

CHATML = "chatml"
"""``data.chat_template`` for the built-in format: <|im_start|>ROLE, a line break, the content, <|im_end|>."""

_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """A template cannot be applied to a conversation; the message says why."""


class ChatTemplate(Protocol):
    """How conversations are written."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: object = None) -> str:
        """Returns the text of ``messages``, up to where an answer begins if ``add_generation_prompt``.

        Raises:
          TemplateError: the template refuses the messages.
        """
        ...


def find_chat_template(spec: str | None, tokenizer: str) -> ChatTemplate | None:
    """Returns the template that a config names, or else that beside the tokenizer; None if there is none.

    Args:
      spec: ``data.chat_template``: "chatml", the path of a Jinja template, or None to look for chat_template.jinja and
        tokenizer_config.json in the directory of the tokenizer.
      tokenizer: ``data.tokenizer``.

    Raises:
      ConfigError: a file cannot be read, a template is malformed, or the package jinja2 is not installed.
    """
    if spec == CHATML:
        return _chatml
    beside = Path(tokenizer).parent if tokenizer != "bytes" else None
    settings = _tokenizer_settings(beside / _CONFIG_FILE) if beside else {}
    if spec is not None:
        return _compiled(_read(Path(spec)), settings, spec)
    if beside is not None and (beside / _TEMPLATE_FILE).is_file():
        return _compiled(_read(beside / _TEMPLATE_FILE), settings, str(beside / _TEMPLATE_FILE))
    text = _template_of(settings)
    return None if text is None else _compiled(text, settings, str(beside / _CONFIG_FILE))


def where_templates_are(tokenizer: str) -> str:
    """Returns where ``find_chat_template`` looks, in words."""
    if tokenizer == "bytes":
        return 'the "bytes" tokenizer has none'
    return f"looked for {_TEMPLATE_FILE} and {_CONFIG_FILE} in {Path(tokenizer).parent}"


def _chatml(messages: Sequence[Message], *, add_generation_prompt: bool, tools: object = None) -> str:
    if tools is not None:
        raise TemplateError("chatml has no place for tools")
    for message in messages:
        if not isinstance(message["content"], str):
            raise TemplateError(
                f"chatml takes text, and the content of a message is {type(message['content']).__name__}"
            )
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@dataclasses.dataclass(frozen=True)
class _JinjaTemplate:
    """A template of the ``jinja2`` package."""

    template: Any
    error: type[Exception]
    special_tokens: Mapping[str, str]

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: object = None) -> str:
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        # Templates index and compare what they are given; what does not fit comes out as any of these.
        except (self.error, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template says: {error}") from error


def _compiled(text: str, settings: Mapping[str, Any], source: str) -> ChatTemplate:
    """The template in the environment that Hugging Face transformers gives it (``_compile_jinja_template``)."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError:
        remedy = f"pip install 'jaxpar[sft]', or set data.chat_template = \"{CHATML}\" if that is the format"
        problem = Problem(key="data.chat_template", value=source, message="needs the package jinja2", remedy=remedy)
        raise ConfigError([problem]) from None

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks answers for transformers; here it is the text inside."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    # Not strftime_now: the rows of a run must not depend on the day. Templates that use it have a date for its absence.
    try:
        template = environment.from_string(text)
    except jinja2.exceptions.TemplateError as error:
        remedy = "give a template that transformers can use"
        problem = Problem(key="data.chat_template", value=source, message=f"is malformed: {error}", remedy=remedy)
        raise ConfigError([problem]) from error
    return _JinjaTemplate(template, jinja2.exceptions.TemplateError, _special_tokens(settings))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like; a token is its text, or a table with the text as content."""
    tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_of(settings: Mapping[str, Any]) -> str | None:
    """chat_template of tokenizer_config.json: one, or several by name."""
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}.get("default")
    return templates


def _tokenizer_settings(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(_read(path))
    except ValueError as error:
        problem = Problem(key=str(path), message=f"is not JSON: {error}", remedy="mend or remove the file")
        raise ConfigError([problem]) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = f'give the path of a Jinja template, or "{CHATML}"'
        problem = Problem(key="data.chat_template", value=str(path), message=f"cannot be read: {error}", remedy=remedy)
        raise ConfigError([problem]) from error
