"""Rotary positions against complex rotation, and Llama 3.1 scaling against Hugging Face's formula, in numpy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import PRESETS
from jaxpar.config.schema import RopeScaling
from jaxpar.model.layers import rope_angles, rope_frequencies, rotate

head_dims = st.sampled_from([2, 16, 128])
thetas = st.sampled_from([1e4, 5e5, 1e6])


def turned(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Independent rotation in float64: dims i and i + h/2 are a complex number that turns by position x frequency."""
    half = x.shape[-1] // 2
    planes = x[..., :half].astype(np.float64) + 1j * x[..., half:].astype(np.float64)
    frequencies = 1.0 / theta ** (np.arange(0, 2 * half, 2) / (2 * half))
    planes *= np.exp(1j * positions[..., None, None] * frequencies)
    return np.concatenate([planes.real, planes.imag], -1)


def rotated(x: np.ndarray, positions: np.ndarray, frequencies: list[float]) -> np.ndarray:
    return np.asarray(rotate(jnp.asarray(x), *rope_angles(jnp.asarray(positions), frequencies)))


@settings(deadline=None, max_examples=15)
@given(head_dims, thetas, st.integers(0, 2**32 - 1))
def test_rotation_is_complex_multiplication(head_dim, theta, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 8, 3, head_dim)).astype(np.float32)
    positions = rng.integers(0, 512, (2, 8))
    # float32 angles: position x frequency is rounded by up to 512 x 2**-24.
    np.testing.assert_allclose(
        rotated(x, positions, rope_frequencies(head_dim, theta, None)), turned(x, positions, theta), atol=4e-4
    )


def test_position_zero_changes_nothing():
    x = np.random.default_rng(0).normal(size=(1, 4, 2, 16)).astype(np.float32)
    np.testing.assert_array_equal(rotated(x, np.zeros((1, 4), int), rope_frequencies(16, 1e4, None)), x)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), thetas)
def test_products_of_queries_and_keys_depend_on_the_distance_alone(query, key, shift, theta):
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 2, 1, 64)).astype(np.float32)
    frequencies = rope_frequencies(64, theta, None)
    at = [np.array([[query, query + shift]]), np.array([[key, key + shift]])]
    # The same vectors at both places of the sequence.
    q, k = (np.repeat(x[:, :1], 2, axis=1) for x in (q, k))
    scores = (rotated(q, at[0], frequencies) * rotated(k, at[1], frequencies)).sum(-1)[0, :, 0]
    assert scores[0] == pytest.approx(scores[1], abs=2e-3)


def huggingface_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """``_compute_llama3_parameters`` of Hugging Face transformers, by wavelength, in numpy."""
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * math.pi / plain
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    result = np.where(wavelength > shortest_stretched, plain / scaling.factor, plain)
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    medium = (wavelength >= longest_kept) & (wavelength <= shortest_stretched)
    return np.where(medium, between, result)


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "llama-3.2-1b", "llama-3.1-405b"])
def test_scaling_of_public_models_is_that_of_huggingface(preset):
    model = PRESETS[preset].model
    frequencies = rope_frequencies(model.head_dim, model.rope_theta, model.rope_scaling)
    np.testing.assert_allclose(
        frequencies, huggingface_frequencies(model.head_dim, model.rope_theta, model.rope_scaling), rtol=1e-12
    )
    plain = rope_frequencies(model.head_dim, model.rope_theta, None)
    assert frequencies[0] == plain[0] == 1.0
    assert frequencies[-1] == pytest.approx(plain[-1] / model.rope_scaling.factor)
    assert any(p / model.rope_scaling.factor < f < p for f, p in zip(frequencies, plain, strict=True)), "no middle part"


@given(
    head_dims,
    thetas,
    st.floats(1, 64),
    st.floats(0.5, 4),
    st.floats(0.1, 8),
    st.sampled_from([128, 2048, 8192]),
)
def test_any_scaling_is_that_of_huggingface(head_dim, theta, factor, low, above, original):
    scaling = RopeScaling(
        factor=factor, low_freq_factor=low, high_freq_factor=low + above, original_max_positions=original
    )
    np.testing.assert_allclose(
        rope_frequencies(head_dim, theta, scaling), huggingface_frequencies(head_dim, theta, scaling), rtol=1e-9
    )
