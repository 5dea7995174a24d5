"""Deliberate faults of the pipeline executor and of the way onto the stages: each must break a comparison.

Faults in tables are in ``tests/schedule/test_schedule_check.py``.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar.pipeline
import jaxpar.placement
import jaxpar.stages
from jaxpar.pipeline import _Pipeline
from jaxpar.placement import NOTHING, Placement
from jaxpar.stages import StagedDecoder
from tests.model.test_dropout import alone, assert_alike, trained
from tests.mutants.test_mutants import scaled_where_partial, scattering_twice_as_much
from tests.pipeline.test_pipeline_parity import assert_parity
from tests.pipeline.test_pipeline_training import INTERLEAVED, check

pytestmark = pytest.mark.proof

CHUNKED = ("interleaved", {"pipeline": 2, "data": 2}, 5, 3, 2, "balanced")
GPIPE = ("gpipe", {"pipeline": 3}, 3, 3)
"""With more than one gradient slot, and a ring that has two directions."""

HONEST = dict(vars(_Pipeline))
"""The methods before any fault."""


def method(name, fault):
    """A method replaced by ``fault(honest, self, *arguments)``."""

    def inject(monkeypatch):
        honest = HONEST[name]
        monkeypatch.setattr(_Pipeline, name, lambda self, *arguments: fault(honest, self, *arguments))

    return inject


def column(name, change):
    """The backward lane reads a column of its table changed."""

    def fault(honest, self, runs, carry, mine, *rest):
        return honest(self, runs, carry, {**mine, name: change(mine[name], self.index)}, *rest)

    return method("_backward_lane", fault)


def masks_ignored(honest, self, *arguments):
    present = [jnp.ones_like(leaf) for leaf in self.weights.others]
    self.weights = dataclasses.replace(self.weights, others=present)
    return honest(self, *arguments)


def not_added_up(honest, self, runs, carry, *rest):
    """A microbatch's weight gradients in place of those before it."""
    after, dx = honest(self, runs, carry, *rest)
    fresh = [new - old for new, old in zip(after.weight_grads, carry.weight_grads, strict=True)]
    ran = jnp.any(jnp.stack([jnp.any(leaf != 0) for leaf in fresh]))
    kept = [jnp.where(ran, new, old) for new, old in zip(fresh, carry.weight_grads, strict=True)]
    return after._replace(weight_grads=kept), dx


def without_aux(honest, self, *arguments):
    (y, aux), sums = honest(self, *arguments)
    return (y, 0 * aux), sums


def halved_over_replicas(x, axes, honest=jaxpar.pipeline.unreduced):
    return honest(x * (0.5 if axes == {"data"} else 1), axes)


EXECUTOR_FAULTS = {
    "the loss gradient doubled": (
        CHUNKED,
        method("_put_loss_gradient", lambda honest, self, slots, dy, slot: honest(self, slots, 2 * dy, slot)),
    ),
    "gradients averaged over replicas": (
        CHUNKED,
        lambda m: m.setattr(jaxpar.pipeline, "unreduced", halved_over_replicas),
    ),
    "one stage takes the side inputs of the microbatch before": (
        CHUNKED,
        method("_own_side", lambda honest, self, m: honest(self, m - jnp.where(self.index == 1, 1, 0))),
    ),
    "the backward lane reads another chunk's weights": (CHUNKED, column("backward_chunk", lambda chunk, _: 1 - chunk)),
    "padded layers are not masked": (CHUNKED, method("_chunk", masks_ignored)),
    "units that do not run count": (
        CHUNKED,
        column("backward_microbatch", lambda microbatch, _: jnp.maximum(microbatch, 0)),
    ),
    "weight gradients of the last microbatch alone": (CHUNKED, method("_backward_lane", not_added_up)),
    "aux dropped": (CHUNKED, method("_chunk", without_aux)),
    "the loss is of another stage's output": (CHUNKED, method("_last_stage", lambda _, self, y: self._of_stage(0, y))),
    "the embedding's gradient is of another stage": (
        CHUNKED,
        method("_of_stage", lambda honest, self, _, value: honest(self, 1, value)),
    ),
    "the embedding has no gradient": (
        CHUNKED,
        method("_embed_grad_lane", lambda _, self, microbatch, carry, dx: carry),
    ),
    "every stage starts from the embedding": (
        CHUNKED,
        method("_input", lambda _, self, m, embedded, slots, slot: jnp.where(m >= 0, embedded, slots[slot])),
    ),
    "the ring runs backward": (GPIPE, method("_send", lambda honest, self, x, step: honest(self, x, -step))),
    "a gradient slot overwritten": (
        GPIPE,
        method("_put_loss_gradient", lambda honest, self, *rest: honest(self, *rest[:-1], jnp.minimum(rest[-1], 0))),
    ),
    "an activation slot overwritten": (
        CHUNKED,
        method(
            "_advance",
            lambda honest, self, slots, arrival, mine, shared: honest(
                self, slots, arrival, {**mine, "activation_arrival": 0 * mine["activation_arrival"]}, shared
            ),
        ),
    ),
    "a gradient slot misread": (GPIPE, column("gradient_slot", lambda slot, _: jnp.minimum(slot, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", EXECUTOR_FAULTS)
def test_executor_fault_breaks_parity(name, monkeypatch):
    case, inject = EXECUTOR_FAULTS[name]
    inject(monkeypatch)
    with pytest.raises(AssertionError):
        assert_parity(*case)


def test_no_fault_no_difference():
    """What the faults break holds without them."""
    assert_parity(*CHUNKED)
    assert_parity(*GPIPE)


STEP = ({"pipeline": 2}, {"num_layers": 5}, {**INTERLEAVED, "layers_per_stage": "balanced"}, 2)


class Misplaced(Placement):
    """Every stage's chunks in the wrong order, and back again."""

    def __init__(self, split, num_kept):
        turned = {name: getattr(split, name)[::-1].copy() for name in ("counts", "layer_of_place")}
        super().__init__(dataclasses.replace(split, **turned), num_kept)


def padding_filled(held, source, honest=jaxpar.placement._redistribute):
    return honest(held, np.where(source == NOTHING, 0, source))


STEP_FAULTS = {
    "chunks swapped": lambda m: m.setattr(jaxpar.stages, "Placement", Misplaced),
    "gradients return to the next layer": lambda m: m.setattr(
        Placement,
        "from_stages",
        lambda self, placed, honest=Placement.from_stages: honest(self, jnp.roll(placed, 1, axis=0)),
    ),
    "padded layers have gradients": lambda m: m.setattr(jaxpar.placement, "_redistribute", padding_filled),
    "padded layers run": lambda m: m.setattr(
        StagedDecoder,
        "_tables",
        lambda self, honest=StagedDecoder._tables: {**honest(self), jaxpar.stages._PRESENT: None},
    ),
    "loss without its z-loss": lambda m: m.setattr(
        jaxpar.stages,
        "hidden_loss",
        lambda *args, honest=jaxpar.stages.hidden_loss, **options: honest(*args, **{**options, "z_loss": 0.0}),
    ),
}


def whole(mesh, strategy):
    """A step that gathers its weights once, on two stages."""
    return {**mesh, "fsdp_strategy": strategy}, {}, {}, 2


WEIGHT_FAULTS = {
    "gradients counted twice at the end of the step": (
        whole({"pipeline": 2, "fsdp": 2}, "optimizer"),
        ("jaxpar.strategy.scatter_gradient", scattering_twice_as_much),
    ),
    "gradients of held weights counted twice": (
        whole({"pipeline": 2, "fsdp": 2}, "grads"),
        ("jaxpar.collectives.scatter_gradient", scattering_twice_as_much),
    ),
    "partial sums over replicas halved": (
        whole({"pipeline": 2, "data": 2, "fsdp": 2}, "optimizer"),
        ("jaxpar.strategy.finish_reduction", scaled_where_partial(0.5)),
    ),
}


@pytest.mark.parametrize("name", WEIGHT_FAULTS)
def test_fault_of_whole_weights_breaks_parity(name, monkeypatch):
    case, fault = WEIGHT_FAULTS[name]
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError):
        check(*case)


def test_layers_numbered_by_stage_drop_something_else(monkeypatch):
    honest = StagedDecoder._tables

    def by_stage(self):
        tables = honest(self)
        return {**tables, jaxpar.stages._NUMBERS: 0 * tables[jaxpar.stages._NUMBERS]}

    monkeypatch.setattr(StagedDecoder, "_tables", by_stage)
    with pytest.raises(AssertionError):
        assert_alike(trained({"pipeline": 2}, "full", 2), alone())


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_step_fault_breaks_parity(name, monkeypatch):
    STEP_FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check(*STEP)
