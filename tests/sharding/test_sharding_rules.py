"""Logical axes to PartitionSpecs: what divides is sharded as the table says, what does not is refused by name."""

import itertools
import math
from collections import Counter

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import AXES
from jaxpar.mesh import make_mesh, used_axes
from jaxpar.sharding import RULES, axes_of, batch_sharding, spec_for


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    return make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


MESHES = [
    mesh_of(**dict(zip(AXES, sizes, strict=True)))
    for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES))
    if math.prod(sizes) == 8
]


def test_mesh_has_all_axes_in_order_and_in_explicit_mode():
    mesh = mesh_of(tensor=2, data=4)
    assert mesh.axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert dict(mesh.shape) == {"pipeline": 1, "data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    # Neighbours in the device list are neighbours on the innermost axis.
    assert mesh.devices.reshape(-1).tolist() == jax.devices()
    assert [device.id for device in mesh.devices[0, 0, 0, 0, 0]] == [0, 1]


@pytest.mark.parametrize("sizes", [{"data": 3, "tensor": 2}, {"fsdp": 16}, {}])
def test_mesh_must_use_every_device(sizes):
    with pytest.raises(ValueError, match=rf"= {math.prod(sizes.values())} devices, but 8 are present") as error:
        make_mesh(sizes)
    for axis, size in sizes.items():
        assert f"{axis}={size}" in str(error.value)


def test_used_axes_have_more_than_one_device():
    assert used_axes(mesh_of(data=2, tensor=4), ("tensor", "fsdp", "data")) == ("tensor", "data")


@pytest.mark.parametrize(
    ("logical_axes", "shape", "sizes", "spec"),
    [
        (("embed", "mlp"), (16, 32), {"fsdp": 4, "tensor": 2}, P("fsdp", "tensor")),
        (("embed", "mlp"), (16, 32), {"data": 8}, P(None, None)),
        (("embed", "mlp"), (16, 32), {"fsdp": 2, "expert": 2, "context": 2}, P(("fsdp", "expert", "context"), None)),
        (("vocab", "embed"), (16, 32), {"tensor": 8}, P("tensor", None)),
        (
            ("layers", "heads", "head_dim", "embed"),
            (2, 4, 3, 8),
            {"fsdp": 2, "tensor": 4},
            P(None, "tensor", None, "fsdp"),
        ),
        (("layers", "kv_heads", "head_dim"), (2, 4, 3), {"data": 2, "tensor": 4}, P(None, "tensor", None)),
        (("layers", "norm"), (2, 7), {"fsdp": 4, "tensor": 2}, P(None, None)),
        ((), (), {"fsdp": 8}, P()),
    ],
    ids=str,
)
def test_specs(logical_axes, shape, sizes, spec):
    assert spec_for("w", logical_axes, shape, mesh_of(**sizes)) == spec


def test_batch_is_split_over_data_fsdp_and_expert():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert batch_sharding(mesh).spec == P(None, ("data", "fsdp"), None)
    assert batch_sharding(mesh_of(tensor=8)).spec == P(None, None, None)


def test_unknown_logical_axis_is_named():
    with pytest.raises(ValueError, match=r"layers\.q dim 1: unknown logical axis 'head'; known: .*heads"):
        spec_for("layers.q", ("embed", "head"), (8, 8), mesh_of(fsdp=8))


def test_one_mesh_axis_on_two_dims_names_both():
    with pytest.raises(ValueError, match=r"layers\.mix: mesh axis tensor \(2\) would shard dim 1 and dim 2") as error:
        spec_for("layers.mix", ("embed", "heads", "mlp"), (8, 8, 8), mesh_of(fsdp=4, tensor=2))
    assert "('embed', 'heads', 'mlp')" in str(error.value)
    assert "each mesh axis is used once" in str(error.value)


def test_an_axis_of_one_device_does_not_collide():
    assert spec_for("mix", ("heads", "mlp"), (8, 8), mesh_of(fsdp=8)) == P(None, None)


def test_a_dim_that_does_not_divide_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"layers\.gate dim 2 \(mlp\) has size 8190, which tensor=4 = 4") as error:
        spec_for("layers.gate", ("layers", "embed", "mlp"), (2, 8, 8190), mesh_of(fsdp=2, tensor=4))
    assert "multiple of 4" in str(error.value)
    assert "mesh whose tensor divides 8190" in str(error.value)


def test_a_dim_over_several_axes_names_each_factor():
    with pytest.raises(ValueError, match=r"embedding dim 1 \(embed\) has size 12, which fsdp=2 x context=4 = 8"):
        spec_for("embedding", ("vocab", "embed"), (16, 12), mesh_of(fsdp=2, context=4))


@given(
    st.sampled_from(MESHES),
    st.lists(st.tuples(st.sampled_from(sorted(RULES)), st.integers(1, 24)), max_size=4),
)
def test_every_array_is_sharded_exactly_or_refused(mesh, dims):
    """Whatever the dims: each used mesh axis appears once and cuts into equal parts, or the array is refused."""
    logical_axes, shape = [name for name, _ in dims], tuple(size for _, size in dims)
    wanted = [used_axes(mesh, RULES[name]) for name in logical_axes]
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in wanted]
    repeated = any(count > 1 for count in Counter(itertools.chain(*wanted)).values())
    if repeated or any(size % way for size, way in zip(shape, ways, strict=True)):
        with pytest.raises(ValueError, match=r"some\.array"):
            spec_for("some.array", logical_axes, shape, mesh)
        return
    spec = spec_for("some.array", logical_axes, shape, mesh)
    assert [axes_of(entry) for entry in spec] == wanted
    local = NamedSharding(mesh, spec).shard_shape(shape)
    assert [part * way for part, way in zip(local, ways, strict=True)] == list(shape)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8, "tensr": 2}, {"fsdp": -2, "tensor": -4}, {"fsdp": -1}, {"fsdp": 0}], ids=str
)
def test_a_mesh_with_a_wrong_axis_or_size_is_refused_by_name(sizes):
    with pytest.raises(ValueError, match=next(axis for axis, size in sizes.items() if axis == "tensr" or size < 1)):
        make_mesh(sizes)
