"""Figures of a planned stage for reports: the use of each mesh axis, the bytes held, and the seconds of computing."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs.flops import flops_of
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.folding import copies_of, count_uses, users_of
from alpa_lite.passes.lowering.prices import FREE, Price
from alpa_lite.passes.lowering.program import Body, Loop, Reshard, computes, spec_of
from alpa_lite.passes.sharding import kinds
from alpa_lite.passes.sharding.connected import Place, every_part, find_connected_factors
from alpa_lite.passes.sharding.groups import Group, Grouping
from alpa_lite.passes.sharding.space import block_count
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.plan.figures import AxisUse, OpCost, Products, Residual

# -- work -------------------------------------------------------------------------------------------------------------


def products(stages: Iterable[PlannedStage], cluster: Cluster) -> Products:
    """Returns the FLOPs of the step's own products, all stages together."""
    flops: dict[str, float] = defaultdict(float)
    for planned in stages:
        values = planned.graph.traced.graph.values
        for _, op, work in _products(planned.grouping, planned.rules, planned.graph.traced):
            first = next((a for a in op.operands if not isinstance(a, Lit)), op.results[0])
            dtype = str(values[first].dtype)
            flops[dtype] += work
    total = sum(flops.values())
    seconds = sum(amount / cluster.peak(dtype) for dtype, amount in flops.items())
    return Products(total, total / seconds if seconds else 0.0)


def _products(grouping: Grouping, rules: Mapping[Any, Rule], traced: Traced) -> Iterator[tuple[Group, Op, float]]:
    """Yields the products of a step with the FLOPs of all executions; without those that are computed again."""
    for group in grouping.groups:
        for number in group.ops:
            op = grouping.ops[number]
            if op.name in primitives.PRODUCTS and not _jax.is_computed_again(op.source):
                runs = group.trips * count_uses(traced, None, op)
                yield group, op, flops_of(op, rules[op.key], traced.graph.values) * runs


def operation_seconds(planned: PlannedStage) -> tuple[OpCost, ...]:
    """Returns the seconds of a stage's operations by place, primitive and limiting resource, in program order.

    Reads of the arguments, and collectives of results, belong to no operation and come last.
    """
    found: defaultdict[tuple[str, str, bool], Counter[str]] = defaultdict(Counter)
    results: Counter[str] = Counter()
    prices = planned.prices.operations

    def spend(op: Op, price: Price, **sums: Any) -> None:
        line = _jax.source_line(op.source)
        scope = re.sub(r"\d+", "#", _jax.describe_location(op.source).removeprefix(line))
        found[line + scope, op.name, price.flops > price.bytes].update(sums)

    for segment in planned.segments.items:
        for item in computes(segment.instructions):
            own = prices.get(item.op.index, FREE)
            if own.seconds:
                spend(item.op, own, flops=own.flops, bytes=own.bytes, starts=own.starts, count=own.runs)
        for (_, move, op), latency, links in planned.prices.links(segment.instructions):
            runs = planned.runs(segment) * count_uses(planned.graph.traced, move and move[0], op)
            sums: Any = {"links": links * runs, "latency": latency * runs}
            if op is None:
                results.update(sums)
            else:
                spend(op, prices.get(op.index, FREE), **sums)
    rows = [OpCost(place, name, **sums) for (place, name, _), sums in found.items()]
    rows.append(OpCost("arguments of the step", "read", bytes=planned.prices.arguments))
    rows.append(OpCost("results of the step", "collective", **results))
    return (*rows[:-2], *(row for row in rows[-2:] if row.total))


def examples(traced: Traced) -> int:
    """Returns the leading dim of the batch."""
    inputs = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    return max(
        (traced.graph.values[v].shape[0] for a, v in inputs if a.role == "batch" and traced.graph.values[v].shape),
        default=0,
    )


# -- axes -------------------------------------------------------------------------------------------------------------


def axis_uses(planned: PlannedStage, examples: int) -> tuple[AxisUse, ...]:
    """Returns the use of each axis of a stage's mesh.

    Args:
      examples: of a micro-batch. In values from other stages, the first dim of this size is taken as the batch dim.
    """
    traced, grouping, found = planned.graph.traced, planned.grouping, planned.mesh_solution
    names = _names(planned, examples)
    shares: dict[str, dict[str, float]] = {axis: defaultdict(float) for axis in found.mesh.axis_names}
    total = 0.0
    for group, _, work in _products(grouping, planned.rules, traced):
        total += work
        for factor, axes in enumerate(found.choice[group.index].axes):
            for axis in axes:
                shares[axis][names.get((group.index, factor), "tensor")] += work
    kept = _sharded(planned)
    return tuple(
        AxisUse(
            name=axis,
            size=found.mesh.axis_size(axis),
            products={name: work / total for name, work in sorted(shares[axis].items(), key=lambda i: -i[1]) if total},
            params=kept["params"].get(axis, 0.0),
            optimizer=kept["optimizer"].get(axis, 0.0),
        )
        for axis in found.mesh.axis_names
    )


def _sharded(planned: PlannedStage) -> dict[str, dict[str, float]]:
    """Kind of state -> axis -> the share of the bytes that lies sharded over it. Frozen weights are parameters, too."""
    traced = planned.graph.traced
    sizes = {"params": 0, "optimizer": 0}
    out: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in sizes}
    held = {**kinds.state_kinds(traced)}
    held |= {i: "params" for i, argument in enumerate(traced.arguments) if argument.role == "frozen"}
    for number, kind in held.items():
        value = traced.graph.block.inputs[number]
        size = traced.graph.values[value].nbytes * (1 if traced.copies is None else traced.copies.count_values(value))
        sizes[kind] += size
        for axis in planned.program.inputs[number].used_axes:
            out[kind][axis] += size
    return {kind: {axis: b / sizes[kind] for axis, b in axes.items() if sizes[kind]} for kind, axes in out.items()}


def _names(planned: PlannedStage, examples: int) -> dict[Place, str]:
    """Names of factors in the user's words, by the dims of arguments that they are connected with."""
    traced, grouping, rules = planned.graph.traced, planned.grouping, planned.rules
    graph, weights = traced.graph, kinds.parameter_of(traced).keys()
    inner: dict[str, list[Place]] = {"expert": [], "sequence": [], "space": []}
    data: list[Place] = []
    for group, op, _ in _products(grouping, rules, traced):
        factors = group.op_factors[group.ops.index(op.index)]
        inner["expert"] += [(group.index, factors[f]) for f in _experts(op, rules[op.key], weights)]
    for port, argument, value in zip(planned.graph.inputs, traced.arguments, graph.block.inputs, strict=False):
        home, shape = grouping.homes.get(value), graph.values[value].shape
        if home is None or not home.group or not shape:
            continue
        if argument.role == "batch":
            tokens = len(shape) == 2 and jnp.issubdtype(graph.values[value].dtype, jnp.integer)
            dims = home.dims[1:] if tokens else home.dims[1:-1] if len(shape) > 3 else ()
            inner["sequence" if tokens else "space"] += [(home.group, f) for dim in dims for f in dim]
            data += [(home.group, f) for f in home.dims[0]]
        elif port.kind == "crossing" and examples in shape[1:]:
            data += [(home.group, f) for f in home.dims[1 + shape[1:].index(examples)]]
    out: dict[Place, str] = {}
    for name, places in inner.items():
        for place in find_connected_factors(grouping, places, every_part):
            out.setdefault(place, name)
    return out | dict.fromkeys(find_connected_factors(grouping, data, every_part), "data")


def _experts(op: Op, rule: Rule, weights: Set[int]) -> set[int]:
    """The factors that both operands and the result have, where one operand is weights: one product an expert."""
    if len(rule.operands) < 2 or not any(a in weights for a in op.operands if not isinstance(a, Lit)):
        return set()
    left, right, result = ({f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0]))
    return left & right & result


# -- activations ------------------------------------------------------------------------------------------------------


def saved_activations(planned: PlannedStage) -> tuple[Residual, ...]:
    """Returns the activations that the forward pass of a stage leaves for its backward pass, in program order.

    Those are the registers that an operation of the reverse pass reads and an operation before it wrote, as JAX marks
    them (`_jax.derivative`). Arguments, and weights in another form, are left out: they are no activations.
    """
    traced, program = planned.graph.traced, planned.program
    block, values = traced.graph.block, traced.graph.values
    start = {v for v, a in zip(block.inputs, traced.arguments, strict=False) if a.is_resident}
    weights = kinds.origins(block, start).keys()
    found: list[tuple[Any, tuple[Any, ...]]] = []  # order in the step, and what is held

    def visit(body: Body) -> None:
        """Counts the registers of a body, and of its loops."""
        made: dict[int, tuple[int, Op, str]] = {}  # register -> value, what made it, the collective behind it
        for item in body.instructions:
            reader = item.used_by if isinstance(item, Reshard) else item.op
            if reader is not None and _jax.derivative(reader.source) == "transpose":
                for register in filter(made.__contains__, item.reads):
                    value, op, kind = made.pop(register)
                    layout: Layout = program.registers[register]
                    size = values[value].nbytes // block_count(layout, program.mesh)
                    name = f"{op.name}, {kind}" if kind else op.name
                    name += f", partial over {'+'.join(layout.partial)}" if layout.partial else ""
                    types = values[value].shape, str(values[value].dtype), spec_of(Layout(layout.dims))
                    for (order, _), one in zip(users_of(traced, value, reader), copies_of(traced, op), strict=True):
                        found.append((order, (_jax.describe_location(one.source), name, *types, size)))
            elif isinstance(item, Reshard):
                if item.source in made and item.value not in weights:
                    kind = next((step.kind for step in item.steps if step.kind != "slice"), "")
                    made[item.result] = item.value, made[item.source][1], kind
            else:
                pairs = zip(item.results, item.op.results, strict=True)
                made |= {register: (value, item.op, "") for register, value in pairs if value not in weights}
            for inner in item.bodies if isinstance(item, Loop) else ():
                visit(inner)

    visit(program.body)
    if traced.copies is not None:
        found.sort(key=lambda pair: pair[0])
    return tuple(Residual(*key, count=count) for key, count in Counter(key for _, key in found).items())
