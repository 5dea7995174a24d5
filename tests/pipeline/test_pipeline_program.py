"""What the compiled pipeline program holds: lanes under conditionals, two transfers outside of them, one forward pass
done again, and memory that does not grow with the microbatches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit import audit
from jaxpar.mesh import make_mesh
from jaxpar.pipeline import value_and_grad
from jaxpar.schedule import build_schedule

D = 64


def embed(ends, side):
    return ends["in"] * side


def stage(weights, x, side):
    return jnp.tanh(x @ weights), 0.0, {}


def loss(ends, y, side):
    return jnp.sum((y @ ends["out"]) ** 2), {}


def lowered(schedule, *, mesh_stages=None, embed=embed, stage=stage, loss=loss, replica_axes=()):
    """One layer per chunk: ``tanh`` of a product, which is not differentiated into another ``tanh``."""
    stages = mesh_stages or schedule.num_stages
    mesh = make_mesh({"pipeline": stages}, jax.devices()[:stages])
    shape = (schedule.num_chunks, stages, D, D)
    rows = (schedule.num_microbatches, 8, D)
    with jax.set_mesh(mesh):
        weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, "pipeline")))
        whole = NamedSharding(mesh, P())
        ends = {
            "in": jax.ShapeDtypeStruct((D,), jnp.float32, sharding=whole),
            "out": jax.ShapeDtypeStruct((D, D), jnp.float32, sharding=whole),
        }
        sides = jax.ShapeDtypeStruct(rows, jnp.float32, sharding=whole)
        run = value_and_grad(schedule, embed=embed, stage=stage, loss=loss, replica_axes=replica_axes)
        return jax.jit(run).lower(weights, ends, sides)


def test_forward_runs_once_per_lane_and_transfers_stand_outside_the_conditionals():
    schedule = build_schedule("1f1b", num_stages=4, num_microbatches=6)
    compiled = lowered(schedule).compile()
    text = compiled.as_text()
    # The forward lane, and the backward lane that does it again: nothing computes it a third time.
    assert len(re.findall(r" tanh\(", text)) == 2
    # Embedding, forward, loss, embedding again, backward, gradient of the embedding.
    assert len(re.findall(r" conditional\(", text)) == 6
    permutes = [c for c in audit(compiled).collectives if c.op == "collective-permute"]
    assert len(permutes) == 2
    (loop,) = {permute.loops for permute in permutes}
    assert [step.trips for step in loop] == [schedule.num_ticks]


def temp_bytes(kind, microbatches):
    schedule = build_schedule(kind, num_stages=4, num_microbatches=microbatches)
    return lowered(schedule).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_1f1b_does_not_grow_with_microbatches():
    few, many = temp_bytes("1f1b", 4), temp_bytes("1f1b", 32)
    assert many <= 1.1 * few
    # The check can fail: gpipe keeps 32 microbatches of 8 x D floats, activations and gradients.
    assert temp_bytes("gpipe", 32) >= many + 2 * 24 * 8 * D * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh_stages": 2}, "the schedule has 4 stages, but mesh axis pipeline has 2"),
        ({"stage": lambda w, x, side: ((x @ w).astype(jnp.bfloat16), 0.0, {})}, "stage must return what embed does"),
        ({"loss": lambda ends, y, side: (jnp.sum(y, 0), {})}, "loss must return a scalar"),
        (
            {"loss": lambda ends, y, side: (jnp.sum(y) * jax.lax.axis_index("pipeline"), {})},
            "the same on all stages",
        ),
        ({"replica_axes": ("data",)}, r"neither sharded nor reduced over the replica axes \['data'\]"),
    ],
)
def test_functions_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lowered(build_schedule("1f1b", num_stages=4, num_microbatches=4), **change)


def test_units_that_run_on_garbage_leave_no_trace():
    """Idle stages compute on what lies in their slots; even infinities there must not reach any sum."""
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    mesh = make_mesh({"pipeline": 2}, jax.devices()[:2])

    def fragile(weights, x, side):
        y = x / jnp.where(jnp.any(x != 0), weights, 0.0)  # infinite, or not a number, for an empty slot
        return y, 0.0, {"total": jnp.sum(y)}

    with jax.set_mesh(mesh):
        place = lambda array, spec: jax.device_put(np.float32(array), NamedSharding(mesh, spec))  # noqa: E731
        result = jax.jit(value_and_grad(schedule, embed=embed, stage=fragile, loss=loss))(
            place(np.full((1, 2, D), 2.0), P(None, "pipeline")),
            {"in": place(np.ones(D), P()), "out": place(np.eye(D), P())},
            place(np.ones((2, 8, D)), P()),
        )
    assert result.loss == pytest.approx(2 * 8 * D / 16)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(result)))


def test_gradients_are_added_up_in_the_type_that_is_asked_for():
    """300 microbatches with the same gradient, 8: a sum of bfloat16 would stop at 256 of them."""
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=300)
    mesh = make_mesh({"pipeline": 2}, jax.devices()[:2])
    functions = {
        "embed": lambda ends, side: ends * side,
        "stage": lambda weights, x, side: (x * weights, 0.0, {}),
        "loss": lambda ends, y, side: (jnp.sum(y.astype(jnp.float32)), {}),
    }
    with jax.set_mesh(mesh):
        ones = lambda shape, spec: jax.device_put(jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, spec))  # noqa: E731
        run = jax.jit(value_and_grad(schedule, **functions, sum_dtype=jnp.dtype("float32")))
        result = run(ones((1, 2, D), P(None, "pipeline")), ones(D, P()), ones((300, 8, D), P()))
    for grads in (result.weight_grads, result.end_grads):
        assert grads.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(grads), 8 * 300)
