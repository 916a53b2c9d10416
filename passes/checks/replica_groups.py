"""From the groups of devices that a collective runs over to the axes of a mesh.

A device of a mesh of shape (s_1, ..., s_n) has the number that row-major order gives its coordinates. A collective
over a set A of axes joins the devices that agree in every coordinate but those of A, so the groups of A are the rows
of

    transpose(arange(s_1 ... s_n).reshape(s), (axes not in A, axes in A)).reshape(-1, prod of s over A).

`axes_of_groups` inverts that: the axes along which one group varies are the only candidate, and the candidate's
groups are compared with what was given. Groups that no set of axes gives (part of an axis, or a list of its own) have
no axes, and a text that names the groups stands in their place, which no plan contains.

Groups are printed in four ways, all read here: `{{0,2},{1,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['d'=2,'m'=2] {'d'}` (HLO)
and `[[0, 2], [1, 3]]` (a table); a permutation is a list of (source, target) pairs in the first or the last.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from alpa_lite.ir.layout import Axes, LogicalMesh

_INT = re.compile(r"-?\d+")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")


@functools.lru_cache(maxsize=4096)
def axes_from_text(text: str, mesh: LogicalMesh) -> Axes:
    """Returns the axes of `mesh` longer than one, in mesh order, over which the printed replica groups join devices.

    Empty groups mean all devices. `()` for groups of one device; one pseudo axis `groups <text>` where no axes fit.
    """
    groups = parse_groups(text, mesh.size)
    axes = None if groups is None else axes_of_groups(groups, mesh)
    return (f"groups {_shorten(text)}",) if axes is None else axes


@functools.lru_cache(maxsize=4096)
def axes_from_pairs(text: str, mesh: LogicalMesh) -> Axes:
    """Returns the axes of `mesh` along which the (source, target) pairs of a permutation move data; `()` if none moves.

    A text without pairs, or with a device that the mesh does not have, gives the pseudo axis `pairs <text>`.
    """
    pairs = _rows(text, 2)
    if pairs is None or pairs.size == 0 or pairs.min() < 0 or pairs.max() >= mesh.size:
        return (f"pairs {_shorten(text)}",)
    source, target = (np.stack(np.unravel_index(column, mesh.shape)) for column in pairs.T)
    moves = (source != target).any(axis=1)
    return tuple(axis for axis, move in zip(mesh.axis_names, moves, strict=True) if move)


def groups_of_axes(axes: Axes, mesh: LogicalMesh) -> np.ndarray:
    """The groups of a collective over `axes`: int64[groups, members] of device numbers, the last axis fastest."""
    inside = [mesh.axis_names.index(axis) for axis in axes]
    outside = [i for i in range(len(mesh.shape)) if i not in inside]
    devices = np.arange(mesh.size).reshape(mesh.shape)
    return devices.transpose(*outside, *inside).reshape(-1, mesh.product(axes))


def axes_of_groups(groups: np.ndarray, mesh: LogicalMesh) -> Axes | None:
    """The axes, in mesh order, whose groups are `groups` in any order, or None where no set of axes gives them."""
    if groups.size != mesh.size or groups.ndim != 2 or groups.min() < 0 or groups.max() >= mesh.size:
        return None
    coordinates = np.stack(np.unravel_index(groups[0], mesh.shape))
    varies = (coordinates != coordinates[:, :1]).any(axis=1)
    axes = tuple(axis for axis, v in zip(mesh.axis_names, varies, strict=True) if v)
    if mesh.product(axes) != groups.shape[1]:
        return None
    rows = [np.sort(one, axis=1) for one in (groups, groups_of_axes(axes, mesh))]  # first members are unique
    first, second = (one[np.argsort(one[:, 0])] for one in rows)
    return axes if np.array_equal(first, second) else None


def parse_groups(text: str, num_devices: int) -> np.ndarray | None:
    """Returns the int64[groups, devices of a group] device numbers that `text` prints, or None where it cannot be read.

    Empty groups (`{}`, or no text) mean one group of all `num_devices` devices.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return np.arange(num_devices)[None]
    try:
        if text.startswith("mesh"):
            return _mesh_groups(text, num_devices)
        if (iota := _IOTA.match(text)) is not None:
            rows = [int(n) for n in iota[1].split(",")]
            return _iota(iota, num_devices).reshape(math.prod(rows[:-1]), rows[-1])
        return _rows(text, None)
    except (ValueError, ArithmeticError):  # sizes that contradict each other
        return None


def normal_axes(axes: Axes, mesh: LogicalMesh) -> Axes:
    """`axes` in mesh order, those of one device left out; an axis that the mesh does not have stays, at the end."""
    known = tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if a in axes and n > 1)
    return known + tuple(a for a in axes if a not in mesh.axis_names)


def _iota(match: re.Match[str], num_devices: int) -> np.ndarray:
    """Returns the flat device list of `<=[dims]T(permutation)`; ValueError where it is not of `num_devices`."""
    dims = [int(n) for n in match[2].split(",")]
    if math.prod(dims) != num_devices:
        raise ValueError(f"{match[0]} lists {math.prod(dims)} devices, the mesh has {num_devices}")
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose([int(n) for n in match[3].split(",")]) if match[3] else devices).reshape(-1)


def _mesh_groups(text: str, num_devices: int) -> np.ndarray | None:
    """Groups of `mesh[name=size,...], device_ids=(...) {axis,axis:(pre)size}`; a sub-axis splits its axis in three."""
    match = _MESH.match(text)
    if match is None:
        return None
    sizes = {name.strip("'\" "): int(n) for name, n in (item.rsplit("=", 1) for item in match[1].split(",") if item)}
    if math.prod(sizes.values()) != num_devices:
        return None
    devices = np.arange(num_devices)
    if match[2]:
        iota = _IOTA.match(match[2])
        devices = _iota(iota, num_devices) if iota else np.array([int(n) for n in _INT.findall(match[2])])
    cuts: dict[str, tuple[int, int] | None] = {}
    for item in match[3].split(",") if match[3].strip() else []:
        name, _, sub = item.partition(":")
        name = name.strip("'\" ")
        if name not in sizes or name in cuts:  # several parts of one axis are nothing that a plan can mean
            return None
        numbers = [int(n) for n in _INT.findall(sub)]
        cuts[name] = (numbers[0], numbers[1]) if len(numbers) == 2 else None
    parts: list[tuple[str, int]] = []
    for name, size in sizes.items():
        before, length = cuts.get(name) or (1, size)
        parts += [(f"{name}:", before), (name, length), (f":{name}", size // (before * length))]
    names, shape = zip(*parts, strict=True)
    return devices[groups_of_axes(tuple(cuts), LogicalMesh(shape, names))] if math.prod(shape) == devices.size else None


def _rows(text: str, width: int | None) -> np.ndarray | None:
    """Returns the rows of `{{..},{..}}` or `[[..], [..]]`; None where they are not of one length (`width` if given)."""
    rows = [[int(n) for n in _INT.findall(row)] for row in re.findall(r"[\[{]([-\d, ]*)[\]}]", text)]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or widths == {0} or (width is not None and widths != {width}):
        return None
    return np.array(rows)


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
