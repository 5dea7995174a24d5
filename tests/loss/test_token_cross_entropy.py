"""Vocab-parallel, chunked cross entropy and its hand-made gradients against optax on whole float64 logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import loss as loss_module
from jaxpar.collectives import defer_reduction, finish_reduction
from jaxpar.loss import LossOptions, token_cross_entropy
from jaxpar.mesh import make_mesh
from jaxpar.model.decoder import Numerics
from jaxpar.model.remat import KEEP_ALL
from jaxpar.sharding import batch_entry, sequence_entry, spec_for

ROWS, LENGTH, EMBED = 8, 8, 16
VOCAB, PADDED = 13, 16
MESHES = {"one device": {}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}
MESHES_AND_CHUNKS = [("one device", 0), ("all", 5)]
"""Chunk 0 is one chunk; chunks of 5 divide neither the 64 nor the 16 tokens of a device."""


@functools.cache
def loss_on(mesh_name: str, *, tied: bool = False, chunk: int = 0, z_loss: float = 1e-2, compute: str = "float32"):
    """Host arrays -> (objective, cross entropy, gradients of half the objective), through production code."""
    sizes = MESHES[mesh_name]
    mesh = make_mesh(sizes, jax.devices()[: 8 if sizes else 1])
    numerics = Numerics(compute=jnp.dtype(compute), reduce=jnp.dtype("float32"), remat=KEEP_ALL)
    options = LossOptions(vocab_size=VOCAB, z_loss=z_loss, chunk_tokens=chunk, numerics=numerics, tied=tied)
    rows, head_axes = batch_entry(mesh), ("vocab", "embed") if tied else ("embed", "vocab")
    head_shape = (PADDED, EMBED) if tied else (EMBED, PADDED)
    specs = (
        P(rows, sequence_entry(mesh), None),
        spec_for("head", head_axes, head_shape, mesh),
        P(rows, None),
        P(rows, None),
    )

    def run(x, head, labels, weights):
        def half(x, head):
            sums = token_cross_entropy(options, x, head, labels, weights)
            return 0.5 * sums[0], sums

        grads, sums = jax.grad(half, argnums=(0, 1), has_aux=True)(x.astype(compute), defer_reduction(head))
        return (*sums, *finish_reduction(grads))

    compiled = jax.jit(run)

    def on_host(x, head_dv, labels, weights):
        arrays = x, head_dv.T if tied else head_dv, labels.astype(np.int32), weights
        arrays = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays]
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
            total, cross_entropy, grad_x, grad_head = jax.device_get(compiled(*placed))
        return total, cross_entropy, grad_x, grad_head.T if tied else grad_head

    return on_host


def reference(x, head_dv, labels, weights, z_loss: float):
    """The same from whole logits of the true vocabulary, by optax and autodiff in float64."""

    def half(x, head):
        logits = x @ head[:, :VOCAB]
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        penalty = z_loss * jax.nn.logsumexp(logits, -1) ** 2
        total = jnp.sum(weights * (cross_entropy + penalty))
        return 0.5 * total, (total, jnp.sum(weights * cross_entropy))

    with jax.enable_x64(True):
        arrays = (jnp.asarray(a, jnp.float64) for a in (x, head_dv))
        grads, sums = jax.grad(half, argnums=(0, 1), has_aux=True)(*arrays)
        return jax.device_get((*sums, *grads))


def sample(seed: int = 0, scale: float = 1.0):
    """Inputs whose padded vocabulary would dominate every softmax if it took part."""
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(EMBED, PADDED))
    head[:, VOCAB:] = 100 * rng.normal(size=(EMBED, PADDED - VOCAB))
    x = scale * rng.normal(size=(ROWS, LENGTH, EMBED))
    return x, head, rng.integers(0, VOCAB, (ROWS, LENGTH)), rng.random((ROWS, LENGTH))


def assert_matches(actual, expected, tolerance: float = 2e-6) -> None:
    """Sums relatively; gradients against the largest element of each."""
    for got, want in zip(actual[:2], expected[:2], strict=True):
        assert got == pytest.approx(float(want), rel=tolerance)
    for got, want in zip(actual[2:], expected[2:], strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(), rtol=0)


def check(mesh: str, tied: bool, chunk: int) -> None:
    inputs = sample()
    actual = loss_on(mesh, tied=tied, chunk=chunk)(*inputs)
    assert_matches(actual, reference(*inputs, z_loss=1e-2))
    assert not actual[3][:, VOCAB:].any(), "padding of the vocabulary gets a gradient"


@pytest.mark.parametrize(
    ("mesh", "tied", "chunk"),
    [("one device", False, 0), ("one device", True, 5), ("all", True, 0), ("all", False, 5)],
)
def test_value_and_gradients(mesh, tied, chunk):
    check(mesh, tied, chunk)


@pytest.mark.proof
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk", [0, 1, 5, 8, 1000])
def test_every_chunk_size(mesh, tied, chunk):
    check(mesh, tied, chunk)


def test_without_z_loss_both_sums_are_the_cross_entropy():
    inputs = sample(2)
    actual = loss_on("one device", z_loss=0.0)(*inputs)
    assert actual[0] == actual[1]
    assert_matches(actual, reference(*inputs, z_loss=0.0))


@pytest.mark.parametrize(("mesh", "chunk"), MESHES_AND_CHUNKS)
def test_tokens_of_weight_0_do_not_count_whatever_their_label(mesh, chunk):
    x, head, labels, weights = sample(3)
    off = np.random.default_rng(0).random(weights.shape) < 0.5
    off[2] = True  # a whole row
    masked = np.where(off, 0.0, weights)
    # Ids that do not exist, of padding, and of nothing.
    garbage = np.where(off, np.resize([-100, -1, VOCAB, PADDED - 1, PADDED, 10**6], labels.shape), labels)
    actual = loss_on(mesh, chunk=chunk)(x, head, garbage, masked)
    assert_matches(actual, reference(x, head, labels, masked, z_loss=1e-2))
    assert not actual[2][off].any()


@pytest.mark.parametrize(("mesh", "chunk"), MESHES_AND_CHUNKS)
def test_no_weight_at_all_gives_exact_zeros(mesh, chunk):
    x, head, labels, weights = sample(4)
    for values in loss_on(mesh, chunk=chunk)(x, head, labels, 0 * weights):
        assert not np.asarray(values).any()


@pytest.mark.parametrize(("mesh", "chunk"), MESHES_AND_CHUNKS)
def test_one_weighted_token(mesh, chunk):
    x, head, labels, weights = sample(5)
    lonely = np.zeros_like(weights)
    lonely[-1, -1] = 0.25
    assert_matches(loss_on(mesh, chunk=chunk)(x, head, labels, lonely), reference(x, head, labels, lonely, 1e-2))


@pytest.mark.parametrize(("mesh", "chunk"), MESHES_AND_CHUNKS)
@pytest.mark.parametrize("scale", [2e3, 1e-4], ids=["logits of 1e4", "logits of 0"])
def test_extreme_logits(mesh, chunk, scale):
    inputs = sample(6, scale=scale)
    assert 5e3 < np.abs(inputs[0] @ inputs[1][:, :VOCAB]).max() / (scale / 2e3) < 5e4
    actual = loss_on(mesh, chunk=chunk)(*inputs)
    assert all(np.isfinite(values).all() for values in actual)
    # float32 logits of 1e4 are known to 1e-3, and so is each softmax.
    assert_matches(actual, reference(*inputs, z_loss=1e-2), tolerance=1e-3 if scale > 1 else 2e-6)


def test_bfloat16_products_stay_within_their_rounding():
    x, head, labels, weights = sample(7)
    # What is given is bfloat16 already, so that only the computation rounds.
    x, head = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, head))
    total, cross_entropy, grad_x, grad_head = loss_on("all", compute="bfloat16", chunk=5)(x, head, labels, weights)
    assert (grad_x.dtype, grad_head.dtype) == (jnp.bfloat16, jnp.float32)
    expected = reference(x, head, labels, weights, z_loss=1e-2)
    # The sums are float32 throughout; the gradients of logits are rounded to 8 bits.
    assert_matches((total, cross_entropy), expected[:2])
    assert_matches((0, 0, grad_x.astype(np.float64), grad_head), (0, 0, *expected[2:]), tolerance=2**-7)


def test_chunks_keep_the_logits_small(monkeypatch):
    """The compiled program's temporaries: whole logits of 2048 tokens x 4096 ids are 32 MiB, of 128 tokens 2 MiB."""
    mesh = make_mesh({}, jax.devices()[:1])
    numerics = Numerics(compute=jnp.dtype("float32"), reduce=jnp.dtype("float32"), remat=KEEP_ALL)

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*(None,) * len(dims))))

    def temporary_bytes(chunk: int) -> int:
        options = LossOptions(vocab_size=4096, z_loss=0.0, chunk_tokens=chunk, numerics=numerics, tied=False)
        run = jax.grad(lambda x, head, *rest: token_cross_entropy(options, x, head, *rest)[0], argnums=(0, 1))
        with jax.set_mesh(mesh):
            lowered = jax.jit(run).lower(
                shape(jnp.float32, 2, 1024, 16),
                shape(jnp.float32, 16, 4096),
                shape(jnp.int32, 2, 1024),
                shape(jnp.float32, 2, 1024),
            )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    whole, chunked = temporary_bytes(0), temporary_bytes(128)
    assert whole >= 2048 * 4096 * 4
    assert chunked < whole / 4
    # Left to itself, a chunk is as large as the memory for its logits allows.
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 128 * 4096 * 4)
    assert temporary_bytes(0) == chunked
