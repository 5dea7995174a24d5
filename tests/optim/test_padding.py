"""Padded layers and vocabulary: their gradients are exactly 0, and no optimizer makes anything else of them.

An optimizer that divides by a gradient's size (all but sgd) would take a full step from the smallest rounding error.
"""

import dataclasses
import typing
from functools import partial

import jax
import numpy as np
import pytest

from jaxpar import resume
from jaxpar.checkpoint.paths import leaves_by_path, path_string
from jaxpar.config.schema import OptimConfig
from jaxpar.experiments.parity import packed_batch
from jaxpar.optim import make_optimizer
from jaxpar.state import fresh_state
from jaxpar.step import update
from tests.parity.harness import build, parity_config, placed

OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimConfig)["name"])
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def program():
    """Two stages share three layers: one is padded; and so is the vocabulary."""
    return build(
        parity_config(
            {"pipeline": 2, "fsdp": 2},
            model={"num_layers": NUM_LAYERS},
            pipeline={"layers_per_stage": "balanced"},
            train={"microbatches": 4, "global_batch_size": 8},
        )
    )


@pytest.fixture(scope="module")
def gradients(program):
    params = program.init(0).params
    with jax.set_mesh(program.mesh):
        return jax.jit(program.accumulate)(params, placed(program, packed_batch(program.config)))


def padding(program, sections) -> dict[str, np.ndarray]:
    """Padded leaves by name, with 0 where they are not padded."""
    shapes = resume.stored_shapes(program, sections)
    found = {}
    for section, tree in sections.items():
        for path, leaf in leaves_by_path(tree, section).items():
            name, leaf = path_string(section, path), np.array(leaf)
            true = shapes.get(name, leaf.shape)
            if true != leaf.shape:
                leaf[tuple(slice(size) for size in true)] = 0
                found[name] = leaf
    return found


@pytest.mark.proof
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero(program, gradients, name):
    grads, metrics = gradients
    padded = padding(program, {"params": grads})
    assert {"params/embedding", "params/head", "params/layers/q", "params/layers/attention_norm"} <= padded.keys()
    assert not any(leaf.any() for leaf in padded.values())
    optim = dataclasses.replace(
        program.config.optim, name=name, b1=None, b2=None, eps=None, lr=0.1, warmup_steps=0, weight_decay=0.1
    )
    config = dataclasses.replace(program.config, optim=optim)
    axes, vocab_size = program.definition.logical_axes, program.config.model.vocab_size
    optimizer = make_optimizer(optim, axes, vocab_size=vocab_size)
    with jax.set_mesh(program.mesh):
        state = jax.jit(partial(fresh_state, optimizer=optimizer))(program.init(0).params)
        step = jax.jit(partial(update, config, optimizer))
        before = np.asarray(state.params["layers"]["q"])
        for _ in range(2):
            state, _ = step(state, grads, metrics)
    assert np.abs(np.asarray(state.params["layers"]["q"]) - before)[:NUM_LAYERS].min(axis=(1, 2, 3)).all()
    for leaf_name, leaf in padding(program, state.sections).items():
        # Adafactor adds its eps to squares, and does not know which layers are padded.
        most = 1e-30 if name == "adafactor" and leaf_name.startswith("optimizer") else 0
        assert np.abs(leaf).max() <= most, leaf_name
