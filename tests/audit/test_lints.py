"""Each lint finds its fault in a program that has it."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit import (
    ArrayType,
    audit,
    gathers_of_stacked_weights,
    gathers_outside_loops,
    synchronous_collectives,
    unwanted_wire_dtypes,
    weight_sized_all_reduces,
)

LAYERS, ROWS, EMBED = 8, 16, 32
WEIGHT_BYTES = EMBED * EMBED * 4
H100 = Path(__file__).parent / "h100"


def make_mesh(axis_type, **sizes):
    devices = np.array(jax.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(sizes))


def compile_step(loss, mesh, weight_spec, batch_spec):
    """Compiles the gradient of ``loss(weights[L, D, D], x[B, D])``."""
    weights = jax.ShapeDtypeStruct((LAYERS, EMBED, EMBED), jnp.float32, sharding=NamedSharding(mesh, weight_spec))
    x = jax.ShapeDtypeStruct((ROWS, EMBED), jnp.float32, sharding=NamedSharding(mesh, batch_spec))
    gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, weight_spec))
    with jax.set_mesh(mesh):
        return audit(gradient.lower(weights, x).compile(), mesh=mesh)


def constrained_loss(mesh, *, hoisted):
    """The loss in automatic mode; the gather is a sharding constraint, in the loop or before it."""

    def constrain(array, *spec):
        return lax.with_sharding_constraint(array, NamedSharding(mesh, P(*spec)))

    def layer(x, weight):
        whole = weight if hoisted else constrain(weight)
        return constrain(jnp.tanh(x @ whole), "fsdp"), None

    def loss(weights, x):
        stack = constrain(weights) if hoisted else weights
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, stack)[0] ** 2)

    return loss


def test_gather_of_the_whole_stack_is_found():
    mesh = make_mesh(AxisType.Auto, fsdp=8)
    report = compile_step(constrained_loss(mesh, hoisted=True), mesh, P(None, "fsdp"), P("fsdp"))
    (stacked,) = gathers_of_stacked_weights(report, num_layers=LAYERS)
    assert stacked.collective.bytes == LAYERS * WEIGHT_BYTES
    assert "f32[8,32,32]" in str(stacked)
    assert "over fsdp (8 devices)" in str(stacked)
    (outside,) = gathers_outside_loops(report, max_bytes=WEIGHT_BYTES)
    assert outside.collective == stacked.collective
    assert gathers_outside_loops(report, max_bytes=LAYERS * WEIGHT_BYTES) == ()


def test_one_array_of_a_combined_gather_must_be_the_stack():
    """As many heads as layers in one array, and enough bytes in another, are no stack."""
    mesh = make_mesh(AxisType.Auto, fsdp=8)
    report = compile_step(constrained_loss(mesh, hoisted=True), mesh, P(None, "fsdp"), P("fsdp"))
    (found,) = report.select("all-gather", min_bytes=LAYERS * WEIGHT_BYTES)
    projection, mlp = ArrayType("f32", (32, LAYERS, 4)), ArrayType("f32", (32, 32 * LAYERS))
    combined = dataclasses.replace(report, collectives=(dataclasses.replace(found, arrays=(projection, mlp)),))
    assert gathers_of_stacked_weights(combined, num_layers=LAYERS, min_bytes=LAYERS * WEIGHT_BYTES) == ()
    assert gathers_of_stacked_weights(report, num_layers=LAYERS, min_bytes=LAYERS * WEIGHT_BYTES)


def test_gather_per_layer_is_clean():
    """Eight layers: the per-layer gather is in the loop body, and nothing of shape (L, D, D) is gathered."""
    mesh = make_mesh(AxisType.Auto, fsdp=8)
    report = compile_step(constrained_loss(mesh, hoisted=False), mesh, P(None, "fsdp"), P("fsdp"))
    assert gathers_of_stacked_weights(report, num_layers=LAYERS) == ()
    assert gathers_outside_loops(report, max_bytes=0) == ()
    forward, *_ = report.per_layer(LAYERS)
    assert forward.counts == {("all-gather", ("fsdp",)): 1}


def test_all_reduce_of_whole_gradients_is_found():
    """In automatic mode the CPU compiler all-reduces the whole gradient and keeps a slice."""
    mesh = make_mesh(AxisType.Auto, data=2, fsdp=4)
    report = compile_step(constrained_loss(mesh, hoisted=False), mesh, P(None, "fsdp"), P("fsdp"))
    findings = weight_sized_all_reduces(report, weight_bytes=WEIGHT_BYTES)
    assert findings
    assert all("reduce-scatter" in finding.message for finding in findings)
    assert all(finding.collective.bytes >= WEIGHT_BYTES for finding in findings)
    assert weight_sized_all_reduces(report, weight_bytes=WEIGHT_BYTES, shard_axes=("expert",)) == ()
    dims = {array.dims for finding in findings for array in finding.collective.arrays}
    assert weight_sized_all_reduces(report, weight_bytes=WEIGHT_BYTES, whole=dims) == ()
    assert weight_sized_all_reduces(report, weight_bytes=WEIGHT_BYTES, whole={(1,)}) == findings


def island_report(function, mesh, text_only=False):
    x = jax.ShapeDtypeStruct((ROWS, EMBED), jnp.float32, sharding=NamedSharding(mesh, P()))
    island = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(island).lower(x).compile()
    return audit(compiled.as_text()) if text_only else audit(compiled, mesh=mesh)


def test_all_reduces_over_other_axes_are_legitimate():
    """Hybrid sharding all-reduces gradient shards over data; row-parallel products sum over tensor."""
    mesh = make_mesh(AxisType.Explicit, data=2, fsdp=2, tensor=2)
    report = island_report(lambda x: lax.psum(lax.psum(x, "data"), "tensor"), mesh)
    assert report.count("all-reduce") == 2
    assert weight_sized_all_reduces(report, weight_bytes=1) == ()


def test_an_all_reduce_over_unknown_axes_is_not_cleared():
    mesh = make_mesh(AxisType.Explicit, data=8)

    def function(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])

    (finding,) = weight_sized_all_reduces(island_report(function, mesh, text_only=True), weight_bytes=1)
    assert "unknown axes (pass mesh=)" in finding.message
    assert weight_sized_all_reduces(island_report(function, mesh), weight_bytes=1) == ()


@pytest.mark.parametrize(("cast_first", "rows", "findings"), [(True, "bf16", 0), (False, "f32", 1)])
def test_a_gather_in_a_wider_type_than_the_weights_is_found(cast_first, rows, findings):
    mesh = make_mesh(AxisType.Explicit, fsdp=8)

    def function(x):
        if cast_first:
            # Bits, so that the CPU compiler, which has no bf16 arithmetic, cannot move the cast.
            bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
            whole = lax.all_gather(bits, "fsdp", axis=0, tiled=True)
            return lax.bitcast_convert_type(whole, jnp.bfloat16)
        return lax.all_gather(x, "fsdp", axis=0, tiled=True).astype(jnp.bfloat16)

    report = island_report(function, mesh)
    found = unwanted_wire_dtypes(report, allowed={"bf16", "u16"}, op="all-gather")
    assert len(found) == findings
    assert all(f"all-gather of {rows}[128,32]" in finding.message for finding in found)


def test_collectives_that_nothing_hides_are_found():
    """The recorded H100 program has two synchronous ones, and an async one with nothing before its end."""
    report = audit((H100 / "each_collective.hlo").read_text())
    findings = {
        (finding.collective.op, finding.message.rpartition(", ")[2]) for finding in synchronous_collectives(report)
    }
    assert findings == {
        ("all-to-all", "which is not async"),
        ("all-reduce", "which is not async"),
        ("ragged-all-to-all", "with no compute between its start and its end"),
    }
    assert synchronous_collectives(report, min_bytes=2**30) == ()
