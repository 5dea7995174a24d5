"""Deliberate faults: each must make one of the suite's own checks fail. A check that cannot fail proves nothing.

Layout faults do nothing on one device, so the parity check must see them. Faults in the mathematics are the same on
every mesh, so the outside oracle must. Faults in the data order must show in the ids or the rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar.collectives
import jaxpar.data.loader
import jaxpar.data.order
import jaxpar.loss
import jaxpar.model.attention
import jaxpar.model.decoder
import jaxpar.model.layers
import jaxpar.step
import jaxpar.strategy
from tests.parity import test_hf
from tests.parity.harness import assert_same, build, model_key, parity_config, single_device, train
from tests.parity.test_meshes import GPT2

pytestmark = pytest.mark.proof

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def scaled_where_partial(factor):
    """finish_reduction with every gradient that was a partial sum scaled."""
    honest = jaxpar.collectives.finish_reduction

    def faulty(grads, dtype):
        partial = jax.tree.map(lambda g: bool(jaxpar.collectives.spec_of(g).unreduced), grads)
        return jax.tree.map(lambda g, p: g * factor if p else g, honest(grads, dtype), partial)

    return faulty


def scatter_counting_twice(x, axis_name, *, scatter_dimension, tiled):
    honest = lax.psum_scatter(x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled)
    return honest + honest


def scatter_without_sum(x, axis_name, *, scatter_dimension, tiled):
    """A reduce-scatter that forgets the other devices: each keeps its own part of its own sum."""
    index = lax.axis_index(axis_name)
    size = x.shape[scatter_dimension] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, index * size, size, scatter_dimension)


def shards_only_norm(tree):
    """Norm that leaves out the embedding, as a norm over one stage's parameters would."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree["layers"])))


def mean_of_means(honest):
    """Accumulation that gives every microbatch the same weight instead of every token."""

    def faulty(definition, loss_fn, params, batch, **rest):
        def even(model, microbatch):
            total, weight, sums = loss_fn(model, microbatch)
            tokens = jnp.maximum(weight, 1.0)
            return total / tokens, jnp.ones(()), {name: value / tokens for name, value in sums.items()}

        return honest(definition, even, params, batch, **rest)

    return faulty


class Lax:
    """``jax.lax`` with one function replaced, for one module."""

    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(lax, name)


LAYOUT_FAULTS = {
    "every tensor device adds the first positions": lambda m: m.setattr(
        jaxpar.model.layers,
        "lax",
        Lax(dynamic_slice_in_dim=lambda x, start, *args, **kwargs: lax.dynamic_slice_in_dim(x, 0, *args, **kwargs)),
    ),
    "gradients doubled where they were partial sums": lambda m: m.setattr(
        jaxpar.strategy, "finish_reduction", scaled_where_partial(2.0)
    ),
    "gradients divided by the number of data replicas": lambda m: m.setattr(
        jaxpar.strategy, "finish_reduction", scaled_where_partial(0.5)
    ),
    "reduce-scatters in a block count twice": lambda m: m.setattr(
        jaxpar.collectives, "lax", Lax(psum_scatter=scatter_counting_twice)
    ),
    "loss not summed over vocabulary shards": lambda m: m.setattr(
        jaxpar.loss, "lax", Lax(psum=lambda x, axes: lax.psum(x, axes) * (0.5 if axes == ("tensor",) else 1.0))
    ),
    "loss not summed over rows": lambda m: m.setattr(
        jaxpar.loss, "lax", Lax(psum=lambda x, axes: lax.psum(x, axes) / (1.0 if axes == ("tensor",) else 4.0))
    ),
    "embedding rows not summed over vocabulary shards": lambda m: m.setattr(
        jaxpar.model.layers, "lax", Lax(psum_scatter=scatter_without_sum)
    ),
    "gradients of the hidden states not summed over vocabulary shards": lambda m: m.setattr(
        jaxpar.loss, "lax", Lax(psum_scatter=scatter_without_sum)
    ),
    "vocabulary shards all look up the first ids": lambda m: m.setattr(
        jaxpar.model.layers, "lax", Lax(axis_index=lambda axes: 0 * lax.axis_index(axes))
    ),
    "labels compared with the first vocabulary shard only": lambda m: m.setattr(
        jaxpar.loss, "lax", Lax(axis_index=lambda axes: 0 * lax.axis_index(axes))
    ),
}


@pytest.mark.parametrize("name", LAYOUT_FAULTS)
def test_layout_fault_breaks_parity(name, monkeypatch):
    model = dict(model_key(GPT2 if "positions" in name else {}))
    expected = single_device(model_key(model), 2, "full")
    LAYOUT_FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(train(build(parity_config(MESH, model=model, train={"microbatches": 2}))), expected)


def scattering_twice_as_much(*args, honest=jaxpar.collectives.scatter_gradient):
    scattered = honest(*args)
    return scattered + scattered


def gathering_zeros(weight, dim, compute):
    return 0 * jaxpar.collectives.gather_shards(weight, dim, compute)


STRATEGY_FAULTS = {
    ("optimizer", "scatter at the end counts twice"): ("jaxpar.strategy.scatter_gradient", scattering_twice_as_much),
    ("grads", "weights gathered ahead are zero"): ("jaxpar.strategy.gather_shards", gathering_zeros),
}


@pytest.mark.parametrize("fault", STRATEGY_FAULTS, ids=" ".join)
def test_strategy_fault_breaks_parity(fault, monkeypatch):
    expected = single_device(model_key({}), 2, "full")
    monkeypatch.setattr(*STRATEGY_FAULTS[fault])
    mesh = {**MESH, "fsdp_strategy": fault[0]}
    with pytest.raises(AssertionError):
        assert_same(train(build(parity_config(mesh, train={"microbatches": 2}))), expected)


def scaled_when_named(honest):
    """Names that change what they name."""
    return lambda x, name: honest(x * 1.001 if name == "attention_out" else x, name)


def test_activation_that_its_name_changes_breaks_parity(monkeypatch):
    expected = single_device(model_key({}), 2, "full")
    monkeypatch.setattr("jaxpar.model.decoder.checkpoint_name", scaled_when_named(jaxpar.model.decoder.checkpoint_name))
    with pytest.raises(AssertionError):
        assert_same(train(build(parity_config(MESH, train={"microbatches": 2, "remat": "selective"}))), expected)


STEP_FAULTS = {
    "microbatches weighted alike": lambda m: m.setattr(
        "jaxpar.program.accumulate", mean_of_means(jaxpar.step.accumulate)
    ),
    "gradient norm over some parameters only": lambda m: m.setattr(
        jaxpar.step, "optax", type("optax", (), {"tree": type("tree", (), {"norm": staticmethod(shards_only_norm)})})
    ),
    "last microbatch left out": lambda m: m.setattr(
        "jaxpar.program.accumulate",
        lambda d, f, p, b, **rest: jaxpar.step.accumulate(d, f, p, {name: a[:1] for name, a in b.items()}, **rest),
    ),
}


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_step_fault_breaks_parity_between_accumulations(name, monkeypatch):
    """Two microbatches against four, on one device: the tokens are the same, so everything must be."""
    key = model_key({})
    weighted = {"train": {"microbatches": 1}}
    expected = single_device(key, 1, "full")
    STEP_FAULTS[name](monkeypatch)
    config = parity_config({}, train={"microbatches": 2})
    with pytest.raises(AssertionError):
        assert_same(train_on(build(config), parity_config({}, **weighted)), expected)


def train_on(program, source_config):
    """Train on the rows of another accumulation's batches."""
    from tests.parity import harness

    batches = harness.random_batch

    def same_rows(_config, seed=0):
        shape = program.abstract_batch["tokens"].shape
        return {name: array.reshape(shape) for name, array in batches(source_config, seed).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "random_batch", same_rows)
        return train(program)


def attend_across_documents(q, k, v, segment_ids):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def attend_to_the_future(q, k, v, segment_ids):
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")


def test_ignored_document_mask_breaks_parity(monkeypatch):
    expected = single_device(model_key({}), 1, "full")
    monkeypatch.setattr(jaxpar.model.attention, "attend", attend_across_documents)
    with pytest.raises(AssertionError):
        assert_same(train(build(parity_config({}))), expected)


MATHEMATICS_FAULTS = {
    "attention sees the future": ("llama", lambda m: m.setattr(jaxpar.model.attention, "attend", attend_to_the_future)),
    "positions not rotated": ("llama", lambda m: m.setattr(jaxpar.model.attention, "rotate", lambda x, cos, sin: x)),
    "frequencies not scaled": (
        "llama31",
        lambda m: m.setattr(
            jaxpar.model.decoder,
            "rope_frequencies",
            lambda head_dim, theta, _: jaxpar.model.layers.rope_frequencies(head_dim, theta, None),
        ),
    ),
    "biases ignored": ("qwen2", lambda m: m.setattr(jaxpar.model.decoder, "EXTRAS", ())),
    "gemma's norms multiply by their scale alone": (
        "gemma",
        lambda m: m.setitem(jaxpar.model.layers.NORMS, "rms_plus_one", jaxpar.model.layers.normalise),
    ),
    "gemma's gate without the tanh form": (
        "gemma",
        lambda m: m.setitem(jaxpar.model.layers.ACTIVATIONS, "gelu_tanh", partial(jax.nn.gelu, approximate=False)),
    ),
    "LayerNorm without the mean": (
        "gpt2",
        lambda m: m.setitem(
            jaxpar.model.layers.NORMS,
            "layer",
            lambda x, scale, bias, eps: jaxpar.model.layers.normalise(x, scale, eps) + bias,
        ),
    ),
    "biases of projections ignored": (
        "gpt2",
        lambda m: m.setattr(jaxpar.model.decoder.Block, "_biased", lambda self, name, x: x),
    ),
    "qk-norm ignored": ("qwen3", lambda m: m.setattr(jaxpar.model.decoder, "EXTRAS", ())),
    "tied head gets no gradient": (
        "llama31",
        lambda m: m.setattr(
            jaxpar.model.decoder.Decoder,
            "head_weight",
            property(lambda self: (lax.stop_gradient(self.embedding[...]), True)),
        ),
    ),
    "last loss term dropped": (
        "llama",
        lambda m: m.setattr(
            jaxpar.loss,
            "_chunk",
            lambda options, g, head, x, labels, w, honest=jaxpar.loss._chunk: honest(
                options, g, head, x, labels, w.at[46].set(0)
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", MATHEMATICS_FAULTS)
def test_mathematical_fault_breaks_the_oracle(name, monkeypatch, tmp_path):
    family, inject = MATHEMATICS_FAULTS[name]
    inject(monkeypatch)
    with pytest.raises(AssertionError):
        test_hf.check(family, {}, tmp_path)


def test_skipped_row_breaks_the_order(monkeypatch):
    """A batch that starts one row late."""
    order = jaxpar.data.order.GlobalOrder(20, seed=0, shuffle=True)

    def ids_of_epoch():
        position, ids = jaxpar.data.order.Position(), []
        for _ in range(5):
            batch, position = order.next_batch(position, 4, "drop")
            ids.extend(batch.tolist())
        return ids

    assert sorted(ids_of_epoch()) == list(range(20))
    honest = jaxpar.data.order.GlobalOrder.rows
    monkeypatch.setattr(
        jaxpar.data.order.GlobalOrder,
        "rows",
        lambda self, epoch, start, stop: honest(self, epoch, min(start + 1, 19), stop),
    )
    with pytest.raises(Exception):  # noqa: B017, PT011 (whichever check sees it first)
        assert sorted(ids_of_epoch()) == list(range(20))


def test_padding_of_the_vocabulary_left_unmasked_breaks_parity(monkeypatch):
    expected = single_device(model_key({}), 1, "full")
    honest = jaxpar.loss.LossOptions
    monkeypatch.setattr(jaxpar.loss, "LossOptions", lambda **options: honest(**{**options, "vocab_size": 152}))
    with pytest.raises(AssertionError):
        assert_same(train(build(parity_config({}))), expected)


def test_replicas_that_drift_are_seen():
    """The replica check compares bits on every device, not one copy with itself."""
    from tests.parity.harness import assert_replicas_equal

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, P())
    parts = [
        jax.device_put(np.full(3, value, np.float32), device)
        for value, device in zip((1, 2), jax.devices()[:2], strict=True)
    ]
    drifted = jax.make_array_from_single_device_arrays((3,), sharding, parts)
    with pytest.raises(AssertionError, match="replicas"):
        assert_replicas_equal({"w": drifted})
