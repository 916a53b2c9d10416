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
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Layout, LogicalMesh, reshard_steps
from alpa_lite.methods import DataParallel, TensorParallel, Zero
from alpa_lite.passes.ir.primitives import DECIDING, PRODUCTS, UNFUSED
from alpa_lite.passes.sharding import connected, kinds
from alpa_lite.passes.sharding.groups import Demand, Group, Grouping, factors_in
from alpa_lite.passes.sharding.space import Strategy
from alpa_lite.passes.sharding.tables import GroupedStep

Textbook = DataParallel | Zero | TensorParallel


@dataclass(frozen=True, eq=False)
class Operations:
    """The strategies that a method allows for operations."""

    def key(self, group: Group) -> Hashable:
        """Groups of one colour and equal keys are allowed the same."""
        raise NotImplementedError

    def filter_strategies(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """Returns those of a group's strategies that are allowed, of all that it could have."""
        raise NotImplementedError

    def fills(self, group: Group) -> bool:
        """Returns whether only the kept strategies with the fewest idle axes count, if the group is a product."""
        del group
        return False


@dataclass(frozen=True, eq=False)
class _Textbook(Operations):
    """Common parts of the two families of textbook methods.

    Attributes:
      mesh, axes: the mesh, and those of its axes that the method is about; strategies of the others are free.
      examples: as of `connected.examples`.
    """

    mesh: LogicalMesh
    axes: frozenset[str]
    examples: Mapping[int, Mapping[int, int]]

    def cut_factors(self, strategy: Strategy) -> set[int]:
        """Returns the factors that axes of the method cut."""
        return {f for f, axes in enumerate(strategy.axes) if self.axes.intersection(axes)}

    def uses_all(self, strategy: Strategy) -> bool:
        """Returns whether every axis of the method cuts some factor."""
        return self.axes.issubset(a for axes in strategy.axes for a in axes)

    def select_uncut(self, found: Sequence[Strategy]) -> list[Strategy]:
        """Returns the strategies that cut nothing over the method's axes; all if there is none."""
        return [s for s in found if not self.cut_factors(s)] or list(found)


@dataclass(frozen=True, eq=False)
class OverExamples(_Textbook):
    """DataParallel and Zero.

    Attributes:
      stage: of ZeRO; 0 for DataParallel.
      ports: the groups of parameters within loops, which stage 3 holds in blocks.
    """

    stage: int = 0
    ports: frozenset[int] = frozenset()

    def key(self, group: Group) -> Hashable:
        """As of `Operations`."""
        return tuple(sorted(self.examples.get(group.index, {}).items())), group.index in self.ports

    def filter_strategies(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """As of `Operations`."""
        summed = [s for s in found if not self.axes.intersection(s.partial)]
        counts = self.examples.get(group.index)
        if counts:
            return [s for s in summed if self.uses_all(s) and self._by_examples(s, counts)] or self.select_uncut(found)
        whole = self.select_uncut(found)
        blocks = [s for s in summed if any(self.axes.issubset(axes) for axes in s.axes)]
        if group.index in self.ports:
            return blocks or whole
        adds_up = group.kind == "linear" and group.trips > 1
        return whole if not self.stage or (self.stage == 1 and adds_up) else [*whole, *blocks]

    def fills(self, group: Group) -> bool:
        """As of `Operations`."""
        return group.index in self.examples

    def _by_examples(self, strategy: Strategy, counts: Mapping[int, int]) -> bool:
        """Returns whether the axes of the method cut into whole examples."""
        return all(counts.get(f, 1) % self.mesh.product(strategy.axes[f]) == 0 for f in self.cut_factors(strategy))


@dataclass(frozen=True, eq=False)
class OverFeatures(_Textbook):
    """TensorParallel.

    Attributes:
      features: group -> the factors that hang together with dims of parameters.
      readers: group -> what a product or a gather that reads a parameter is cut along, the first choice first.
      unmoved_values: values that do not move: parameters, their other forms, new parameters, and gradients.
      free_values: values that move as they must: the user says where they are, or what reads them cannot be cut.
      followers: groups of elementwise operations and reductions over examples.
      floats: values that are differentiated.
    """

    features: Mapping[int, frozenset[int]]
    readers: Mapping[int, tuple[frozenset[int], ...]]
    unmoved_values: frozenset[int]
    free_values: frozenset[int]
    followers: frozenset[int]
    floats: frozenset[int]

    def key(self, group: Group) -> Hashable:
        """As of `Operations`."""
        mine = frozenset(self.examples.get(group.index, ()))
        return mine, self.features.get(group.index, frozenset()), self.readers.get(group.index)

    def filter_strategies(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """As of `Operations`."""
        for along in self.readers.get(group.index, ()):
            cut = [s for s in found if self.cut_factors(s) <= along and self.uses_all(s)]
            if cut:
                return cut
        if group.index in self.readers:
            return self.select_uncut(found)
        along = self.features.get(group.index, frozenset()) - self.examples.get(group.index, {}).keys()
        return [s for s in found if self.cut_factors(s) <= along] or list(found)

    def follows(self, demand: Demand, layout: Layout) -> bool:
        """Returns whether who wants a value in a layout must not take its block of a whole one.

        Operations between the products of two pairs are done whole, like what they make.
        """
        return demand.group in self.followers and demand.value in self.floats and bool(self.axes & layout.used_axes)

    def forbidden_moves(
        self, values: Sequence[int], made: Sequence[Layout], wanted: Sequence[tuple[Layout, bool]]
    ) -> np.ndarray | None:
        """[made, wanted] which moves of some values are not allowed; None where all are. With each goal, `follows`."""
        if not self.free_values.isdisjoint(values):
            return None
        usual = {"slice"} if not self.unmoved_values.isdisjoint(values) else {"slice", "all_reduce", "all_gather"}
        out = np.zeros((len(made), len(wanted)), dtype=bool)
        for j, (dst, follows) in enumerate(wanted):
            allowed = usual - {"slice"} if follows else usual
            for i, src in enumerate(made):
                steps = () if src == dst else reshard_steps(src, dst) or ()
                out[i, j] = any(step.kind not in allowed and self.axes.intersection(step.axes) for step in steps)
        return out


def zero_stage(method: Textbook) -> int:
    """Returns the stage of ZeRO; 0 of another method."""
    return method.stage if isinstance(method, Zero) else 0


def textbook(
    step: GroupedStep, method: Textbook, mesh: LogicalMesh, axes: Sequence[str], named: frozenset[int] = frozenset()
) -> Operations | None:
    """Returns the strategies that a method allows for operations; None where all are free: no batch, or one device.

    Args:
      axes: of the mesh: those that the method is about.
      named: arguments, by number, that the user constrains.
    """
    traced, grouping, counts = step.traced, step.grouping, step.examples
    over = frozenset(axis for axis in axes if mesh.axis_size(axis) > 1)
    if not counts or not over:
        return None
    block = traced.graph.block
    forms = kinds.forms(traced)
    if not isinstance(method, TensorParallel):
        stage = zero_stage(method)
        ports = {grouping.homes[v].group for v in forms if v in grouping.homes} if stage == 3 else set()
        leaves = {g for g in ports if grouping.groups[g].kind == "leaf"} - {0}
        return OverExamples(mesh, over, counts, stage, frozenset(leaves))
    read = kinds.parameters(traced) | forms
    new = {a for out, _ in traced.state if isinstance(a := block.outputs[out], int) and step.kinds.get(a) == "params"}
    gradients = {value for value, kind in step.kinds.items() if kind == "gradients"}
    if _updates_read_whole_values(step, read):
        gradients = set()
    free = {block.inputs[number] for number in named}
    for op in step.constraints:
        free.update(a for a in (*op.operands, *op.results) if isinstance(a, int))
    parts = mesh.product(tuple(over))
    free |= {demand.value for demand in _reading(step, read) if not _divides(step, demand, parts)}
    homes = [grouping.homes[v] for v in kinds.parameters(traced)]
    places = [(home.group, f) for home in homes if home.group for f in factors_in(home.dims)]
    dtypes = enumerate(value.dtype for value in traced.graph.values)
    return OverFeatures(
        mesh, over, counts,
        features=group_factors(connected.find_connected_factors(grouping, places)),
        readers=_readers(step, read),
        unmoved_values=frozenset(read | new | gradients),
        free_values=frozenset(free),
        followers=frozenset(index for index in counts if _follows(grouping, grouping.groups[index])),
        floats=frozenset(value for value, dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)),
    )  # fmt: skip


def _follows(grouping: Grouping, group: Group) -> bool:
    """Returns whether a group is elementwise, a reduction, or a value that a loop carries."""
    name = grouping.ops[group.ops[0]].name if group.kind == "heavy" else ""
    return not name or (name in UNFUSED - DECIDING and name != "fft")


def parameters_of_products(step: GroupedStep, parts: int) -> set[int]:
    """The arguments that products or gathers over examples read as parameters, in their own shape or out of a stack.

    Those alone of which one such reader can be cut into this many parts.
    """
    traced, values, inputs = step.traced, step.traced.graph.values, step.traced.graph.block.inputs
    origins = kinds.parameter_of(traced)
    found = set()
    for demand in _reading(step, origins.keys()):
        shape, whole = values[demand.value].shape, values[origins[demand.value]].shape
        if sorted(shape) in (sorted(whole), sorted(whole[1:])) and _divides(step, demand, parts):
            found.add(origins[demand.value])
    return {number for number in range(len(traced.arguments)) if inputs[number] in found}


def _reading(step: GroupedStep, read: Collection[int]) -> Iterator[Demand]:
    """Yields how products and gathers over examples read parameters."""
    for demand in step.grouping.demands:
        if demand.group in step.examples and reads_weights(step.grouping, demand, read):
            yield demand


def reads_weights(grouping: Grouping, demand: Demand, weights: Collection[int]) -> bool:
    """Returns whether a product or a gather wants one of some values."""
    reads = demand.value in weights and demand.op >= 0
    return reads and grouping.ops[demand.op].name in PRODUCTS | {"gather"}


def _features_of(step: GroupedStep, demand: Demand) -> set[int]:
    """Returns the factors that a demand is made of and that hold no examples."""
    return factors_in(demand.dims) - step.examples[demand.group].keys()


def _divides(step: GroupedStep, demand: Demand, parts: int) -> bool:
    """Whether the reader of a parameter divides along a dim of it into `parts`: 2 groups of channels do not into 8."""
    factors, is_gather = step.grouping.groups[demand.group].factors, step.grouping.ops[demand.op].name == "gather"
    mine = [factors[f] for f in _features_of(step, demand)]
    return any((is_gather or f.kind in ("parallel", "sum")) and f.size % parts == 0 for f in mine)


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


def _readers(step: GroupedStep, read: Collection[int]) -> dict[int, tuple[frozenset[int], ...]]:
    """Returns by group the factors along which products and gathers over examples that read a parameter are cut.

    For a gather, the factors that it looks up are the first choice, if there are any.
    """
    grouping = step.grouping
    dims: dict[int, set[int]] = {}
    for demand in _reading(step, read):
        dims.setdefault(demand.group, set()).update(_features_of(step, demand))
    out: dict[int, tuple[frozenset[int], ...]] = {}
    for group, some in dims.items():
        op = grouping.ops[grouping.groups[group].ops[0]]
        looked = some - factors_in(grouping.homes[op.results[0]].dims) if op.name == "gather" else set()
        out[group] = tuple(frozenset(one) for one in (looked, some) if one)
    return out


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
        work = math.prod(factor.size for factor in group.factors) * group.trips
        total += work
        stuck += work * all(count % parts for count in counts)
    return stuck / total if total else 0.0


def may_be_cut(step: GroupedStep, parts: int) -> bool:
    """Whether there is a product over examples whose examples divide into this many parts, or no such product."""
    found = [count for _, counts in _products(step) for count in counts]
    return not found or any(count % parts == 0 for count in found)
