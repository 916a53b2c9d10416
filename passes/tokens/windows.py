"""Rows that operations along the sequence take: convolutions, slices, paddings and concatenations.

Causal convolutions have their padding on the left. With kernel k of K taps, dilation d and left padding p, and likewise
for the gradient of the kernel,

    y[t] = sum_j k[j] x[t - p + j d],          dk[j] = sum_t dy[t] x[t - p + j d],

so rows r <= t < s of y or of dy take rows r - p to s - p + (K - 1) d of x. Row t of y waits for row t - p + (K - 1) d
of x, which is t if the padding is (K - 1) d; the gradient of x is such a convolution whose padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.ir.graph import Op

SHIFTS = frozenset({"slice", "pad", "concatenate", "split"})


@dataclass(frozen=True)
class Window:
    """The rows of the first operand that rows of the result, or of the second operand, take.

    Attributes:
      dim: of the rows in the first operand. kernel_dim, out_dim: of the same spatial dim in the others.
      spatial: its number among the spatial dims.
      low: p. reach: (K - 1) d.
    """

    dim: int
    kernel_dim: int
    out_dim: int
    spatial: int
    low: int
    reach: int

    def take_rows(self, rows: tuple[int, int], size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns rows of the first operand, which has `size`, and the padding before and behind them."""
        first, stop = rows[0] - self.low, rows[1] - self.low + self.reach
        a, b = min(max(first, 0), size), max(min(stop, size), 0)
        return (a, max(a, b)), (min(a, stop) - first, stop - max(b, first))


def window(op: Op, dim: int, kernel: tuple[int, ...], out: tuple[int, ...], *, summed: bool) -> Window | None:
    """The window of a convolution whose first operand has the rows at `dim`; None if they are no such spatial dim.

    Args:
      kernel, out: shapes of the second operand and of the result.
      summed: whether the second operand has the rows too, so that the result is the gradient of a kernel.
    """
    numbers = op.params["dimension_numbers"]
    if dim not in numbers.lhs_spec[2:]:
        return None
    spatial = numbers.lhs_spec[2:].index(dim)
    kernel_dim, out_dim = numbers.rhs_spec[2 + spatial], numbers.out_spec[2 + spatial]
    stride, dilation = op.params["window_strides"][spatial], op.params["rhs_dilation"][spatial]
    if op.params["lhs_dilation"][spatial] != 1 or (dilation if summed else stride) != 1:
        return None
    reach = (out[out_dim] - 1) * stride if summed else (kernel[kernel_dim] - 1) * dilation
    return Window(dim, kernel_dim, out_dim, spatial, int(op.params["padding"][spatial][0]), int(reach))


@dataclass(frozen=True)
class Move:
    """Which row of a result each row of an operand is: row start + every * i is row to + apart * i, for every i."""

    start: int = 0
    stride: int = 1
    target: int = 0
    target_stride: int = 1


def shift_of(op: Op, dim: int, sizes: Sequence[int]) -> list[Move]:
    """Returns the move of each operand of one of `SHIFTS`.

    Args:
      sizes: of the operands along `dim`.
    """
    if op.name == "slice":
        strides = op.params["strides"]
        return [Move(int(op.params["start_indices"][dim]), 1 if strides is None else int(strides[dim]))]
    if op.name == "split":
        return [Move()]
    if op.name == "pad":
        low, _, interior = op.params["padding_config"][dim]
        return [Move(target=int(low), target_stride=1 + int(interior))]
    if op.params["dimension"] != dim:
        return [Move() for _ in sizes]
    return [Move(target=sum(sizes[:k])) for k in range(len(sizes))]


def shifts(op: Op, dim: int, size: int) -> bool:
    """Returns whether a slice, padding or concatenation changes the elements of a dim of some size."""
    if op.name in ("concatenate", "split"):
        return op.params["dimension" if op.name == "concatenate" else "axis"] == dim
    if op.name == "pad":
        return tuple(op.params["padding_config"][dim]) != (0, 0, 0)
    strides = op.params["strides"]
    whole = (op.params["start_indices"][dim], op.params["limit_indices"][dim]) == (0, size)
    return not whole or (strides is not None and strides[dim] != 1)


def size_along(shape: tuple[int, ...], dim: int) -> int:
    """Returns the size of a dim; a scalar, such as the number of a padding, has one row."""
    return shape[dim] if dim < len(shape) else 1
