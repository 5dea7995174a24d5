"""Attention over a split sequence against attention over the whole one: values and gradients, documents, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import make_mesh
from jaxpar.model import attention_blocks
from jaxpar.model.attention import attend
from jaxpar.model.attention_blocks import attend_block
from jaxpar.model.ring import ContextWay, context_attention
from jaxpar.model.zigzag import from_zigzag, to_zigzag

B, S, H, K, HEAD = 2, 48, 4, 2, 8
TOLERANCE = 2e-6


@functools.cache
def inputs() -> tuple[np.ndarray, ...]:
    """q, k, v, what the gradient is multiplied by, and segments: one document, and many with padding at the end."""
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (rng.normal(size=(B, S, n, HEAD)).astype(np.float32) for n in (H, K, K, H))
    lengths = [1, 5, 13, 2, 20]  # 7 tokens of padding; borders inside chunks, on chunk borders and across members
    packed = np.repeat([1, 2, 3, 4, 5, 0], [*lengths, S - sum(lengths)])
    return 3 * q, k, v, cotangent, np.stack([np.ones(S, int), packed]).astype(np.int32)


def value_and_gradients(attention):
    def weighed(q, k, v, segments, cotangent):
        out = attention(q, k, v, segments)
        return jnp.sum(out.astype(jnp.float32) * cotangent), out

    return jax.jit(jax.grad(weighed, (0, 1, 2), has_aux=True))


@functools.cache
def on_one_device() -> tuple:
    q, k, v, cotangent, segments = inputs()
    with jax.default_matmul_precision("highest"):
        grads, out = value_and_gradients(attend)(q, k, v, segments, cotangent)
    return jax.device_get((out, *grads))


def split(num_members: int, mode: str, dtype=np.float32) -> tuple:
    """The same on a context axis, in natural order."""
    mesh = make_mesh({"context": num_members}, jax.devices()[:num_members])
    spec = P(None, "context", None, None)
    island = jax.shard_map(
        functools.partial(context_attention, ContextWay(mode, jnp.dtype("float32"))),
        in_specs=(spec, spec, spec, P(None, None)),
        out_specs=spec,
    )
    q, k, v, cotangent, segments = (np.asarray(to_zigzag(array, num_members)) for array in inputs())
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        q, k, v = (jax.device_put(x.astype(dtype), NamedSharding(mesh, spec)) for x in (q, k, v))
        cotangent = jax.device_put(cotangent, NamedSharding(mesh, spec))
        segments = jax.device_put(segments, NamedSharding(mesh, P(None, None)))
        grads, out = value_and_gradients(island)(q, k, v, segments, cotangent)
    return tuple(np.asarray(from_zigzag(np.asarray(x), num_members)) for x in (out, *grads))


def assert_equal(actual: tuple, tolerance: float) -> None:
    for name, got, want in zip(("out", "q", "k", "v"), actual, on_one_device(), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * float(np.abs(want).max()), err_msg=name)


def test_a_split_sequence_attends_as_a_whole_one():
    """Four members have every loop that there is."""
    assert_equal(split(4, "ring"), TOLERANCE)


def test_long_blocks_go_through_their_queries_in_parts(monkeypatch):
    """24 queries and keys of a member: 12 parts of 2 queries for its own block, 4 of 3 for a pair of half blocks."""
    monkeypatch.setattr(attention_blocks, "SCORE_BYTES", 4 * B * 2 * H * 24)
    assert_equal(split(2, "ring"), TOLERANCE)


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["ring", "allgather"])
@pytest.mark.parametrize("num_members", [2, 3, 4, 6, 8])
def test_any_number_of_members(num_members, mode):
    """Two members have no loop, three one in the forward pass only."""
    assert_equal(split(num_members, mode), TOLERANCE)


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["ring", "allgather"])
def test_sums_are_kept_in_float32_when_values_are_not(mode):
    """bfloat16 in and out: as far off as one rounding of each input, result and gradient allows, over eight blocks."""
    assert_equal(split(8, mode, jnp.bfloat16), 3e-2)


def test_a_query_without_a_key_has_no_share():
    """A block of another document: nothing, whatever its keys; no NaN even where its scores are large."""
    q, k, v, _, _ = inputs()
    segments = np.ones((B, S), np.int32)
    partial = attend_block(100 * q, 100 * k, v, segments, 2 * segments, causal=False)
    np.testing.assert_array_equal(partial.out, 0)
    assert (np.asarray(partial.log_sum) < -1e29).all()
