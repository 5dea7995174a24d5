"""Rules of the data sources that take more than paths."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.config.errors import Problem
from jaxpar.plan.facts import Facts


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
