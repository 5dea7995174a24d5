"""Which devices take part in one collective: XLA's notations, resolved to mesh axes.

Device numbers in a compiled program are positions in the mesh (``mesh.devices.flat``), not hardware ids, so the sizes
and names of the axes are all that is needed to tell along which of them the devices of a group differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>.*?)\))? \{(?P<groups>[^}]*)\}"
)
_AXIS_PART = r"'?([^',: ]+)'?(?::\((\d+)\)(\d+))?"


@dataclass(frozen=True)
class DeviceGroups:
    """The groups of one collective: ``size`` devices each, differing along the mesh axes ``axes``.

    ``axes`` is None when the text lists devices and no mesh is known. A group can be a part of an axis; ``size`` is
    then smaller than the axis.
    """

    size: int
    axes: tuple[str, ...] | None


def mesh_in_text(text: str) -> Mapping[str, int] | None:
    """Axis sizes of the one mesh that the replica groups of a program name, or None when there is none or several.

    Meshes that the compiler made up itself do not count.
    """
    named = {
        match["axes"]
        for match in _MESH_GROUPS.finditer(text)
        if not match["devices"] and not _is_made_up(match["axes"])
    }
    return _axis_sizes(named.pop()) if len(named) == 1 else None


def replica_groups(attributes: str, num_devices: int, mesh: Mapping[str, int] | None) -> DeviceGroups:
    """Reads ``replica_groups=`` of a collective; ``mesh`` gives the names and sizes of the axes to resolve to.

    Three notations: mesh axes, ``mesh['data'=2,'fsdp'=4] {'fsdp'}`` (part of an axis: ``'fsdp':(1)2``), whose mesh can
    be one that the compiler made up; lists, ``{{0,4},{1,5}}``; and a reshaped, transposed iota, ``[4,2]<=[2,4]T(1,0)``.
    No groups, ``{}``, means all devices. Source: XLA ``hlo/ir/mesh_and_axis.cc`` and ``replica_group.cc``.
    """
    match = _MESH_GROUPS.search(attributes)
    if match:
        sizes = _axis_sizes(match["axes"])
        parts = [(name, pre, size) for name, pre, size in re.findall(_AXIS_PART, match["groups"])]
        groups = _groups_along(parts, sizes, match["devices"] or "")
        if mesh is None and not _is_made_up(match["axes"]):
            used = {name for name, _, _ in parts}
            return DeviceGroups(len(groups[0]), tuple(name for name in sizes if name in used and sizes[name] > 1))
    elif "replica_groups=[" in attributes:
        groups = _iota(attributes).tolist()
    else:
        match = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1] if match else "")]
        groups = groups or [list(range(num_devices))]
    return DeviceGroups(max(len(group) for group in groups), _differing_axes(groups, mesh))


def permute_groups(attributes: str, mesh: Mapping[str, int] | None) -> DeviceGroups:
    """Reads ``source_target_pairs={{0,1},{1,0}}`` of a permute; devices that pass data to each other form a group."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    pairs = [_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", match[1] if match else "")]
    leader: dict[int, int] = {}

    def find(device: int) -> int:
        while leader.setdefault(device, device) != device:
            device = leader[device]
        return device

    for source, target in pairs:
        leader[find(source)] = find(target)
    groups: dict[int, list[int]] = {}
    for device in list(leader):
        groups.setdefault(find(device), []).append(device)
    return DeviceGroups(
        max((len(group) for group in groups.values()), default=1), _differing_axes(groups.values(), mesh)
    )


def _differing_axes(groups: Iterable[list[int]], mesh: Mapping[str, int] | None) -> tuple[str, ...] | None:
    """Mesh axes along which the coordinates of some group's devices differ."""
    if mesh is None:
        return None
    differs = np.zeros(len(mesh), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(group, tuple(mesh.values())))
        differs |= np.ptp(coordinates, axis=1) > 0
    return tuple(axis for axis, used in zip(mesh, differs, strict=True) if used)


def _is_made_up(axes: str) -> bool:
    """Whether the axes of a mesh are the compiler's own, named ``axis_0`` and so on."""
    return re.search(r"\baxis_\d", axes) is not None


def _axis_sizes(inside: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"'?([^',= ]+)'?=(\d+)", inside)}


def _groups_along(parts: list[tuple[str, str, str]], sizes: Mapping[str, int], device_ids: str) -> list[list[int]]:
    """Groups of the devices that differ only along the given (axis, pre-size, size) parts of a mesh.

    A part of an axis of n devices sees it as [pre-size, size, n / (pre-size x size)] and takes the middle.
    """
    if "<=" in device_ids:
        devices = _iota(device_ids)
    else:
        devices = np.array(_numbers(device_ids) or range(math.prod(sizes.values())))
    dims: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        pieces = sorted((int(pre), int(part)) for axis, pre, part in parts if axis == name and part)
        whole = any(axis == name and not part for axis, _, part in parts)
        done = 1
        for pre, part in [(1, size)] if whole else pieces:
            dims += [pre // done, part]
            grouped.append(len(dims) - 1)
            done = pre * part
        dims.append(size // done)
    kept = [dim for dim in range(len(dims)) if dim not in grouped]
    group_size = math.prod(dims[dim] for dim in grouped)
    return devices.reshape(dims).transpose(kept + grouped).reshape(-1, group_size).tolist()


def _iota(text: str) -> np.ndarray:
    """Expands ``[groups,size]<=[dims]T(permutation)``: iota over dims, transposed, reshaped."""
    match = re.search(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match, f"unknown notation of device groups: {text[:200]}"
    devices = np.arange(math.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
    return devices.transpose(_numbers(match[3] or "") or None).reshape(_numbers(match[1]))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
