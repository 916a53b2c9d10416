"""Feasibility of a user's constraint on a tensor on one mesh, and the layouts that meet it."""

from __future__ import annotations

from collections.abc import Iterator

from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.strategy import Factor
from alpa_lite.passes.sharding.space import assignments
from alpa_lite.plan.pins import Wish


def fits(wish: Wish, shape: tuple[int, ...], mesh: LogicalMesh) -> str | None:
    """Why a wish cannot be fulfilled for a shape on a mesh; None if it can."""
    unknown = [a for axes in wish.dims for a in axes or () if a not in mesh.axis_names]
    if unknown:
        return f"the mesh {described(mesh)} has no axis {unknown[0]!r}"
    if len(wish.dims) > len(shape):
        return f"it has {len(wish.dims)} entries for {len(shape)} dims"
    for size, axes in zip(shape, wish.dims, strict=False):
        if axes and size % mesh.product(axes):
            return f"{size} does not divide over the {mesh.product(axes)} devices of {', '.join(axes)}"
    return None


def completions(wish: Wish, shape: tuple[int, ...], mesh: LogicalMesh) -> Iterator[Layout]:
    """The layouts that fulfil a wish: free dims with any of the axes that are left, in mesh order."""
    dims = (*wish.dims, *((),) * (len(shape) - len(wish.dims)))
    # A dim of one element has one block, whatever the axes: strategies leave it whole.
    dims = tuple(() if size == 1 else axes for size, axes in zip(shape, dims, strict=True))
    used = {a for axes in dims for a in axes or ()}
    left = [a for a in mesh.axis_names if a not in used and mesh.axis_size(a) > 1]
    factors = [Factor(size, "parallel" if d is None else "replicate") for size, d in zip(shape, dims, strict=True)]
    fixed = [tuple(a for a in axes or () if mesh.axis_size(a) > 1) for axes in dims]
    for more in assignments(factors, mesh, left):
        yield Layout(tuple(own or axes for own, axes in zip(fixed, more, strict=True)))


def described(mesh: LogicalMesh) -> str:
    """A mesh in words: data=4 x model=2."""
    axes = list(zip(mesh.axis_names, mesh.shape, strict=True))
    return " x ".join(f"{name}={size}" for name, size in [axis for axis in axes if axis[1] > 1] or axes[:1])
