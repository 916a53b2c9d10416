"""Parts of values along dim 0, and operations on parts of their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from alpa_lite.ir.graph import Atom, Op, Value
from alpa_lite.passes.ir.rewriting import Rewriter, shape_of

COMBINED: Mapping[str, Any] = {
    "reduce_sum": lax.add_p, "reduce_max": lax.max_p, "reduce_min": lax.min_p, "reduce_and": lax.and_p,
    "reduce_or": lax.or_p,
}  # fmt: skip
"""The operation that joins the reductions of two parts; for any other reduction it is addition."""


def rows_of(rewriter: Rewriter, value: int, low: int, high: int, source: Any, result: int | None = None) -> Op:
    """The operation that takes some rows of a value; `result`: the value that it makes, by default a new one."""
    shape = rewriter.values[value].shape
    made = rewriter.new_value_of_shape(value, (high - low, *shape[1:])) if result is None else result
    start, limit = (low, *(0,) * (len(shape) - 1)), (high, *shape[1:])
    params = {"start_indices": start, "limit_indices": limit, "strides": None}
    return rewriter.op(lax.slice_p, params, [value], [made], source)


def params_for(op: Op, operands: Sequence[Atom], results: Sequence[int], values: Sequence[Value]) -> Mapping[str, Any]:
    """Returns the parameters of an op on smaller operands and results."""
    params, made = op.params, values[results[0]].shape
    if op.name == "broadcast_in_dim":
        return {**params, "shape": made}
    if op.name == "reshape":
        return {**params, "new_sizes": made}
    if op.name not in ("slice", "gather", "dynamic_slice"):
        return params
    name = "limit_indices" if op.name == "slice" else "slice_sizes"
    before, after = shape_of(op.operands[0], values), shape_of(operands[0], values)
    sizes = zip(params[name], before, after, strict=True)
    if op.name == "slice":
        return {**params, name: tuple(limit if n == m else m for limit, n, m in sizes)}
    return {**params, name: tuple(m if size == n else size for size, n, m in sizes)}
