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

Range = tuple[int, int]
"""Indices from the first to before the second."""


@dataclass(frozen=True)
class Move:
    """The rows that a result takes of an operand: row start + stride * i is its row target + target_stride * i.

    Of a convolution, the result also takes as many rows behind that one as `reach`: (K - 1) d.
    """

    start: int = 0
    stride: int = 1
    target: int = 0
    target_stride: int = 1
    reach: int = 0

    def take_rows(self, rows: Range, size: int) -> tuple[Range, Range]:
        """Returns rows of the operand, which has `size`, and the padding around them; an empty range for none."""
        low = max(-((self.target - rows[0]) // self.target_stride), -(self.start // self.stride), 0)
        stop = min(self.reach - (self.target - rows[1]) // self.target_stride, -((self.start - size) // self.stride))
        before = self.target + self.target_stride * low - rows[0]
        behind = rows[1] - rows[0] + self.reach - before - self.target_stride * (stop - low - 1) - 1
        return (self.start + self.stride * low, self.start + self.stride * (stop - 1) + 1), (before, behind)


@dataclass(frozen=True)
class Window:
    """A convolution along the rows.

    Attributes:
      kernel_dim, out_dim: the dim of the rows in the second operand and in the result.
      spatial: its number among the spatial dims.
      move: the rows of the first operand that rows of the result, or of the second operand, take.
    """

    kernel_dim: int
    out_dim: int
    spatial: int
    move: Move


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
    move = Move(target=int(op.params["padding"][spatial][0]), reach=int(reach))
    return Window(kernel_dim, out_dim, spatial, move)


def shift_of(op: Op, dim: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Move, ...]:
    """Returns the move of each operand of one of `SHIFTS` along a dim; none if it leaves the rows as they are.

    Args:
      shapes: of the operands.
    """
    params = op.params
    if op.name == "concatenate":
        sizes = [shape[dim] for shape in shapes]
        return tuple(Move(target=sum(sizes[:k])) for k in range(len(sizes))) if params["dimension"] == dim else ()
    if op.name == "split":
        return (Move(),) if params["axis"] == dim else ()
    if op.name == "pad":
        low, high, interior = map(int, params["padding_config"][dim])
        return (Move(target=low, target_stride=1 + interior),) if (low, high, interior) != (0, 0, 0) else ()
    start, stride = int(params["start_indices"][dim]), int(params["strides"][dim]) if params["strides"] else 1
    is_whole = (start, params["limit_indices"][dim], stride) == (0, shapes[0][dim], 1)
    return () if is_whole else (Move(start, stride),)
