"""Factor rules of operations with sliding windows: convolutions, pooling and its gradients. Conventions:
`factors.rules`.

Along one spatial dim, with operand x, kernel k, stride s, padding (l, h), operand dilation a and kernel dilation d,

    y[o] = sum_w  k[w] x'[s o + d w - l],      x'[a i] = x[i], zero elsewhere.

Where windows do not overlap, the dims are products of plain factors, and the same parameters hold on every block:

    blocks    s = |k|, d = a = 1, no padding, |x| = |y| |k|:   x (o, w), k (w), y (o):    y[o] = sum_w k[w] x[o, w]
    contract  d = |y|, s = a = 1, no padding, |x| = |k| |y|:   x (i, j), k (i), y (j):    y[j] = sum_i k[i] x[i, j]
    spread    a = |k|, s = d = 1, l = h = a - 1, |y| = |x| a:  x (i), k (j), y (i, j):    y[i, j] = x[i] k[a - 1 - j]

The second and third are the gradients of the first with respect to k and x. A kernel of one point is all of them.
Else the window reaches into the neighbours' blocks, and the dim is special.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.factors.base import Call, Dim, Dims, Rules, shape


@dataclass(frozen=True)
class Window:
    """One spatial dim: sizes of operand, kernel and result, and the parameters of the module's formula."""

    operand: int
    kernel: int
    result: int
    stride: int
    padding: tuple[int, int]
    operand_dilation: int
    kernel_dilation: int

    @property
    def kind(self) -> str:
        """plain (untouched), blocks, contract, spread or overlap."""
        stretched = (self.operand_dilation, self.kernel_dilation) != (1, 1)
        padded = tuple(self.padding) != (0, 0)
        if not stretched and not padded and self.stride == self.kernel and self.operand == self.result * self.kernel:
            return "plain" if self.kernel == 1 else "blocks"
        if (self.stride, self.operand_dilation) == (1, 1) and not padded and self.kernel_dilation == self.result:
            return "contract" if self.operand == self.kernel * self.result else "overlap"
        dilation = self.operand_dilation
        if (self.stride, self.kernel_dilation) == (1, 1) and tuple(self.padding) == (dilation - 1, dilation - 1):
            return "spread" if self.kernel == dilation and self.result == self.operand * dilation else "overlap"
        return "overlap"

    def dims(self, new: Rules) -> tuple[Dim, Dim, Dim]:
        """Returns the factors of operand, kernel and result."""
        match self.kind:
            case "plain" | "blocks":
                outer, inner = new.dim(self.result, "parallel"), new.dim(self.kernel, "replicate")
                return outer + inner, inner, outer
            case "contract":
                outer, inner = new.dim(self.kernel, "sum"), new.dim(self.result, "replicate")
                return outer + inner, outer, inner
            case "spread":
                outer, inner = new.dim(self.operand, "parallel"), new.dim(self.kernel, "replicate")
                return outer, inner, outer + inner
        moved = new.dim(math.gcd(self.operand, self.result), "special")
        return moved, new.dim(self.kernel, "replicate"), moved


def conv(call: Call) -> Rule:
    """A convolution is a product over features, batched over the batch, with a window along each spatial dim."""
    params, numbers = call.params, call.params["dimension_numbers"]
    lhs, rhs, out = shape(call.operands[0]), shape(call.operands[1]), shape(call.results[0])
    left: dict[int, Dim] = {}
    right: dict[int, Dim] = {}
    result: dict[int, Dim] = {}
    new = Rules()
    batch, features = lhs[numbers.lhs_spec[0]], lhs[numbers.lhs_spec[1]]
    outputs, inputs = rhs[numbers.rhs_spec[0]], rhs[numbers.rhs_spec[1]]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    group = new.dim(max(groups, batch_groups), "parallel")
    # With groups the inner factor of a grouped dim is not contiguous, and what shares it cannot be split either.
    output = new.dim(outputs // max(groups, batch_groups), "replicate" if group else "parallel")
    feature = new.dim(inputs, "replicate" if groups > 1 else "sum")
    example = new.dim(batch // batch_groups, "replicate" if batch_groups > 1 else "parallel")
    assert features == inputs * groups and groups * batch_groups == max(groups, batch_groups), params
    left[numbers.lhs_spec[0]] = (group if batch_groups > 1 else ()) + example
    left[numbers.lhs_spec[1]] = (group if groups > 1 else ()) + feature
    right[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = group + output
    right[numbers.rhs_spec[1]] = feature
    result[numbers.out_spec[0]] = example
    for n, (d, e, f) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        padding = params["padding"][n]
        dilations = params["lhs_dilation"][n], params["rhs_dilation"][n]
        window = Window(lhs[d], rhs[e], out[f], params["window_strides"][n], padding, *dilations)
        left[d], right[e], result[f] = window.dims(new)
    tensors = [tuple(dims[d] for d in range(len(dims))) for dims in (left, right, result)]
    return new.rule(tensors[:2], tensors[2:])


def pool_dims(call: Call, operand: Sequence[int], result: Sequence[int]) -> tuple[Rules, Dims, Dims]:
    """Returns the factors of a pool's operand and result.

    The window is not a tensor, so a contraction counts as an overlap.
    """
    params, new = call.params, Rules()
    ones = (1,) * len(operand)
    before, after = [], []
    for n, (size, out) in enumerate(zip(operand, result, strict=True)):
        dilations = params.get("base_dilation", ones)[n], params.get("window_dilation", ones)[n]
        stride, padding = params["window_strides"][n], params["padding"][n]
        window = Window(size, params["window_dimensions"][n], out, stride, padding, *dilations)
        if window.kind in ("plain", "blocks", "spread"):
            left, _, right = window.dims(new)
        else:
            left = right = new.dim(math.gcd(size, out), "special")
        before.append(left)
        after.append(right)
    return new, tuple(before), tuple(after)


def pool(call: Call) -> Rule:
    """reduce_window: any number of operands of one shape, then as many initial values or none."""
    new, before, after = pool_dims(call, shape(call.operands[0]), shape(call.results[0]))
    operands: list[Dims] = [before if len(shape(aval)) == len(before) else () for aval in call.operands]
    return new.rule(operands, [after] * len(call.results))


def scatter_into_windows(call: Call) -> Rule:
    """Gradients of max pools: select_and_scatter_add(source, operand), select_and_scatter(operand, source, initial)."""
    order = (1, 0) if call.name == "select_and_scatter_add" else (0, 1)
    operand, source = (shape(call.operands[n]) for n in order)
    new, before, after = pool_dims(call, operand, source)
    tensors: list[Dims] = [after, before] if order == (1, 0) else [before, after, ()]
    return new.rule(tensors, [before])


WINDOWS: Mapping[str, Callable[[Call], Rule]] = {
    "conv_general_dilated": conv,
    "reduce_window": pool,
    "reduce_window_sum": pool,
    "reduce_window_max": pool,
    "reduce_window_min": pool,
    "select_and_gather_add": pool,
    "select_and_scatter": scatter_into_windows,
    "select_and_scatter_add": scatter_into_windows,
}
