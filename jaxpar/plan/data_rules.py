"""Rules of the data sources that take more than paths."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.config.schema import TOKENIZED_SOURCES
from jaxpar.plan.facts import Facts


def weights_match_paths(facts: Facts) -> Iterator[Problem]:
    """Every path of a mixture has a weight."""
    data = facts.config.data
    if data.weights and data.source not in TOKENIZED_SOURCES:
        yield Problem(
            key="data.weights",
            value=data.weights,
            message=f'data.source = "{data.source}" cannot be mixed',
            remedy='prepare stores with `jaxpar data prepare` and set data.source="store", or remove data.weights',
        )
    elif data.weights and len(data.weights) != len(data.paths):
        yield Problem(
            key="data.weights",
            value=data.weights,
            message=f"{len(data.weights)} weights do not match {len(data.paths)} data.paths",
            remedy="give one weight for each path, or none at all",
        )


def end_of_document_known(facts: Facts) -> Iterator[Problem]:
    """Files of token ids are cut into documents by an id that somebody has to give."""
    data = facts.config.data
    if data.source == "tokens" and data.eod_id is None and data.tokenizer == "bytes":
        yield Problem(
            key="data.eod_id",
            message='data.source = "tokens" needs the id that ends each document',
            remedy="set data.eod_id, or data.tokenizer to the tokenizer.json that made the ids",
        )
    if data.source != "tokens" and data.eod_id is not None:
        yield Problem(
            key="data.eod_id",
            value=data.eod_id,
            message=f'data.source = "{data.source}" has an end-of-document id of its own',
            remedy='remove data.eod_id; it is for data.source = "tokens"',
        )


def chat_template_is_used(facts: Facts) -> Iterator[Problem]:
    """Only fine-tuning writes conversations."""
    data = facts.config.data
    if data.chat_template is not None and data.source != "sft":
        yield Problem(
            key="data.chat_template",
            value=data.chat_template,
            message=f'data.source = "{data.source}" has no conversations to write',
            remedy='set data.source="sft", or remove data.chat_template',
        )
