"""Replica groups to axes, in every syntax that compilers print."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.replica_groups import (
    axes_from_pairs,
    axes_from_text,
    axes_of_groups,
    groups_of_axes,
    normal_axes,
    parse_groups,
)


@st.composite
def meshes_and_axes(draw):
    """A mesh of up to four axes, some of one device, and a subset of its axes longer than one."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    mesh = LogicalMesh(shape, tuple(f"a{i}" for i in range(len(shape))))
    long = [name for name, n in zip(mesh.axis_names, shape, strict=True) if n > 1]
    axes = tuple(name for name in long if draw(st.booleans()))
    return mesh, axes


def listed(groups, opening, separator):
    closing = {"{": "}", "[": "]"}[opening]
    rows = (opening + separator.join(map(str, row)) + closing for row in groups.tolist())
    return opening + separator.join(rows) + closing


def iota(mesh, axes):
    inside = [mesh.axis_names.index(a) for a in axes]
    order = [i for i in range(len(mesh.shape)) if i not in inside] + inside
    rows, width = mesh.size // mesh.product(axes), mesh.product(axes)
    return f"[{rows},{width}]<=[{','.join(map(str, mesh.shape))}]T({','.join(map(str, order))})"


def named(mesh, axes):
    sizes = ",".join(f"'{n}'={s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True))
    return f"mesh[{sizes}] {{{','.join(repr(a) for a in axes)}}}"


@settings(max_examples=80, deadline=None)
@given(meshes_and_axes(), st.randoms())
def test_every_syntax_gives_the_axes_back(case, random):
    mesh, axes = case
    groups = groups_of_axes(axes, mesh)
    coordinates = zip(mesh.axis_names, np.unravel_index(groups, mesh.shape), strict=True)
    assert tuple(name for name, c in coordinates if np.ptp(c, axis=1).any()) == axes
    assert groups.shape[1] == mesh.product(axes) and sorted(groups.ravel()) == [*range(mesh.size)]
    assert axes_of_groups(groups, mesh) == axes
    rows = groups.tolist()
    random.shuffle(rows)
    shuffled = np.array(rows)
    table = f"dense<{listed(shuffled, '[', ', ')}> : tensor<{groups.shape[0]}x{groups.shape[1]}xi64>"
    for text in (listed(shuffled, "{", ","), table, iota(mesh, axes), named(mesh, axes)):
        assert axes_from_text(text, mesh) == axes, text


@settings(max_examples=50, deadline=None)
@given(meshes_and_axes())
def test_permutations_name_the_axes_along_which_they_move(case):
    mesh, axes = case
    source = np.stack(np.unravel_index(np.arange(mesh.size), mesh.shape))
    step = np.array([axis in axes for axis in mesh.axis_names])[:, None]
    target = np.ravel_multi_index(tuple((source + step) % np.array(mesh.shape)[:, None]), mesh.shape)
    pairs = np.stack([np.arange(mesh.size), target], axis=1)
    assert axes_from_pairs(listed(pairs, "{", ","), mesh) == axes
    assert axes_from_pairs(f"dense<{listed(pairs, '[', ', ')}> : tensor<{mesh.size}x2xi64>", mesh) == axes


def test_tables_that_mlir_abbreviates():
    mesh = LogicalMesh((16, 8), ("d", "m"))
    for axes in (("d",), ("m",), ("d", "m")):
        groups = groups_of_axes(axes, mesh)
        items = groups.astype("<i8").tobytes().hex().upper()
        text = f'dense<"0x{items}"> : tensor<{groups.shape[0]}x{groups.shape[1]}xi64>'
        assert axes_from_text(text, mesh) == axes
        assert axes_from_text(text.replace("0x00", "0x"), mesh)[0].startswith("groups dense")
    assert axes_from_text("dense<0> : tensor<1x1xi64>", LogicalMesh((1,), ("d",))) == ()


def test_groups_that_no_axes_give_are_named_as_printed():
    mesh = LogicalMesh((4, 2), ("d", "m"))
    for text in ("{{0,1,2,3},{4,5,6,7}}", "{{0,1},{2,3}}", "{{0,1,2},{3,4,5,6,7}}", "[4,2]<=[4,4]", "nonsense"):
        (axis,) = axes_from_text(text, mesh)
        assert text in axis
    assert axes_from_text("", mesh) == ("d", "m")
    assert axes_from_text("{}", mesh) == ("d", "m")
    assert axes_from_text("{{0},{1},{2},{3},{4},{5},{6},{7}}", mesh) == ()
    assert axes_from_pairs("{}", mesh) == ("pairs {}",)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['d'=4,'m'=2] {'d':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['d'=4,'m'=2] {'d':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['d'=2,'m'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'m'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['d'=4,'m'=2] {'d','d'}", None),
        ("mesh['d'=4,'m'=3] {'d'}", None),
        ("[4,2]<=[2,2,2]T(7,1,0)", None),
        ("[3,2]<=[8]", None),
    ],
)
def test_printed_groups(text, groups):
    parsed = parse_groups(text, 8)
    assert (None if parsed is None else parsed.tolist()) == groups


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="mesh[]{}()<=T,:'0123456789dx ", max_size=40))
def test_no_text_stops_the_parser(text):
    mesh = LogicalMesh((4, 2), ("d", "m"))
    assert isinstance(axes_from_text(text, mesh), tuple)
    assert isinstance(axes_from_pairs(text, mesh), tuple)


def test_normal_axes_drop_what_has_one_device_and_follow_the_mesh():
    mesh = LogicalMesh((4, 1, 2), ("d", "one", "m"))
    assert normal_axes(("m", "one", "d"), mesh) == ("d", "m")
    assert normal_axes(("other", "m"), mesh) == ("m", "other")
