"""Each lint of a whole program finds its fault in a program that has it, and nothing in one that has not."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit import CompilerWarnings, MemoryUse, ProgramReport, Rematerialization, audit
from jaxpar.audit.program_lints import (
    exposed_collectives,
    gather_storms,
    hidden_share,
    masked_products,
    memory_above_budget,
    recompiles,
    rematerializations,
    replicated_arrays,
)

H100 = Path(__file__).parent / "h100"
LAYERS, EMBED = 5, 32


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Explicit,))


def layer_loop(mesh, pieces):
    """Five layers, each of whose one weight is gathered in so many pieces."""

    def local(x, weights):
        def layer(x, weight):
            parts = jnp.split(weight, pieces, axis=1)
            whole = jnp.concatenate([lax.all_gather(part, "fsdp", axis=0, tiled=True) for part in parts], axis=1)
            return jnp.tanh(x @ whole), None

        return lax.scan(layer, x, weights)[0]

    weights = jax.ShapeDtypeStruct((LAYERS, EMBED, EMBED), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    x = jax.ShapeDtypeStruct((16, EMBED), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    step = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P("fsdp"))
    return audit(jax.jit(step).lower(x, weights).compile(), mesh)


def test_storm_of_gathers(mesh):
    (storm,) = gather_storms(layer_loop(mesh, 4), num_layers=LAYERS, matrices_per_layer=1)
    assert "4 times per layer, which has 1 matrices" in str(storm)
    assert gather_storms(layer_loop(mesh, 1), num_layers=LAYERS, matrices_per_layer=1) == ()


def test_exposed_collectives_of_the_h100_program():
    """Two synchronous ones and one that is async with nothing before its end; small ones can be let through."""
    report = audit((H100 / "each_collective.hlo").read_text())
    exposed = {finding.collective.name for finding in exposed_collectives(report, min_share=0)}
    hidden = {found.name for found in report.collectives if found.compute_between}
    assert exposed
    assert exposed == {found.name for found in report.collectives} - hidden
    largest = max(found.wire_bytes * found.trips for found in report.collectives if found.name in exposed)
    above = 1.01 * largest / report.wire_bytes_per_step()
    assert exposed_collectives(report, min_share=above) == ()
    sent = sum(found.wire_bytes * found.trips for found in report.collectives if found.name in hidden)
    assert hidden_share(report) == pytest.approx(sent / report.wire_bytes_per_step())
    assert hidden_share(dataclasses.replace(report, collectives=())) == 1


def test_masked_dense_product_instead_of_grouped():
    """``lax.ragged_dot`` has no grouped kernel on the CPU: every token meets every expert's weights."""
    tokens, experts, width = 64, 8, 32

    def product(x, weights, sizes):
        return lax.ragged_dot(x, weights, sizes)

    arguments = (jnp.ones((tokens, width)), jnp.ones((experts, width, width)), jnp.full((experts,), tokens // experts))
    compiled = jax.jit(product).lower(*arguments).compile()
    expected = 2 * tokens * width * width
    report = audit(compiled)
    dense = jax.jit(lambda x, w: x @ w).lower(arguments[0], arguments[1][0]).compile()
    (found,) = masked_products(report, expected_flops=expected)
    assert "8.0 times" in str(found)
    assert masked_products(audit(dense), expected_flops=expected) == ()


def test_memory_above_budget():
    report = ProgramReport((), MemoryUse(argument=10, output=0, temp=30, alias=0, peak=3 * 2**30), 0.0, ())
    (found,) = memory_above_budget(report, budget_bytes=2 * 2**30)
    assert "peak 3.0 GiB, 1.0 GiB more than the 2.0 GiB" in str(found)
    assert memory_above_budget(report, budget_bytes=3 * 2**30) == ()


def test_involuntary_rematerialization():
    seen = Rematerialization("jit(step)/sin", "sin.1", "f32[8,16]", (64, 16), "{a}", "{b}")
    (found,) = rematerializations(CompilerWarnings(rematerializations=(seen,)))
    assert "jit(step)/sin" in str(found)
    assert rematerializations(CompilerWarnings()) == ()
    (blind,) = rematerializations(CompilerWarnings(hidden_by="TF_CPP_MIN_LOG_LEVEL=2"))
    assert "TF_CPP_MIN_LOG_LEVEL=2" in str(blind)


def test_replicated_optimizer_and_embedding(mesh):
    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    good = {"embedding": array((4096, 64), None, "fsdp"), "norm": array((64,), None)}
    bad = {**good, "moments": {"embedding": array((4096, 64), None, None)}}
    assert replicated_arrays(good, mesh) == ()
    (found,) = replicated_arrays(bad, mesh)
    assert "moments.embedding float32[4096, 64]" in str(found)
    assert "not split over fsdp" in str(found)
    alone = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    everywhere = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(alone, P()))}
    assert replicated_arrays(everywhere, alone) == ()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda w: w + 1, None),
        (lambda w: w.astype(jnp.bfloat16), "bfloat16"),
        (lambda w: jax.sharding.reshard(w, P(None, None)), "P(None, None)"),
        (lambda w: w[:8], "[8, 64]"),
        (lambda w: {"w": w}, "structure"),
    ],
)
def test_a_step_that_would_compile_twice(mesh, step, text):
    state = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower(state)
    findings = recompiles(state, lowered.out_info)
    assert len(findings) == (text is not None)
    assert all(text in str(finding) and finding.rule == "more than one compile" for finding in findings)
