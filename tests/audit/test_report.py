"""The report of a whole step: a layer scan with sharded weights, gathered per layer in islands."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxpar.audit import (
    audit,
    gathers_of_stacked_weights,
    gathers_outside_loops,
    synchronous_collectives,
    unwanted_wire_dtypes,
    weight_sized_all_reduces,
)

LAYERS, ROWS, EMBED, MLP = 6, 16, 32, 64
WEIGHT_BYTES = EMBED * MLP * 4
H100 = Path(__file__).parent / "h100"


def gather(weight, spec):
    """One weight of one layer, whole, in an island whose transpose is a reduce-scatter."""
    dim = spec.index("fsdp")
    whole = P(*(None if axis == "fsdp" else axis for axis in spec), reduced={"fsdp"})
    island = jax.shard_map(
        lambda shard: lax.all_gather(shard, "fsdp", axis=dim, tiled=True, to="reduced"),
        in_specs=P(*spec),
        out_specs=whole,
    )
    return island(weight)


def layer(x, weights):
    """Batch sharded over fsdp; x[B, D], up[D, F], down[F, D]."""
    hidden = jax.nn.silu(x @ gather(weights["up"], ("fsdp", None)))
    return x + hidden @ gather(weights["down"], (None, "fsdp")), None


def loss(weights, x):
    return jnp.mean(lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)


def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def shapes(mesh):
    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    weights = {"up": array((LAYERS, EMBED, MLP), None, "fsdp"), "down": array((LAYERS, MLP, EMBED), None, None, "fsdp")}
    return weights, array((ROWS, EMBED), "fsdp")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def compiled(mesh):
    with jax.set_mesh(mesh):
        return jax.jit(step, donate_argnums=0).lower(*shapes(mesh)).compile()


@pytest.fixture(scope="module")
def report(compiled):
    return audit(compiled)


def test_each_layer_gathers_its_weights_and_scatters_its_gradients(report):
    forward, backward = report.per_layer(LAYERS)
    assert (forward.is_backward, backward.is_backward) == (False, True)
    assert forward.counts == {("all-gather", ("fsdp",)): 2}
    assert backward.counts == {("all-gather", ("fsdp",)): 2, ("reduce-scatter", ("fsdp",)): 2}
    assert forward.wire_bytes == 2 * WEIGHT_BYTES * 7 / 8
    assert {found.bytes for found in report.select("reduce-scatter")} == {WEIGHT_BYTES // 8}
    assert report.count("all-gather", axes="fsdp", in_loop=True, is_backward=False) == 2
    assert report.count("all-gather", axes=("fsdp",), in_loop=False) == 0
    assert report.count("all-gather", axes="tensor") == 0


def test_bytes_and_flops_of_a_step(report):
    moved = LAYERS * 6 * WEIGHT_BYTES * 7 / 8
    (loss_sum,) = report.select("all-reduce")
    assert report.wire_bytes_per_step() == moved + loss_sum.wire_bytes
    assert report.wire_bytes_per_step("reduce-scatter") == moved / 3
    # One product per weight forward, one recomputed (the last of a layer is not needed again), two per weight backward.
    assert report.matmul_flops == LAYERS * (2 + 1 + 4) * 2 * (ROWS // 8) * EMBED * MLP


def test_memory_is_the_compilers(report, compiled):
    stats = compiled.memory_analysis()
    assert report.memory.argument == stats.argument_size_in_bytes
    # Donated weights are given back in place.
    assert report.memory.alias == 2 * LAYERS * WEIGHT_BYTES // 8
    assert report.memory.temp > 0
    assert report.memory.total >= report.memory.argument + report.memory.temp


def test_report_as_json_and_as_a_table(report, compiled):
    fields = json.loads(json.dumps(report.to_dict()))
    assert fields["wire_bytes_per_step"] == report.wire_bytes_per_step()
    assert len(fields["collectives"]) == report.count()
    assert fields["memory"]["temp"] == report.memory.temp
    screen = io.StringIO()
    Console(file=screen, width=160).print(report.table())
    rows = [line for line in screen.getvalue().splitlines() if "all-gather" in line]
    assert len(rows) == 1, "gathers of one kind share a row"
    assert all(cell in rows[0] for cell in ("fsdp", "f32", f"loop x{LAYERS}", " 4 ", "0.008"))
    text_only = audit(compiled.as_text())
    assert text_only.collectives == report.collectives
    assert text_only.memory is None


def test_a_wrong_mesh_is_refused(compiled):
    wrong = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    with pytest.raises(ValueError, match=r"4 devices but the program was compiled for 8"):
        audit(compiled, mesh=wrong)


def test_a_good_step_has_no_findings(report):
    assert weight_sized_all_reduces(report, weight_bytes=WEIGHT_BYTES) == ()
    assert gathers_of_stacked_weights(report, num_layers=LAYERS) == ()
    assert gathers_outside_loops(report, max_bytes=0) == ()
    assert unwanted_wire_dtypes(report, allowed={"f32"}) == ()


def test_h100_step_with_pipelined_scatters():
    """Recorded from the CUDA compiler: six layers, bf16 on the wire, the backward loop peeled to five."""
    report = audit((H100 / "fsdp_layers.hlo").read_text())
    weight = 2048 * 4096 * 2
    forward, backward = report.per_layer(6)
    assert (forward.loop.trips, forward.counts) == (6, {("all-gather", ("fsdp",)): 2})
    # The compiler combines both gradients of a layer into one reduce-scatter.
    assert backward.loop.trips == 5
    assert backward.is_backward
    assert backward.counts == {("all-gather", ("fsdp",)): 2, ("reduce-scatter", ("fsdp",)): 1}
    assert [found.bytes for found in report.select("reduce-scatter")] == [2 * weight // 8] * 2
    assert report.wire_bytes_per_step(axes="fsdp") == 36 * weight * 7 / 8 + 7
    assert [found.compute_between for found in forward.collectives] == [1, 3]
    assert report.matmul_flops == 6 * (2 + 1 + 4) * 2 * 2048 * 2048 * 4096
    assert synchronous_collectives(report) == ()
    assert unwanted_wire_dtypes(report, allowed={"bf16"}, min_bytes=1024) == ()
    assert weight_sized_all_reduces(report, weight_bytes=weight) == ()


CUBLAS = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[4,512,256], y: bf16[4,128,256]) -> bf16[4,512,128] {
  %x.1 = bf16[4,512,256]{2,1,0} parameter(0)
  %y.1 = bf16[4,128,256]{2,1,0} parameter(1)
  %custom-call.1 = (bf16[4,512,128]{2,1,0}, s8[4194304]{0}) custom-call(%x.1, %y.1), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}
  ROOT %z = bf16[4,512,128]{2,1,0} get-tuple-element(%custom-call.1), index=0
}
"""


def test_products_that_became_cublas_calls_are_counted():
    """Recorded from the CUDA compiler, shortened; a batched product with its workspace as a second result."""
    assert audit(CUBLAS).matmul_flops == 2 * 4 * 512 * 128 * 256
