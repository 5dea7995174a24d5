"""Every notation of device groups resolves to the same mesh axes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.audit.groups import mesh_in_text, permute_groups, replica_groups

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


@st.composite
def meshes(draw):
    """A mesh of six axes with at most 64 devices, and a subset of its axes."""
    sizes = [1] * len(AXES)
    for position in draw(st.permutations(range(len(AXES))))[:4]:
        sizes[position] = draw(st.sampled_from([size for size in (1, 2, 3, 4) if size * math.prod(sizes) <= 64]))
    chosen = draw(st.sets(st.sampled_from(AXES)))
    return dict(zip(AXES, sizes, strict=True)), tuple(axis for axis in AXES if axis in chosen)


def device_groups(mesh, axes):
    """The groups of devices that differ only along ``axes``, by definition."""
    kept = [list(mesh).index(axis) for axis in mesh if axis not in axes]
    groups = {}
    for device in range(math.prod(mesh.values())):
        coordinates = np.unravel_index(device, tuple(mesh.values()))
        groups.setdefault(tuple(int(coordinates[dim]) for dim in kept), []).append(device)
    return list(groups.values())


def as_list(groups):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def as_iota(mesh, axes):
    names, sizes = list(mesh), list(mesh.values())
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    size = math.prod(mesh[axis] for axis in axes)
    dims = ",".join(map(str, sizes))
    return f"[{math.prod(sizes) // size},{size}]<=[{dims}]T({','.join(map(str, order))})"


def as_mesh(mesh, axes, quote="'"):
    sizes = ",".join(f"{quote}{axis}{quote}={size}" for axis, size in mesh.items())
    return f"mesh[{sizes}] {{{','.join(f'{quote}{axis}{quote}' for axis in axes)}}}"


@settings(deadline=None, max_examples=50)
@given(meshes())
def test_all_notations_give_the_same_axes(mesh_and_axes):
    mesh, axes = mesh_and_axes
    notations = [as_mesh(mesh, axes), as_mesh(mesh, axes, ""), as_list(device_groups(mesh, axes)), as_iota(mesh, axes)]
    for notation in notations:
        found = replica_groups(f", channel_id=1, replica_groups={notation}, dimensions={{0}}", 64, mesh)
        assert found.axes == tuple(axis for axis in axes if mesh[axis] > 1), notation
        assert found.size == math.prod(mesh[axis] for axis in axes)


@settings(deadline=None, max_examples=50)
@given(meshes(), st.booleans())
def test_a_permute_along_one_axis_gives_that_axis(mesh_and_axes, ring):
    mesh, _ = mesh_and_axes
    for axis, size in mesh.items():
        pairs = []
        for group in device_groups(mesh, (axis,)):
            following = group[1:] + group[: int(ring)]
            pairs += zip(group, following, strict=False)
        text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
        found = permute_groups(f", source_target_pairs={{{text}}}, metadata={{}}", mesh)
        assert found.size == size
        assert found.axes == ((axis,) if size > 1 else ())


def test_iota_without_a_transpose_and_groups_of_everything():
    mesh = {"data": 2, "fsdp": 4}
    assert replica_groups("replica_groups=[2,4]<=[8]", 8, mesh).axes == ("fsdp",)
    everything = replica_groups("replica_groups={}, to_apply=%sum", 8, mesh)
    assert (everything.size, everything.axes) == (8, ("data", "fsdp"))


def test_a_part_of_an_axis_has_a_smaller_size():
    mesh = {"data": 2, "fsdp": 4}
    notations = ["mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", "{{0,2},{1,3},{4,6},{5,7}}", "[4,2]<=[2,2,2]T(0,2,1)"]
    for notation in notations:
        found = replica_groups(f"replica_groups={notation}, dimensions={{0}}", 8, mesh)
        assert (found.size, found.axes) == (2, ("fsdp",))


def test_lists_without_a_mesh_have_a_size_but_no_axes():
    found = replica_groups("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 8, None)
    assert (found.size, found.axes) == (2, None)
    assert permute_groups("source_target_pairs={{0,1},{1,0}}", None).axes is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups=mesh['a'=2,'b'=4] {'a'} replica_groups=mesh['a'=2,'b'=4] {'b'}", {"a": 2, "b": 4}),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'} replica_groups=mesh['c'=8] {'c'}", None),
        ("replica_groups=mesh['a'=2], device_ids=([2]<=[2]T(0)) {'a'}", None),
        ("replica_groups={{0,1}}", None),
    ],
)
def test_the_mesh_of_a_program_is_taken_from_its_text_when_it_is_the_only_one(text, expected):
    assert mesh_in_text(text) == expected


def test_a_mesh_that_the_compiler_made_up_resolves_to_the_real_axes():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    for notation, axes in {
        "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": ("data", "fsdp"),
        "mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}": ("fsdp",),
        "mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}": ("data", "tensor"),
        "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'axis_0'}": ("tensor",),
        "mesh['axis_0'=2,'axis_1'=4], device_ids=(0,4,1,5,2,6,3,7) {'axis_1'}": ("data", "tensor"),
    }.items():
        found = replica_groups(f"replica_groups={notation}, dimensions={{0}}", 8, mesh)
        assert found.axes == axes, notation
        assert replica_groups(f"replica_groups={notation}, dimensions={{0}}", 8, None).axes is None
    text = "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'} replica_groups=mesh['data'=4,'fsdp'=2] {'data'}"
    assert mesh_in_text(text) == {"data": 4, "fsdp": 2}


def test_a_mesh_with_its_own_device_order_still_names_its_axes():
    text = "replica_groups=mesh['data'=2,'fsdp'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'fsdp'}, dimensions={0}"
    found = replica_groups(text, 8, None)
    assert (found.size, found.axes) == (4, ("fsdp",))
