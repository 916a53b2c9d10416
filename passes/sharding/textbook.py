"""Strategies of operations that textbook methods fix; the layouts of arguments are fixed by `sharding.limits`.

DataParallel, Zero    An operation whose factors hold examples is cut into blocks of examples, over all axes. Every
                      other one works on whole values. Partial sums (gradients) may travel through additions. Zero may
                      also cut operations without examples, along one factor over all axes: updates, and with stage 3
                      those that read a parameter in blocks before it is gathered.
    Zero(1)           adds up whole gradients in a loop over micro-batches; Zero(2) and Zero(3) may cut them there.
    Zero(3)           holds parameters in blocks within loops, too, and gathers them again for the backward pass.

TensorParallel        Nothing is cut between examples. A product of examples that reads a parameter is cut along a dim
                      of that parameter (output features, input features, heads, experts), and the parameter is stored
                      so. A gather from a parameter is cut along the dim that it looks up, the vocabulary. Everything
                      else may be cut along factors connected with dims of parameters; the operations between the pairs
                      of matrices (norms, residuals) are done whole. Parameters, gradients and new parameters do not
                      move, but for optimizers that need whole gradients; activations are all-reduced, or gathered where
                      no second matrix of a pair sums them up. Which matrix of a pair is cut by columns and which by
                      rows follows from the cost.

An operation that cannot be cut so (six heads over eight devices, a sort of the examples) is not cut; an operation that
has no such strategy either keeps all of its own. All other choices (which dim of an optimizer's state, whether a
softmax is gathered before or after) are decided by the cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import jax.numpy as jnp

from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.methods import DataParallel, TensorParallel, Zero
from alpa_lite.passes.ir.primitives import DECIDING, PRODUCTS, UNFUSED
from alpa_lite.passes.sharding import connected, kinds
from alpa_lite.passes.sharding.groups import Demand, Group, Grouping, factors_in
from alpa_lite.passes.sharding.space import Limit, MoveLimits
from alpa_lite.passes.sharding.tables import GroupedStep

Textbook = DataParallel | Zero | TensorParallel


def zero_stage(method: Textbook) -> int:
    """Returns the stage of ZeRO; 0 of another method."""
    return method.stage if isinstance(method, Zero) else 0


def limit_operations(
    step: GroupedStep, method: Textbook, mesh: LogicalMesh, axes: Sequence[str], named: frozenset[int] = frozenset()
) -> tuple[dict[int, Limit], MoveLimits | None]:
    """Returns the strategies of each group and the moves of values that a method allows; nothing where all are free.

    All are free without a batch, and on one device.

    Args:
      axes: of the mesh: those that the method is about.
      named: arguments, by number, that the user constrains.
    """
    over = frozenset(axis for axis in axes if mesh.axis_size(axis) > 1)
    if not step.examples or not over:
        return {}, None
    if isinstance(method, TensorParallel):
        return _over_features(step, over, mesh.product(tuple(over)), named)
    return _over_examples(step, over, zero_stage(method)), None


def _over_examples(step: GroupedStep, over: frozenset[str], stage: int) -> dict[int, Limit]:
    """Returns the limits of DataParallel and Zero; stage 3 has parameters within loops in blocks."""
    grouping = step.grouping
    held = {grouping.homes[v].group for v in kinds.forms(step.traced) if stage == 3 and v in grouping.homes}
    out = {}
    for group in grouping.groups[1:]:
        examples = tuple(sorted(step.examples.get(group.index, {}).items()))
        adds_up = group.kind == "linear" and group.trips > 1
        blocks = "also" if stage and not (stage == 1 and adds_up) else ""
        if group.index in held and group.kind == "leaf":
            blocks = "instead"
        out[group.index] = Limit(over, examples, blocks=blocks, fills=bool(examples))
    return out


def _over_features(
    step: GroupedStep, over: frozenset[str], parts: int, named: frozenset[int]
) -> tuple[dict[int, Limit], MoveLimits]:
    """Returns the limits of TensorParallel: what groups are cut along, and what does not move.

    Operations between the products of two pairs are done whole, like what they make: they do not take their blocks of
    whole values.
    """
    traced, grouping, block = step.traced, step.grouping, step.traced.graph.block
    parameters = kinds.parameters(traced)
    read = parameters | kinds.forms(traced)
    new = {a for out, _ in traced.state if isinstance(a := block.outputs[out], int) and step.kinds.get(a) == "params"}
    gradients = {value for value, kind in step.kinds.items() if kind == "gradients"}
    if _updates_read_whole_values(step, read):
        gradients = set()
    free = {block.inputs[number] for number in named}
    for op in step.constraints:
        free.update(a for a in (*op.operands, *op.results) if isinstance(a, int))
    along: dict[int, set[int]] = {}
    for demand, factors, divides in _reading(step, read, parts):
        along.setdefault(demand.group, set()).update(factors)
        free.update(() if divides else [demand.value])
    readers = {}
    for group, some in along.items():  # of a gather first what it looks up, if that is anything
        op = grouping.ops[grouping.groups[group].ops[0]]
        looked = some - factors_in(grouping.homes[op.results[0]].dims) if op.name == "gather" else set()
        readers[group] = tuple(frozenset(one) for one in (looked, some) if one)
    homes = [grouping.homes[v] for v in parameters]
    places = [(home.group, f) for home in homes if home.group for f in factors_in(home.dims)]
    features = group_factors(connected.find_connected_factors(grouping, places))
    limits = {
        g: Limit(
            over, tuple((f, 1) for f in sorted(step.examples.get(g, ()))), features.get(g, frozenset()), readers.get(g)
        )
        for g in range(1, len(grouping.groups))
    }
    inexact = {dtype for dtype in {value.dtype for value in traced.graph.values} if jnp.issubdtype(dtype, jnp.inexact)}
    floats = {v for v, value in enumerate(traced.graph.values) if value.dtype in inexact}
    ops = {g: grouping.ops[grouping.groups[g].ops[0]].name for g in step.examples if grouping.groups[g].kind == "heavy"}
    following = {g for g in step.examples if g not in ops or ops[g] in UNFUSED - DECIDING - {"fft"}}
    uncut = frozenset((d.group, d.value) for d in grouping.demands if d.group in following and d.value in floats)
    return limits, MoveLimits(over, frozenset(read | new | gradients), frozenset(free), uncut)


def parameters_of_products(step: GroupedStep, parts: int) -> set[int]:
    """The arguments that products or gathers over examples read as parameters, in their own shape or out of a stack.

    Those alone of which one such reader can be cut into this many parts.
    """
    traced, values, inputs = step.traced, step.traced.graph.values, step.traced.graph.block.inputs
    origins = kinds.parameter_of(traced)
    found = set()
    for demand, _, divides in _reading(step, origins.keys(), parts):
        shape, whole = values[demand.value].shape, values[origins[demand.value]].shape
        if divides and sorted(shape) in (sorted(whole), sorted(whole[1:])):
            found.add(origins[demand.value])
    return {number for number in range(len(traced.arguments)) if inputs[number] in found}


def _reading(step: GroupedStep, read: Collection[int], parts: int) -> Iterator[tuple[Demand, set[int], bool]]:
    """Yields how products and gathers over examples read parameters.

    With each its factors that hold no examples, and whether one of them divides into `parts`: 2 groups of channels do
    not into 8.
    """
    grouping = step.grouping
    for demand in grouping.demands:
        if demand.group in step.examples and reads_weights(grouping, demand, read):
            features = factors_in(demand.dims) - step.examples[demand.group].keys()
            is_gather, mine = grouping.ops[demand.op].name == "gather", grouping.groups[demand.group].factors
            able = [mine[f] for f in features if is_gather or mine[f].kind in ("parallel", "sum")]
            yield demand, features, any(factor.size % parts == 0 for factor in able)


def reads_weights(grouping: Grouping, demand: Demand, weights: Collection[int]) -> bool:
    """Returns whether a product or a gather wants one of some values."""
    reads = demand.value in weights and demand.op >= 0
    return reads and grouping.ops[demand.op].name in PRODUCTS | {"gather"}


def _updates_read_whole_values(step: GroupedStep, read: Collection[int]) -> bool:
    """Whether an update works on whole gradients, as decompositions and products of them do; they are gathered then."""
    grouping, counts, values = step.grouping, step.examples, step.traced.graph.values
    shapes = {values[v].shape for v in step.traced.graph.block.inputs if v in read and values[v].shape}
    for demand in grouping.demands:
        home = grouping.homes[demand.value]
        over_examples = not factors_in(home.dims).isdisjoint(counts.get(home.group, ()))
        if values[demand.value].shape not in shapes or over_examples:
            continue
        product = demand.op >= 0 and grouping.ops[demand.op].name in PRODUCTS
        if demand.group == 0 or (product and demand.value not in read and demand.group not in counts):
            return True
    return False


def group_factors(places: Collection[connected.Place]) -> dict[int, frozenset[int]]:
    """Group -> those of its factors that are among some."""
    found: dict[int, set[int]] = {}
    for group, factor in places:
        found.setdefault(group, set()).add(factor)
    return {group: frozenset(some) for group, some in found.items()}


def least_state(traced: Traced, method: Textbook, parts: int) -> float:
    """Bytes per device of state and frozen weights that no plan of a method over this many devices has less of."""
    values, of = traced.graph.values, kinds.state_kinds(traced)
    stage = 3 if isinstance(method, TensorParallel) else zero_stage(method)
    total = 0.0
    for number, (argument, value) in enumerate(zip(traced.arguments, traced.graph.block.inputs, strict=False)):
        if argument.is_resident:
            in_blocks = stage == 3 or (stage and of.get(number) == "optimizer")
            total += values[value].nbytes / (parts if in_blocks else 1)
    return total


def _products(step: GroupedStep) -> Iterator[tuple[Group, Collection[int]]]:
    """Yields the products over examples, and by how many examples each of their factors runs."""
    for group in step.grouping.groups:
        if group.index in step.examples and group.ops and step.grouping.ops[group.ops[0]].name in PRODUCTS:
            yield group, step.examples[group.index].values()


def share_in_pieces(step: GroupedStep, parts: int) -> float:
    """Returns the share of the work of products over examples whose examples do not divide into this many parts."""
    total = stuck = 0.0
    for group, counts in _products(step):
        work = math.prod(factor.size for factor in group.factors) * group.trips * group.copies
        total += work
        stuck += work * all(count % parts for count in counts)
    return stuck / total if total else 0.0


def may_be_cut(step: GroupedStep, parts: int) -> bool:
    """Whether there is a product over examples whose examples divide into this many parts, or no such product."""
    found = [count for _, counts in _products(step) for count in counts]
    return not found or any(count % parts == 0 for count in found)
