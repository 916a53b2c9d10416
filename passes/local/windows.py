"""Local forms of operations that read neighbours along a dim: convolutions, window reductions, slices, pads, reversals.

A window operation with window k (dilated: kd = (k - 1) r + 1), stride t and low padding l makes output j from the
inputs [j t - l, j t - l + kd). Cut N inputs and M = N / t outputs into p blocks each, B = N / p = t Q: device i
makes outputs [i Q, (i + 1) Q) and so reads inputs [i B - l, i B + B - t - l + kd). It needs a *halo* of max(l, 0)
elements from the left and of max(kd - t - l, 0) from the right neighbour, each at most B; at the ends of the array
the halo is the padding itself, zero for a convolution, the neutral element for a window reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.local.types import (
    LocalCollective,
    LocalForm,
    Setting,
    bind,
    block_number,
    extreme_value,
    permute_blocks,
    sharded_dims,
    sort_axes,
)


@dataclass(frozen=True)
class _Halo:
    """The halo of one sharded window dim: `left` and `right` elements of the neighbours, then `padding` (at most 0)."""

    dim: int
    axes: Axes
    left: int
    right: int
    padding: tuple[int, int]

    @property
    def is_needed(self) -> bool:
        """Whether anything is to be fetched or cropped."""
        return bool(self.left or self.right or any(self.padding))


def _halo(s: Setting, dims: tuple[int, int], window: int, stride: int, low: int, dilation: int) -> _Halo | None:
    """The halo of operand dim `dims[0]` for result dim `dims[1]`, or None where blocks and windows do not fit."""
    dim, out = dims
    axes = s.operands[0].dims[dim]
    block, made = s.local_operand(0)[dim], s.local_result()[out]
    if axes != s.results[0].dims[out] or block != stride * made:
        return None
    reach = (window - 1) * dilation + 1 - stride - low
    left, right = max(low, 0), max(reach, 0)
    if left > block or right > block:
        return None
    return _Halo(dim, axes, left, right, (low - left, reach - right))


def _halo_collectives(s: Setting, halos: Sequence[_Halo]) -> list[LocalCollective]:
    shape, itemsize = list(s.local_operand(0)), s.operand_dtype(0).itemsize
    out = []
    for halo in halos:
        others = math.prod(shape) // shape[halo.dim]
        for width in (halo.left, halo.right):
            if width:
                out.append(
                    LocalCollective("collective_permute", sort_axes(halo.axes, s.mesh), others * width * itemsize)
                )
        shape[halo.dim] += halo.left + halo.right + sum(halo.padding)
    return out


def _exchange(x: jax.Array, halo: _Halo, mesh: LogicalMesh, border: Any) -> jax.Array:
    """x with its neighbours' elements on both sides, `border` beyond the ends of the array; then cropped."""
    parts, size = mesh.product(halo.axes), x.shape[halo.dim]
    pieces = [x]
    if halo.left:
        edge = lax.slice_in_dim(x, size - halo.left, size, axis=halo.dim)
        edge = permute_blocks(edge, halo.axes, [(i, i + 1) for i in range(parts - 1)], mesh)
        pieces.insert(0, edge if border is None else jnp.where(block_number(halo.axes) == 0, border, edge))
    if halo.right:
        edge = lax.slice_in_dim(x, 0, halo.right, axis=halo.dim)
        edge = permute_blocks(edge, halo.axes, [(i + 1, i) for i in range(parts - 1)], mesh)
        pieces.append(edge if border is None else jnp.where(block_number(halo.axes) == parts - 1, border, edge))
    whole = lax.concatenate(pieces, halo.dim) if len(pieces) > 1 else x
    first, last = -halo.padding[0], whole.shape[halo.dim] + halo.padding[1]
    return lax.slice_in_dim(whole, first, last, axis=halo.dim)


def _find_halos(
    s: Setting, dims: Iterable[tuple[int, int]], windows: Sequence[int], spread: Sequence[int], dilation: Sequence[int]
) -> tuple[list[_Halo], tuple[tuple[int, int], ...]] | None:
    """Returns the halos that are needed, and the padding that is left; None where blocks and windows do not fit.

    Args:
      dims: of operand and result, for each window dim.
      windows, spread, dilation: likewise sizes, and dilations of the operand and of the window.
    """
    halos, padding = [], [tuple(pair) for pair in s.op.params["padding"]]
    for i, pair in enumerate(dims):
        if not s.is_special(0, pair[0]):  # unsharded, or windows that lie apart: the same parameters hold on the blocks
            continue
        stride, low = s.op.params["window_strides"][i], padding[i][0]
        halo = _halo(s, pair, windows[i], stride, low, dilation[i]) if spread[i] == 1 else None
        if halo is None:
            return None
        if halo.is_needed:
            halos.append(halo)
            padding[i] = (0, 0)
    return halos, tuple(padding)


def _with_halos(s: Setting, halos: Sequence[_Halo], border: Any, changes: dict[str, Any]) -> LocalForm:
    """Returns the form that fetches halos before it binds the operation on the larger block."""
    if not halos:
        return s.bind(**changes)
    params = s.params(**changes)

    def run(x: jax.Array, *others: jax.Array) -> list:
        for halo in halos:
            x = _exchange(x, halo, s.mesh, border)
        return bind(s.op, [x, *others], params)

    return s.form(run, *_halo_collectives(s, halos))


def convolution(s: Setting) -> LocalForm | None:
    """`conv_general_dilated`: batch, features, groups, and spatial dims with halos."""
    p = s.op.params
    lhs, rhs, out = p["dimension_numbers"]
    windows = [s.operand_shape(1)[dim] for dim in rhs[2:]]
    found = _find_halos(s, zip(lhs[2:], out[2:], strict=True), windows, p["lhs_dilation"], p["rhs_dilation"])
    if found is None:
        return None
    halos, padding = found
    changes: dict[str, Any] = {"padding": padding}
    if p["feature_group_count"] > 1:
        changes["feature_group_count"] = s.local_operand(0)[lhs[1]] // s.local_operand(1)[rhs[1]]
    if p["batch_group_count"] > 1:
        axes = s.operands[0].dims[lhs[0]]
        groups, parts = p["batch_group_count"], s.mesh.product(axes)
        if groups % parts or s.operands[1].dims[rhs[0]][: len(axes)] != axes:
            return None
        changes["batch_group_count"] = groups // parts
    return _with_halos(s, halos, None, changes)  # what a permutation sends nobody is zero


def reduce_window(s: Setting) -> LocalForm | None:
    """`reduce_window_sum`, `_max`, `_min`, and the general one where only dims of trivial windows are sharded."""
    p = s.op.params
    dims = ((dim, dim) for dim in range(len(s.operand_shape(0))))
    found = _find_halos(s, dims, p["window_dimensions"], p["base_dilation"], p["window_dilation"])
    if found is None:
        return None
    halos, padding = found
    border = _neutral(s.op.name, s.result_dtype())
    return None if halos and border is None else _with_halos(s, halos, border, {"padding": padding})


def _neutral(name: str, dtype: Any) -> Any:
    if name == "reduce_window_sum":
        return np.zeros((), dtype)
    if name not in ("reduce_window_max", "reduce_window_min") or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        return None
    return extreme_value(dtype, highest=name == "reduce_window_min")


def select_and_scatter_add(s: Setting) -> LocalForm | None:
    """Returns the gradient of max pooling: no window of a sharded dim may cross from one block into another."""
    p = s.op.params
    source, operand = s.operands
    for dim in range(len(operand.dims)):
        if not s.is_special(1, dim):
            continue
        window, stride = p["window_dimensions"][dim], p["window_strides"][dim]
        aligned = s.local_operand(1)[dim] == stride * s.local_operand(0)[dim]
        same = source.dims[dim] == operand.dims[dim] == s.results[0].dims[dim]
        if window > stride or tuple(p["padding"][dim]) != (0, 0) or not aligned or not same:
            return None
    return s.bind()


def slice_(s: Setting) -> LocalForm | None:
    """`slice`: a sharded dim is taken whole, or with a stride that divides the block."""
    p = s.op.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    starts, limits = p["start_indices"], list(p["limit_indices"])
    if s.operands[0].dims != s.results[0].dims:
        return None
    for dim in sharded_dims(s.operands[0]):
        block, made = s.local_operand(0)[dim], s.local_result()[dim]
        if starts[dim] >= strides[dim] or block != made * strides[dim]:
            return None
        limits[dim] = block
    return s.bind(limit_indices=tuple(limits))


def pad(s: Setting) -> LocalForm | None:
    """`pad`: a sharded dim is left as it is, or spread by interior padding that gives each element the same room."""
    if s.operands[0].dims != s.results[0].dims:
        return None
    for dim in sharded_dims(s.operands[0]):
        low, high, interior = s.op.params["padding_config"][dim]
        if low < 0 or high < 0 or low + high != interior:
            return None
    return s.bind()


def rev(s: Setting) -> LocalForm | None:
    """`rev`: blocks change places, and each is reversed."""
    if s.operands[0].dims != s.results[0].dims:
        return None
    turned = [s.operands[0].dims[d] for d in s.op.params["dimensions"] if s.operands[0].dims[d]]
    if not turned:
        return s.bind()

    def run(x: jax.Array) -> list:
        (x,) = bind(s.op, [x])
        for axes in turned:
            last = s.mesh.product(axes) - 1
            x = permute_blocks(x, axes, [(i, last - i) for i in range(last + 1)], s.mesh)
        return [x]

    size = s.result_bytes()
    return s.form(run, *(LocalCollective("collective_permute", sort_axes(axes, s.mesh), size) for axes in turned))
