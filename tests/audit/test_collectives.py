"""Each collective of real compiled programs: what it is, where, over which axes, and its bytes to the byte."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.audit import audit

H100 = Path(__file__).parent / "h100"


def make_mesh(devices=None, **sizes):
    devices = np.array(jax.devices() if devices is None else devices).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def compile_island(function, mesh, *arguments):
    """Compiles a fully manual shard_map of ``function``; arguments are (shape, spec) pairs of float32."""
    specs = tuple(spec for _, spec in arguments)
    island = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    return jax.jit(island).lower(*shapes).compile()


CASES = {
    # name: (function of x[8, 16], axes, group size, result bytes, bytes sent)
    "all-gather": (lambda x: lax.all_gather(x, "fsdp", axis=0, tiled=True), ("fsdp",), 2, 1024, 512),
    "all-gather of two axes": (
        lambda x: lax.all_gather(x, ("data", "tensor"), axis=1, tiled=True),
        ("data", "tensor"),
        4,
        2048,
        1536,
    ),
    "all-reduce": (lambda x: lax.psum(x, ("fsdp", "tensor")), ("fsdp", "tensor"), 4, 512, 768),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "tensor", scatter_dimension=0, tiled=True),
        ("tensor",),
        2,
        256,
        256,
    ),
    "all-to-all": (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), ("data",), 2, 512, 256),
    "collective-permute": (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), ("data",), 2, 512, 512),
}


@pytest.mark.parametrize("name", CASES)
def test_each_collective(name):
    function, axes, group_size, result_bytes, wire_bytes = CASES[name]
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    report = audit(compile_island(function, mesh, ((8, 16), P())), mesh=mesh)
    (found,) = report.collectives
    assert found.op == name.split(" of ")[0]
    assert (found.axes, found.group_size) == (axes, group_size)
    assert (found.bytes, found.wire_bytes, found.dtypes) == (result_bytes, wire_bytes, ("f32",))
    assert (found.in_loop, found.trips, found.is_async, found.compute_between) == (False, 1, False, 0)
    assert found.op_name.startswith("jit(")
    assert Path(found.source.rpartition(":")[0]).name == "test_collectives.py"
    assert report.wire_bytes_per_step() == wire_bytes


def test_trip_counts_of_nested_scans_multiply():
    def function(x, w):
        def microbatch(carry, _):
            def layer(y, weight):
                return y @ lax.all_gather(weight, "fsdp", axis=0, tiled=True), None

            return lax.psum(lax.scan(layer, carry, w)[0], "data"), None

        return lax.scan(microbatch, x, length=3)[0]

    mesh = make_mesh(data=2, fsdp=4)
    report = audit(compile_island(function, mesh, ((4, 16), P()), ((5, 16, 16), P(None, "fsdp", None))))
    (gather,) = report.select("all-gather")
    (reduce,) = report.select("all-reduce")
    assert [loop.trips for loop in gather.loops] == [3, 5]
    assert (gather.trips, reduce.trips) == (15, 3)
    assert (gather.bytes, gather.wire_bytes) == (16 * 16 * 4, 16 * 16 * 4 * 3 / 4)
    assert report.wire_bytes_per_step() == 15 * 768 + 3 * (2 * 0.5 * 4 * 16 * 4)
    assert report.matmul_flops == 15 * 2 * 4 * 16 * 16
    # The scan over layers is inside the one over microbatches; its iterations are what one layer costs.
    (layers,) = report.per_layer(5)
    assert layers.counts == {("all-gather", ("fsdp",)): 1}


def test_collectives_over_one_device_are_dropped():
    mesh = make_mesh(data=1, fsdp=8)
    report = audit(compile_island(lambda x: lax.psum(lax.psum(x, "data"), "fsdp"), mesh, ((8,), P())))
    assert [found.axes for found in report.collectives] == [("fsdp",)]


@pytest.mark.parametrize("order", ["natural", "reversed"])
def test_device_lists_resolve_through_the_mesh_whatever_its_device_order(order):
    """axis_index_groups make XLA list devices; its numbers are positions in the mesh, not device ids."""
    devices = jax.devices() if order == "natural" else jax.devices()[::-1]
    mesh = make_mesh(devices, data=2, fsdp=4)

    def function(x):
        return lax.psum(x, "fsdp", axis_index_groups=[[0, 1], [2, 3]])

    compiled = compile_island(function, mesh, ((16,), P()))
    assert "replica_groups={{0,1},{2,3},{4,5},{6,7}}" in compiled.as_text()
    assert audit(compiled).collectives[0].axes is None
    (found,) = audit(compiled, mesh=mesh).collectives
    assert (found.axes, found.group_size, found.wire_bytes) == (("fsdp",), 2, 64)
    assert audit(compiled, mesh=mesh.abstract_mesh).collectives == (found,)


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    mesh = make_mesh(data=8)

    def function(x):
        return lax.while_loop(lambda y: y.sum() < 10, lambda y: lax.psum(y, "data"), x)

    report = audit(compile_island(function, mesh, ((8,), P())))
    (found,) = report.collectives
    assert (found.in_loop, found.trips) == (True, 1)
    assert report.unknown_loops == (found.loops[0].name,)


def test_both_branches_of_a_conditional_are_seen():
    mesh = make_mesh(data=2, fsdp=4)

    def function(x):
        return lax.cond(x.sum() > 0, lambda y: lax.psum(y, "data"), lambda y: lax.pmax(y, "fsdp"), x)

    report = audit(compile_island(function, mesh, ((8,), P())))
    assert {found.axes for found in report.collectives} == {("data",), ("fsdp",)}


def test_h100_forms_async_and_sync():
    """Recorded from the CUDA compiler for 8 H100s: one of each collective, with matrix products to hide them behind."""
    report = audit((H100 / "each_collective.hlo").read_text())
    half = 2048 * 2048 * 2
    assert {found.products_between for found in report.collectives if found.compute_between} == {8}
    seen = {
        (found.op, found.axes): (found.bytes, found.is_async, found.compute_between) for found in report.collectives
    }
    assert seen == {
        ("all-gather", ("fsdp", "tensor")): (4 * half, True, 12),
        ("collective-permute", ("data",)): (half, True, 12),
        ("reduce-scatter", ("tensor",)): (half // 2, True, 12),
        ("all-to-all", ("tensor",)): (half, False, 0),
        ("all-reduce", ("data",)): (half, True, 10),
        ("ragged-all-to-all", ("fsdp",)): (half, True, 0),
        ("all-reduce", ("data", "tensor")): (half, False, 0),
    }
    assert report.matmul_flops == 8 * 2 * 2048**3
    # Exactly the given axes, in any order.
    assert report.count("all-reduce", axes="data") == 1
    assert report.count("all-reduce", axes=("tensor", "data")) == 1


OLDER_FORMS = """HloModule jit_f, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (q: f32[8]) -> f32[1] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[1]{0} reduce-scatter(%q), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%sum
}

ENTRY %main (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  %async = ((f32[8]{0}), f32[1]{0}, s32[]) async-start(%w), calls=%wrapped
  %x = f32[8]{0} fusion(%w), kind=kLoop, calls=%nothing
  %next = ((f32[8]{0}), f32[1]{0}, s32[]) async-update(%async)
  %y = f32[8]{0} fusion(%w), kind=kLoop, calls=%nothing
  %done = f32[1]{0} async-done(%next)
  %sums = (f32[8]{0}, f32[4]{0}) all-reduce-start(%x, %y), replica_groups={}, to_apply=%sum
  %sums.done = (f32[8]{0}, f32[4]{0}) all-reduce-done(%sums)
  %ring = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}
  %ring.done = f32[8]{0} collective-permute-done(%ring)
  %all = (f32[8]{0}, f32[64]{0}) all-gather-start(%w), replica_groups={}, backend_config={"is_sync":true}
  %z = f32[8]{0} fusion(%w), kind=kLoop, calls=%nothing
  ROOT %all.done = f32[64]{0} all-gather-done(%all)
}

%nothing (n: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} parameter(0)
}
"""


def test_older_async_forms():
    """The async wrapper, a start without operands in its type, one with context numbers, one marked synchronous."""
    scatter, reduce, permute, gather = audit(OLDER_FORMS).collectives
    assert (scatter.op, scatter.bytes, scatter.group_size) == ("reduce-scatter", 4, 8)
    assert (scatter.is_async, scatter.compute_between) == (True, 2)
    assert (reduce.op, reduce.bytes, reduce.compute_between) == ("all-reduce", 48, 0)
    assert (permute.op, permute.bytes, permute.is_async) == ("collective-permute", 32, True)
    assert (gather.op, gather.bytes, gather.is_async, gather.compute_between) == ("all-gather", 256, False, 0)
