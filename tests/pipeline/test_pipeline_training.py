"""The training step through stages equals the step on one device, through ``Program``, as a run has it.

Loss, gradients, norm, clipping, optimizer, and the validation step. Rows are packed, tokens weigh unevenly, one
microbatch has none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.plan.accelerator import KernelChoice
from jaxpar.step import matmul_precision
from tests.parity.harness import (
    assert_same,
    build,
    gradient_errors,
    model_key,
    parity_config,
    placed,
    random_batch,
    single_device,
    train,
)

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
FSDP_TENSOR = {"pipeline": 2, "fsdp": 2, "tensor": 2}
ONCE = {"gather": "per_step"}
DATA_FSDP = {"pipeline": 2, "data": 2, "fsdp": 2}
TIED = {"num_layers": 4, "family": "llama", "tie_embeddings": True}

UNEVEN = {"num_layers": 5}
GPT2 = {"family": "gpt2", "tie_embeddings": True, "num_kv_heads": 8, "max_positions": 16, "num_layers": 3}

QUICK = {
    "interleaved, tied, with fsdp and tensor": (FSDP_TENSOR, TIED, INTERLEAVED, 2),
    "interleaved, weights gathered once": (FSDP_TENSOR, TIED, {**INTERLEAVED, **ONCE}, 2),
    "1f1b with data": ({"pipeline": 2, "data": 2}, {"family": "qwen2"}, {}, 2),
}
FOUR = {"num_layers": 4}
EIGHT = {"num_layers": 8}
FULL = {
    "pipeline 4": ({"pipeline": 4}, FOUR, {}, 4),
    "pipeline 4, 16 microbatches": ({"pipeline": 4}, FOUR, {}, 16),
    "pipeline 8": ({"pipeline": 8}, EIGHT, {}, 8),
    "data and fsdp": (DATA_FSDP, FOUR, {}, 4),
    "fsdp and tensor, 8 microbatches": (FSDP_TENSOR, FOUR, {}, 8),
    "tensor": ({"pipeline": 4, "tensor": 2}, FOUR, {}, 4),
    "fsdp": ({"pipeline": 2, "fsdp": 4}, FOUR, {}, 4),
    "gpipe with fewer microbatches than stages": ({"pipeline": 4, "fsdp": 2}, FOUR, {"schedule": "gpipe"}, 2),
    "4 chunks": ({"pipeline": 2, "fsdp": 2}, EIGHT, {"schedule": "interleaved", "chunks": 4}, 4),
    "interleaved, 8 microbatches": ({"pipeline": 4, "data": 2}, EIGHT, INTERLEAVED, 8),
    "breadth first": ({"pipeline": 2, "tensor": 2}, FOUR, {"schedule": "breadth_first", "chunks": 2}, 4),
    "uneven, balanced": ({"pipeline": 4, "fsdp": 2}, UNEVEN, {"layers_per_stage": "balanced"}, 4),
    "uneven, by hand": ({"pipeline": 2, "tensor": 2}, UNEVEN, {"layers_per_stage": [2, 3]}, 4),
    "uneven, interleaved": (
        {"pipeline": 2, "data": 2},
        UNEVEN,
        {**INTERLEAVED, "layers_per_stage": "balanced"},
        4,
    ),
    "biases, uneven": ({"pipeline": 2, "fsdp": 2}, GPT2, {"layers_per_stage": "balanced"}, 2),
    "optimizer": ({**DATA_FSDP, "fsdp_strategy": "optimizer"}, FOUR, {}, 4),
    "weights gathered once": ({"pipeline": 2, "fsdp": 4}, FOUR, ONCE, 4),
    "weights gathered once, with tensor": (FSDP_TENSOR, FOUR, ONCE, 4),
    "optimizer, uneven": ({**FSDP_TENSOR, "fsdp_strategy": "optimizer"}, UNEVEN, {"layers_per_stage": [2, 3]}, 4),
    "grads": ({**DATA_FSDP, "fsdp_strategy": "grads"}, FOUR, {}, 4),
    "grads, interleaved, tied": ({**FSDP_TENSOR, "fsdp_strategy": "grads"}, TIED, INTERLEAVED, 4),
    "grads, biases, uneven": (
        {**FSDP_TENSOR, "fsdp_strategy": "grads"},
        GPT2,
        {"layers_per_stage": "balanced"},
        2,
    ),
    "gemma": ({"pipeline": 2, "tensor": 2}, {"family": "gemma", "num_layers": 4, "tie_embeddings": True}, {}, 2),
    "tied": ({"pipeline": 4, "tensor": 2}, TIED, {}, 4),
}
CASE = ("mesh", "model", "pipeline", "microbatches")
"""Parameters of a test of one of these."""


def config_of(mesh, model, pipeline, microbatches, compute="float32"):
    rows = {"microbatches": microbatches, "global_batch_size": 4 * microbatches}
    precision = {"compute": compute}
    return parity_config(mesh, model=dict(model_key(model)), train=rows, pipeline=pipeline, precision=precision)


def check(mesh, model, pipeline, microbatches):
    config = config_of(mesh, model, pipeline, microbatches)
    assert_same(train(build(config)), single_device(model_key(model), microbatches, "full", 4 * microbatches))


@pytest.mark.parametrize(CASE, QUICK.values(), ids=QUICK)
def test_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)


@pytest.mark.proof
@pytest.mark.parametrize(CASE, FULL.values(), ids=FULL)
def test_every_pipeline_equals_one_device(mesh, model, pipeline, microbatches):
    check(mesh, model, pipeline, microbatches)


@jax.custom_vjp
def kernel(q, k, v, starts):
    """Attention whose gradient rule, like those of fused kernels, does not say over which axes its results vary."""
    index = jnp.arange(q.shape[1])
    mask = (index[None, None] >= starts[:, :, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")


def kernel_backward(kept, cotangent):
    *qkv, starts = kept
    return *jax.vjp(lambda *qkv: kernel.__wrapped__(*qkv, starts), *qkv)[1](cotangent), None


kernel.defvjp(lambda *args: (kernel(*args), args), kernel_backward)


def test_fused_attention_inside_stages_equals_one_device(monkeypatch):
    monkeypatch.setattr("jaxpar.program.choose_attention", lambda *_: KernelChoice(kernel="fake", reason=""))
    monkeypatch.setattr("jaxpar.model.attention.fused_attention", lambda _, *arguments: kernel(*arguments))
    check(*QUICK["1f1b with data"])


@functools.cache
def validated(mesh, pipeline):
    """Sums of the validation step on initial parameters."""
    program = build(config_of(dict(mesh), TIED, dict(pipeline), 2))

    def step(params, batch):
        with matmul_precision(program.config):
            return program.evaluate(params, batch)

    with jax.set_mesh(program.mesh):
        sums = jax.jit(step)(program.init(0).params, placed(program, random_batch(program.config)))
    return jax.device_get(sums)


def test_validation_through_stages_equals_that_on_one_device():
    expected = validated((), ())
    found = validated(tuple(FSDP_TENSOR.items()), tuple(INTERLEAVED.items()))
    assert found["tokens"] == expected["tokens"] == random_batch(config_of({}, TIED, {}, 2))["weights"].sum()
    np.testing.assert_allclose(found["cross_entropy"], expected["cross_entropy"], rtol=1e-6)


@pytest.mark.proof
def test_gradients_of_whole_weights_are_added_up_in_float32():
    """Sums of 16 microbatches in bfloat16 would be off by some 5e-4 in every gradient."""

    def grads(gather):
        config = config_of({"pipeline": 2, "fsdp": 2}, {"num_layers": 2}, {"gather": gather}, 16, compute="bfloat16")
        return train(build(config), num_steps=1).grads

    errors = gradient_errors(grads("per_step"), grads("per_microbatch"))
    assert np.median(list(errors.values())) <= 1e-5, errors


@pytest.mark.proof
def test_bfloat16_through_stages_is_near_that_on_one_device():
    def losses(mesh, pipeline):
        return train(build(config_of(mesh, TIED, pipeline, 2, compute="bfloat16"))).losses

    staged = losses({"pipeline": 2, "data": 2, "tensor": 2}, INTERLEAVED)
    np.testing.assert_allclose(staged, losses({}, {}), rtol=5e-3)
