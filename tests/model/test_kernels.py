"""What fused kernels are told about rows means the same as the documents; numbers where they run on a CPU."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.experiments.compile.targets import SIDE_DIRECTORY
from jaxpar.model.attention import attend
from jaxpar.model.kernels import segment_starts

LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4)


def rows_of(lengths):
    """int32 [B, S]: documents of these lengths, numbered from 1, padded with 0 to the longest row."""
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    size = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, size - len(row))) for row in rows]).astype(np.int32)


@given(LENGTHS)
def test_starts_and_causality_are_the_document_mask(lengths):
    segment_ids = rows_of(lengths)
    starts = np.asarray(segment_starts(jnp.asarray(segment_ids)))
    index = np.arange(segment_ids.shape[1])
    causal = index[:, None] >= index[None]
    by_document = (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal
    by_start = (index[None, None] >= starts[:, :, None]) & causal
    np.testing.assert_array_equal(by_start, by_document)


def test_one_document_a_row_needs_only_causality():
    """What cuDNN computes: padding lies at the end of a row, so no real token ever sees it."""
    rng = np.random.default_rng(0)
    lengths = [12, 7, 1]
    segment_ids = rows_of([[length] for length in lengths])
    q, k, v = (jnp.asarray(rng.normal(size=(3, 12, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    is_real = segment_ids != 0

    def loss(function):
        def total(q, k, v):
            out = function(q, k, v)
            return jnp.sum(jnp.where(is_real[..., None, None], jnp.sin(out), 0.0)), out

        (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return np.where(is_real[..., None, None], out, 0), grads

    causal = loss(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))
    documents = loss(lambda q, k, v: attend(q, k, v, jnp.asarray(segment_ids)))
    np.testing.assert_allclose(causal[0], documents[0], atol=1e-6)
    for ours, theirs in zip(causal[1], documents[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


TOKAMAX_AGAINST_XLA = """
import jax, jax.numpy as jnp, numpy as np
from jaxpar.model.attention import attend
from jaxpar.model.kernels import fused_attention, segment_starts

rng = np.random.default_rng(0)
ids = np.stack([np.repeat([1, 2, 3, 0], [5, 9, 6, 4]), np.repeat([1, 2, 3, 0], [1, 1, 22, 0])]).astype(np.int32)
q, k, v = (jnp.asarray(rng.normal(size=(2, 24, heads, 8)), jnp.float32) for heads in (4, 2, 2))
starts = segment_starts(jnp.asarray(ids))

def results(function):
    total = lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v)))
    return function(q, k, v), *jax.grad(total, (0, 1, 2))(q, k, v)

ours = results(lambda q, k, v: attend(q, k, v, jnp.asarray(ids)))
for kernel in ("xla", "xla_chunked"):
    theirs = results(lambda q, k, v: fused_attention(kernel, q, k, v, starts))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
print("equal")
"""


TOKAMAX_ON_A_CONTEXT_AXIS = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import PartitionSpec as P
from jaxpar.collectives import island
from jaxpar.mesh import make_mesh
from jaxpar.model.attention import attend
from jaxpar.model.gathered import gathered_attention
from jaxpar.model.kernels import segment_starts
from jaxpar.model.zigzag import from_zigzag, to_zigzag

rng = np.random.default_rng(0)
ids = np.stack([np.repeat([1, 2, 3, 0], [5, 9, 6, 4]), np.repeat([1, 2, 3, 0], [1, 1, 22, 0])]).astype(np.int32)
q, k, v = (rng.normal(size=(2, 24, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
weights = rng.normal(size=q.shape).astype(np.float32)

def loss(function, q, k, v, weights):
    out = function(q, k, v)
    return (out * weights).sum(), out

whole = partial(loss, lambda *qkv: attend(*qkv, jnp.asarray(ids)))
expected, wanted = jax.grad(whole, (0, 1, 2), True)(q, k, v, weights)
for members in (2, 4):
    mesh = make_mesh({"context": members}, jax.devices()[:members])
    with jax.set_mesh(mesh):
        rows = P(None, "context")
        arrays = (q, k, v, weights, np.asarray(segment_starts(jnp.asarray(ids))))
        q_, k_, v_, weights_, starts = (jax.device_put(np.asarray(to_zigzag(a, members)), rows) for a in arrays)
        fused = partial(gathered_attention, "xla", jnp.dtype("float32"))
        attention = island(fused, (rows,) * 4, rows, check_vma=False)
        split = partial(loss, lambda *qkv: attention(*qkv, starts))
        found, out = jax.jit(jax.grad(split, (0, 1, 2), True))(q_, k_, v_, weights_)
    for ours, theirs in zip((out, *found), (wanted, *expected)):
        np.testing.assert_allclose(from_zigzag(np.asarray(ours), members), theirs, atol=2e-5)
print("equal")
"""


@pytest.mark.proof
@pytest.mark.parametrize("script", [TOKAMAX_AGAINST_XLA, TOKAMAX_ON_A_CONTEXT_AXIS], ids=["whole", "context"])
def test_tokamax_is_called_so_that_it_computes_our_attention(script):
    """Its reference implementations on the CPU, forward and backward, packed, with fewer kv heads than heads."""
    places = [*sys.path, str(SIDE_DIRECTORY)]
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.stdout.strip() == "equal", finished.stderr[-3000:]
