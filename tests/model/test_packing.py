"""Packed documents do not see each other, and no token sees the future: on one device, tensor and context shards."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.samples import LogitsOf
from tests.parity.harness import build, parity_config

ROWS, LENGTH, VOCAB = 8, 16, 151

Documents = list[np.ndarray]


MESHES = {"one device": {}, "tensor2": {"tensor": 2}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}
MESHES["context"] = {"context": 2, "tensor": 2, "context_mode": "allgather"}
MESHES["context8"] = {"context": 8, "context_mode": "ring"}


@functools.cache
def logits_on(mesh: str) -> LogitsOf:
    return LogitsOf(build(parity_config(MESHES[mesh])))


@pytest.fixture(scope="module", params=["one device", "tensor2", "context"])
def logits_of(request) -> LogitsOf:
    return logits_on(request.param)


def packed(rows: list[Documents]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segment ids [B, S] of rows of documents; the rest of each row is padding (segment 0)."""
    tokens, positions, segment_ids = np.zeros((3, ROWS, LENGTH), int)
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents, start=1):
            part = slice(start, start + len(document))
            tokens[row, part], positions[row, part] = document, np.arange(len(document))
            segment_ids[row, part] = number
            start += len(document)
        assert start <= LENGTH
    return tokens, positions, segment_ids


def token_losses(logits: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Loss of each next token of a document, from its logits [len(document), V]; the last has no next token."""
    logits = logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)
    return -log_probs[np.arange(len(document) - 1), document[1:]]


def cut(lengths: list[int], seed: int) -> Documents:
    """Random documents of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length) for length in lengths]


splits = st.integers(1, LENGTH - 1).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, LENGTH - first)))
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=15, deadline=None)
@given(splits, seeds)
def test_other_tokens_of_one_document_leave_the_other_alone(logits_of, lengths, seed):
    first, second = cut(lengths, seed)
    changed = (first + 1 + np.arange(len(first))) % VOCAB
    rows = packed([[first, second], [changed, second], [second, first], [second, changed]])
    logits = logits_of(*rows)
    begin, end, both = len(first), len(second), len(first) + len(second)
    np.testing.assert_array_equal(logits[0, begin:both], logits[1, begin:both])
    np.testing.assert_array_equal(logits[2, :end], logits[3, :end])
    # The change itself is visible where it should be, so equality above is not for want of an effect.
    assert np.abs(logits[0, :begin] - logits[1, :begin]).max() > 1e-3


def test_the_document_mask_is_what_isolates(logits_of):
    """The same rows declared to be one document: now the first half reaches the second."""
    first, second = cut([8, 8], 0)
    tokens, positions, segment_ids = packed([[first, second], [(first + 1) % VOCAB, second]])
    logits = logits_of(tokens, positions, np.minimum(segment_ids, 1))
    assert np.abs(logits[0, 8:] - logits[1, 8:]).max() > 1e-3


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), seeds)
def test_packed_documents_lose_as_much_as_documents_in_rows_of_their_own(logits_of, lengths, seed):
    documents = cut(lengths, seed)
    logits = logits_of(*packed([documents, *([document] for document in documents)]))
    start = 0
    for row, document in enumerate(documents, start=1):
        together = token_losses(logits[0, start : start + len(document)], document)
        alone = token_losses(logits[row, : len(document)], document)
        np.testing.assert_allclose(together, alone, rtol=1e-5)
        start += len(document)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, LENGTH - 1), seeds)
def test_no_token_sees_the_future(logits_of, changed, seed):
    (document,) = cut([LENGTH], seed)
    other = document.copy()
    other[changed] = (other[changed] + 1) % VOCAB
    logits = logits_of(*packed([[document], [other]]))
    np.testing.assert_array_equal(logits[0, :changed], logits[1, :changed])
    assert (np.abs(logits[0, changed:] - logits[1, changed:]).max(-1) > 1e-4).all(), "a later token sees no past"


def test_rows_do_not_see_each_other(logits_of):
    documents = cut([LENGTH] * 4, 3)
    one = logits_of(*packed([[document] for document in documents]))
    other = logits_of(*packed([[documents[0]], *([document[::-1]] for document in documents[1:])]))
    np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("mesh", ["tensor2", "all", "context", pytest.param("context8", marks=pytest.mark.proof)])
def test_logits_do_not_depend_on_the_mesh(mesh):
    rows = packed([cut([5, 7], 1), cut([16], 2), cut([1, 2, 3], 3)])
    one = logits_on("one device")(*rows)
    np.testing.assert_allclose(logits_on(mesh)(*rows), one, rtol=1e-5, atol=1e-5 * np.abs(one).max())
