"""Attention and normalisation against plain float64 numpy: grouped heads, biases, qk-norm, documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import make_mesh
from jaxpar.model.attention import SequenceInfo, attention
from jaxpar.model.layers import norm, rope_angles, rope_frequencies

B, S, H, K, HEAD, EPS = 4, 12, 4, 2, 8, 1e-6


def normalised(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    planes = x[..., :half] + 1j * x[..., half:]
    planes *= np.exp(1j * positions[..., None, None] / 1e4 ** (np.arange(half) / half))
    return np.concatenate([planes.real, planes.imag], -1)


def plain_attention(q, k, v, extras, positions, segment_ids) -> np.ndarray:
    """One row, head and token at a time."""
    q, k, v = (x + extras[bias] for x, bias in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
    q, k = normalised(q, extras["q_norm"]), normalised(k, extras["k_norm"])
    q, k = turned(q, positions), turned(k, positions)
    out = np.zeros_like(q)
    for row, head, token in np.ndindex(B, H, S):
        group = head // (H // K)
        seen = [t for t in range(token + 1) if segment_ids[row, t] == segment_ids[row, token]]
        scores = k[row, seen, group] @ q[row, token, head] / np.sqrt(HEAD)
        weights = np.exp(scores - scores.max())
        out[row, token, head] = weights / weights.sum() @ v[row, seen, group]
    return out


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, S, heads, HEAD)) for heads in (H, K, K))
    extras = {
        "q_bias": rng.normal(size=(H, HEAD)),
        "k_bias": rng.normal(size=(K, HEAD)),
        "v_bias": rng.normal(size=(K, HEAD)),
        "q_norm": 1 + 0.3 * rng.normal(size=HEAD),
        "k_norm": 1 + 0.3 * rng.normal(size=HEAD),
    }
    starts = rng.random((B, S)) < 0.3
    starts[:, 0] = True
    index = np.arange(S)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), 1)
    return q, k, v, extras, positions, np.cumsum(starts, 1)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one device", "all"])
def test_attention_is_that_of_the_textbook(inputs, sizes):
    q, k, v, extras, positions, segment_ids = inputs
    mesh = make_mesh(sizes, jax.devices()[: 8 if sizes else 1])
    rows, heads = (("data", "fsdp"), "tensor") if sizes else (None, None)

    def put(array, *spec):
        dtype = np.float32 if array.dtype == np.float64 else np.int32
        return jax.device_put(array.astype(dtype), NamedSharding(mesh, P(*spec)))

    def compute(q, k, v, extras, positions, segment_ids):
        cos, sin = rope_angles(positions, rope_frequencies(HEAD, 1e4, None))
        return attention(q, k, v, extras, SequenceInfo(cos=cos, sin=sin, segment_ids=segment_ids), EPS)

    with jax.set_mesh(mesh):
        out = jax.jit(compute)(
            *(put(x, rows, None, heads, None) for x in (q, k, v)),
            {name: put(x, heads, None) if x.ndim == 2 else put(x, None) for name, x in extras.items()},
            put(positions, rows, None),
            put(segment_ids, rows, None),
        )
    np.testing.assert_allclose(out, plain_attention(*inputs), atol=2e-5)


def test_rms_norm_works_in_float32():
    """bfloat16 activations whose squares overflow or vanish in few bits; eps counts only for tiny ones."""
    mesh = make_mesh({}, jax.devices()[:1])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 64)) * np.array([1e-4, 1.0, 1e4])[:, None]
    scale = 1 + 0.1 * rng.normal(size=64)
    with jax.set_mesh(mesh):
        x_bf16 = jax.device_put(jnp.asarray(x, jnp.bfloat16), NamedSharding(mesh, P(None, None, None)))
        out = jax.jit(lambda x, scale: norm("rms", x, [scale], EPS))(
            x_bf16, jax.device_put(jnp.asarray(scale, jnp.float32), NamedSharding(mesh, P(None)))
        )
    assert out.dtype == jnp.bfloat16
    expected = normalised(np.asarray(x_bf16, np.float64), scale)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)
