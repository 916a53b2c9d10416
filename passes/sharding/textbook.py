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

from alpa_lite.graph import Traced
from alpa_lite.layout import Layout, LogicalMesh, reshard_moves
from alpa_lite.methods import DataParallel, TensorParallel, Zero
from alpa_lite.passes.ir.primitives import DECIDING, PRODUCTS, UNFUSED
from alpa_lite.passes.sharding import connected, kinds
from alpa_lite.passes.sharding.facts import Facts
from alpa_lite.passes.sharding.groups import Demand, Group, Grouping
from alpa_lite.passes.sharding.space import Strategy


@dataclass(frozen=True, eq=False)
class Operations:
    """The strategies that a method allows for operations."""

    def key(self, group: Group) -> Hashable:
        """Groups of one colour and equal keys are allowed the same."""
        raise NotImplementedError

    def kept(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """Those of a group's strategies that are allowed, of all that it could have."""
        raise NotImplementedError

    def fills(self, group: Group) -> bool:
        """Returns whether only the kept strategies with the fewest idle axes count, if the group is a product."""
        del group
        return False

    def follows(self, demand: Demand, layout: Layout) -> bool:
        """Whether who wants a value in a layout must not take its block of a whole one."""
        del demand, layout
        return False

    def refused(
        self, values: Sequence[int], made: Sequence[Layout], wanted: Sequence[tuple[Layout, bool]]
    ) -> np.ndarray | None:
        """[made, wanted] which moves of some values are not allowed; None where all are. With each goal, `follows`."""
        del values, made, wanted
        return None


@dataclass(frozen=True, eq=False)
class _Textbook(Operations):
    """Common parts of the two families of textbook methods.

    Attributes:
      mesh, axes: the mesh, and those of its axes that the method is about; strategies of the others are free.
    """

    mesh: LogicalMesh
    axes: frozenset[str]

    def ours(self, strategy: Strategy) -> list[frozenset[str]]:
        """The axes of the method on each factor."""
        return [self.axes.intersection(axes) for axes in strategy.axes]

    def unused(self, found: Sequence[Strategy]) -> list[Strategy]:
        """The strategies that cut nothing over the method's axes; all if there is none."""
        return [s for s in found if not any(self.ours(s))] or list(found)


@dataclass(frozen=True, eq=False)
class OverExamples(_Textbook):
    """DataParallel and Zero.

    Attributes:
      examples: as of `connected.examples`.
      stage: of ZeRO; 0 for DataParallel.
      ports: the groups of parameters within loops, which stage 3 holds in blocks.
    """

    examples: Mapping[int, Mapping[int, int]]
    stage: int = 0
    ports: frozenset[int] = frozenset()

    def key(self, group: Group) -> Hashable:
        """As of `Operations`."""
        return tuple(sorted(self.examples.get(group.index, {}).items())), group.index in self.ports

    def kept(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """As of `Operations`."""
        counts = self.examples.get(group.index)
        if counts:
            return [s for s in found if self._by_examples(s, counts)] or self.unused(found)
        whole = self.unused(found)
        blocks = [s for s in found if self._one_factor(s)]
        if group.index in self.ports:
            return blocks or whole
        adds_up = group.kind == "linear" and group.trips > 1
        return whole if not self.stage or (self.stage == 1 and adds_up) else [*whole, *blocks]

    def fills(self, group: Group) -> bool:
        """As of `Operations`."""
        return group.index in self.examples

    def _by_examples(self, strategy: Strategy, counts: Mapping[int, int]) -> bool:
        """Whether all axes of the method cut examples, whole ones."""
        if self.axes.intersection(strategy.partial):
            return False
        ours = self.ours(strategy)
        used = {factor for factor, axes in enumerate(ours) if axes}
        return (
            used <= counts.keys()
            and frozenset().union(*ours) == self.axes
            and all(counts[f] % self.mesh.product(strategy.axes[f]) == 0 for f in used)
        )

    def _one_factor(self, strategy: Strategy) -> bool:
        """Whether one factor is cut over all axes of the method."""
        return self.axes in self.ours(strategy) and not self.axes.intersection(strategy.partial)


@dataclass(frozen=True, eq=False)
class OverFeatures(_Textbook):
    """TensorParallel.

    Attributes:
      examples: as of `connected.examples`.
      features: group -> the factors that hang together with dims of parameters.
      readers: group -> what a product or a gather that reads a parameter is cut along, the first choice first.
      still: values that do not move: parameters, their other forms, new parameters, and gradients.
      free: values that move as they must: the user says where they are, or what reads them cannot be cut.
      followers: groups of elementwise operations and reductions over examples.
      floats: values that are differentiated.
    """

    examples: Mapping[int, Mapping[int, int]]
    features: Mapping[int, frozenset[int]]
    readers: Mapping[int, tuple[frozenset[int], ...]]
    still: frozenset[int]
    free: frozenset[int]
    followers: frozenset[int]
    floats: frozenset[int]

    def key(self, group: Group) -> Hashable:
        """As of `Operations`."""
        mine = frozenset(self.examples.get(group.index, ()))
        return mine, self.features.get(group.index, frozenset()), self.readers.get(group.index)

    def kept(self, group: Group, found: Sequence[Strategy]) -> list[Strategy]:
        """As of `Operations`."""
        for along in self.readers.get(group.index, ()):
            cut = [s for s in found if self._along(s, along) and frozenset().union(*self.ours(s)) == self.axes]
            if cut:
                return cut
        if group.index in self.readers:
            return self.unused(found)
        along = self.features.get(group.index, frozenset()) - self.examples.get(group.index, {}).keys()
        return [s for s in found if self._along(s, along)] or list(found)

    def _along(self, strategy: Strategy, factors: frozenset[int]) -> bool:
        """Whether the axes of the method cut these factors alone."""
        return all(f in factors for f, axes in enumerate(self.ours(strategy)) if axes)

    def follows(self, demand: Demand, layout: Layout) -> bool:
        """As of `Operations`: what is between the products of two pairs is done whole, like what they make."""
        return demand.group in self.followers and demand.value in self.floats and bool(self.axes & layout.used)

    def refused(
        self, values: Sequence[int], made: Sequence[Layout], wanted: Sequence[tuple[Layout, bool]]
    ) -> np.ndarray | None:
        """As of `Operations`."""
        if not self.free.isdisjoint(values):
            return None
        usual = {"slice"} if not self.still.isdisjoint(values) else {"slice", "all_reduce", "all_gather"}
        out = np.zeros((len(made), len(wanted)), dtype=bool)
        for j, (dst, follows) in enumerate(wanted):
            allowed = usual - {"slice"} if follows else usual
            for i, src in enumerate(made):
                moves = () if src == dst else reshard_moves(src, dst) or ()
                out[i, j] = any(move[0] not in allowed and self.axes.intersection(move[1]) for move in moves)
        return out


def textbook(
    facts: Facts, method: DataParallel | Zero | TensorParallel, mesh: LogicalMesh, axes: Sequence[str],
    named: frozenset[int] = frozenset(),
) -> Operations | None:  # fmt: skip
    """Returns the strategies that a method allows for operations; None where all are free: no batch, or one device.

    Args:
      axes: of the mesh: those that the method is about.
      named: arguments, by number, that the user constrains.
    """
    traced, grouping, counts = facts.traced, facts.grouping, facts.examples
    over = frozenset(axis for axis in axes if mesh.axis_size(axis) > 1)
    if not counts or not over:
        return None
    block = traced.graph.block
    start, forms = facts.parameters, kinds.forms(traced)
    if not isinstance(method, TensorParallel):
        stage = method.stage if isinstance(method, Zero) else 0
        ports = {grouping.homes[v].group for v in forms if v in grouping.homes} if stage == 3 else set()
        leaves = {g for g in ports if grouping.groups[g].kind == "leaf"} - {0}
        return OverExamples(mesh, over, counts, stage, frozenset(leaves))
    read = start | forms
    own, _ = facts.kinds
    new = {a for out, _ in traced.state if isinstance(a := block.outputs[out], int) and own.get(a) == "params"}
    gradients = {value for value, kind in own.items() if kind == "gradients"}
    if _updates_read_whole_values(traced, grouping, read, counts):
        gradients = set()
    free = {block.inputs[number] for number in named}
    for op in facts.constraints:
        free.update(a for a in (*op.operands, *op.results) if isinstance(a, int))
    readers = _readers(grouping, read, counts)
    free |= {
        demand.value
        for demand in _reading(grouping, read, counts)
        if not _divides(grouping, counts, demand, mesh.product(tuple(over)))
    }
    still = frozenset(read | new | gradients)
    followers = frozenset(index for index in counts if _follows(grouping, grouping.groups[index]))
    dtypes = enumerate(value.dtype for value in traced.graph.values)
    floats = frozenset(value for value, dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
    return OverFeatures(
        mesh, over, counts, _features(grouping, start), readers, still, frozenset(free), followers, floats
    )  # fmt: skip


def _follows(grouping: Grouping, group: Group) -> bool:
    """Whether a group is elementwise, a reduction, or a value that a loop carries."""
    if group.kind != "heavy":
        return True
    op = grouping.ops[group.ops[0]]
    return op.name in UNFUSED - DECIDING and op.name != "fft"


def parameters_of_products(facts: Facts, parts: int) -> set[int]:
    """The arguments that products or gathers over examples read as parameters, in their own shape or out of a stack.

    Those alone of which one such reader can be cut into so many parts.
    """
    traced, values, inputs = facts.traced, facts.traced.graph.values, facts.traced.graph.block.inputs
    origins = kinds.parameter_of(traced)
    found = set()
    for demand in _reading(facts.grouping, origins.keys(), facts.examples):
        shape, whole = values[demand.value].shape, values[origins[demand.value]].shape
        divides = _divides(facts.grouping, facts.examples, demand, parts)
        if divides and sorted(shape) in (sorted(whole), sorted(whole[1:])):
            found.add(origins[demand.value])
    return {number for number in range(len(traced.arguments)) if inputs[number] in found}


def _reading(
    grouping: Grouping, read: Collection[int], counts: Mapping[int, Mapping[int, int]]
) -> Iterator[Demand]:  # fmt: skip
    """How products and gathers over examples read parameters."""
    for demand in grouping.demands:
        over_examples = demand.op >= 0 and demand.value in read and demand.group in counts
        if over_examples and grouping.ops[demand.op].name in PRODUCTS | {"gather"}:
            yield demand


def _divides(
    grouping: Grouping, counts: Mapping[int, Mapping[int, int]], demand: Demand, parts: int
) -> bool:  # fmt: skip
    """Whether the reader of a parameter divides along a dim of it into `parts`: 2 groups of channels do not into 8."""
    factors, is_gather = grouping.groups[demand.group].factors, grouping.ops[demand.op].name == "gather"
    mine = {f for dim in demand.dims for f in dim} - counts[demand.group].keys()
    return any((is_gather or factors[f].kind in ("parallel", "sum")) and factors[f].size % parts == 0 for f in mine)


def _updates_read_whole_values(
    traced: Traced, grouping: Grouping, read: Collection[int], counts: Mapping[int, Mapping[int, int]]
) -> bool:
    """Whether an update works on whole gradients, as decompositions and products of them do; they are gathered then."""
    values, inputs = traced.graph.values, set(traced.graph.block.inputs)
    shapes = {values[v].shape for v in inputs.intersection(read) if values[v].shape}
    for demand in grouping.demands:
        home = grouping.homes[demand.value]
        if values[demand.value].shape not in shapes or counts.get(home.group, {}).keys() & {
            f for dim in home.dims for f in dim
        }:
            continue
        product = demand.op >= 0 and grouping.ops[demand.op].name in PRODUCTS
        if demand.group == 0 or (product and demand.value not in read and demand.group not in counts):
            return True
    return False


def _features(grouping: Grouping, start: Collection[int]) -> dict[int, frozenset[int]]:
    """Group -> the factors that hang together with dims of parameters."""
    places = [(home.group, f) for v in start if (home := grouping.homes[v]).group for dim in home.dims for f in dim]
    found: dict[int, set[int]] = {}
    for group, factor in connected.connected(grouping, places):
        found.setdefault(group, set()).add(factor)
    return {group: frozenset(some) for group, some in found.items()}


def _readers(
    grouping: Grouping, read: Collection[int], counts: Mapping[int, Mapping[int, int]]
) -> dict[int, tuple[frozenset[int], ...]]:
    """Returns by group the factors along which products and gathers over examples that read a parameter are cut.

    For a gather, the factors that it looks up are the first choice, if there are any.
    """
    dims: dict[int, set[int]] = {}
    for demand in _reading(grouping, read, counts):
        mine = {f for dim in demand.dims for f in dim} - counts[demand.group].keys()
        dims.setdefault(demand.group, set()).update(mine)
    out: dict[int, tuple[frozenset[int], ...]] = {}
    for group, some in dims.items():
        op = grouping.ops[grouping.groups[group].ops[0]]
        kept = {f for dim in grouping.homes[op.results[0]].dims for f in dim}
        looked = frozenset(some - kept) if op.name == "gather" else frozenset()
        out[group] = tuple(one for one in (looked, frozenset(some)) if one)
    return out


def least_state(traced: Traced, method: DataParallel | Zero | TensorParallel, parts: int) -> float:
    """Bytes per device of state and frozen weights that no plan of a method over so many devices has less of."""
    values, stage = traced.graph.values, 3
    if not isinstance(method, TensorParallel):
        stage = method.stage if isinstance(method, Zero) else 0
    of = kinds.state_kinds(traced)
    total = 0.0
    for number, (argument, value) in enumerate(zip(traced.arguments, traced.graph.block.inputs, strict=False)):
        if argument.stays:
            in_blocks = stage == 3 or (stage and of.get(number) == "optimizer")
            total += values[value].nbytes / (parts if in_blocks else 1)
    return total


def share_in_pieces(grouping: Grouping, operations: Operations | None, parts: int) -> float:
    """The share of the work of products over examples whose examples do not divide into so many parts."""
    if not isinstance(operations, OverExamples):
        return 0.0
    total = stuck = 0.0
    for group in grouping.groups:
        counts = operations.examples.get(group.index)
        if counts and group.ops and grouping.ops[group.ops[0]].name in PRODUCTS:
            work = math.prod(factor.size for factor in group.factors) * group.trips
            total += work
            stuck += work * all(count % parts for count in counts.values())
    return stuck / total if total else 0.0


def may_be_cut(facts: Facts, parts: int) -> bool:
    """Whether there is a product over examples whose examples divide into so many parts, or no such product."""
    found = [
        count
        for group, counts in facts.examples.items()
        if (ops := facts.grouping.groups[group].ops) and facts.grouping.ops[ops[0]].name in PRODUCTS
        for count in counts.values()
    ]
    return not found or any(count % parts == 0 for count in found)
