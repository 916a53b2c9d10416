"""Functions of arrays, and operations on parts of their operands, as operations of a graph that is rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Graph, Lit, Op, Value
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import Rewriter, shape_of
from alpa_lite.passes.tracing import conversion

COMBINED: Mapping[str, Any] = {
    "reduce_sum": lax.add_p, "reduce_max": lax.max_p, "reduce_min": lax.min_p, "reduce_and": lax.and_p,
    "reduce_or": lax.or_p,
}  # fmt: skip
"""The operation that joins the reductions of two parts; for any other reduction it is addition."""


class FunctionWriter(Rewriter):
    """A rewriter that traces functions, each once for all operands of the same types, and writes their operations."""

    def __init__(self, graph: Graph, axes: Sequence[tuple[str, int]] = (), *, fold_empty: bool = True) -> None:
        """Args:
        graph: that is rewritten.
        axes: names and sizes of axes along which functions may ask for their number.
        fold_empty: as for `graph_of`.
        """
        super().__init__(graph)
        self._axes, self._fold_empty = list(axes), fold_empty
        self._graphs: dict[Hashable, Graph] = {}

    def attribute(self, ops: Iterable[Op], origin: int) -> None:
        """Notes that some new ops are parts of another one."""
        self._origin.update(dict.fromkeys((op.index for op in ops), self.origin(origin)))

    def origin(self, index: int) -> int:
        """Returns the index of the op of the graph that an op copies, or is a part of; its own if there is none."""
        return self._origin.get(index, index)

    def write(
        self,
        run: Callable[..., Any],
        operands: Sequence[Atom],
        *,
        kind: Hashable = None,
        source: Any = None,
        number: Callable[[], Atom] | None = None,
    ) -> tuple[list[Op], list[Atom]]:
        """Returns the operations that `run` does on arrays like `operands`, and its results.

        Args:
          kind: functions of one kind do the same on operands of the same types; None is like nothing.
          source: of the operations, in place of their own.
          number: gives the number along an axis to a function that asks for it.
        """
        atoms, graph = values_in(operands), self._traced(run, operands, kind)
        names: dict[int, Atom] = dict(zip(graph.block.inputs, atoms, strict=False))
        for value, array in zip(graph.block.inputs[len(atoms) :], graph.constants, strict=True):
            names[value] = self.constant(graph.values[value], array)
        for op in graph.block.ops:
            if op.name == "axis_index" and number is not None:
                names[op.results[0]] = number()
        return self.inline(graph.block, names, graph.values, source)

    def call(
        self,
        function: Callable[..., Any],
        operands: Sequence[Atom],
        *static: Hashable,
        into: list[Op],
        source: Any = None,
        number: Callable[[], Atom] | None = None,
        **named: Hashable,
    ) -> Any:
        """Appends the operations of `function(*static, *operands, **named)` to some others; returns its one result.

        `source` and `number` are as for `write`.
        """
        run, kind = functools.partial(function, *static, **named), (function, static, *named.items())
        made, (result,) = self.write(run, operands, kind=kind, source=source, number=number)
        into.extend(made)
        return result

    def _traced(self, run: Callable[..., Any], operands: Sequence[Atom], kind: Hashable) -> Graph:
        """Returns the graph of a function, of which literals are no inputs."""
        specs = [_jax.spec_of(self.values[a].aval) for a in values_in(operands)]
        is_shared = kind is not None and len(specs) == len(operands)
        key = (kind, *((s.shape, s.dtype, s.weak_type) for s in specs)) if is_shared else None
        if key is None or key not in self._graphs:

            def call(*arrays: Any) -> Any:
                given = iter(arrays)
                return run(*[a.value if isinstance(a, Lit) else next(given) for a in operands])

            jaxpr = jax.make_jaxpr(call, axis_env=self._axes)(*specs)
            self._graphs[key] = conversion.graph_of(jaxpr, self.keys, fold_empty=self._fold_empty)
        return self._graphs[key]


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
