"""The nouns of grouping: where a value is made, who wants it, the groups that decide, and how operations take part.

Groups of equal colour are identical, and share one decision. The first colour is what a group consists of. Two rounds
of Weisfeiler-Lehman refinement over demands (Weisfeiler & Leman 1968) add what its neighbours are, so that a model of
any depth has a bounded number of classes. Values of a neighbour that are alike are not told apart: each layer may make
a mask for itself from the same batch, and it does not matter which of them is its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alpa_lite.ir.graph import Lit, Op, Traced, Value
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.ir import keys, primitives

Dims = tuple[tuple[int, ...], ...]


def factors_in(*tensors: Dims) -> set[int]:
    """Returns the factors that the dims of some tensors are made of."""
    return {f for dims in tensors for dim in dims for f in dim}


GroupKind = Literal["fixed", "leaf", "heavy", "linear", "light"]


@dataclass(frozen=True)
class Home:
    """Where a value is made: its group, and the group's factors of each of its dims.

    `slot` numbers the values of a group. Of those with equal `likeness` it does not matter which one somebody wants:
    they are made by the same operations of the group from its other values, and have the same dims.
    """

    group: int
    dims: Dims
    slot: int
    likeness: str = ""


@dataclass(frozen=True)
class Demand:
    """Group `group` wants `value` with its dims sharded by the given factors of the group.

    Of the demands of a group with equal `likeness` it does not matter whose value comes where: operations of equal
    likeness want them, in equal dims, as the same operand, or as any of those that are joined.
    `position` is the program point of the use; `trips` how often it happens. `op` is the operation that wants it, or -1
    for an output, a carry or a port; `operand` its operand number.
    """

    value: int
    group: int
    dims: Dims
    position: int
    trips: int
    op: int = -1
    operand: int = -1
    likeness: str = ""


@dataclass(frozen=True, eq=False)
class Group:
    """One decision.

    Attributes:
      op_factors: `op_factors[i][f]` is the group's factor for factor f of the rule of `ops[i]`.
      copies: how many groups of the whole step it stands for, in a folded one.
    """

    index: int
    kind: GroupKind
    factors: tuple[Factor, ...]
    ops: tuple[int, ...]
    op_factors: tuple[tuple[int, ...], ...]
    trips: int
    color: str
    name: str
    copies: int = 1


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of a graph.

    Attributes:
      groups: by index; group 0 is the fixed group.
      homes: value -> home; lazy values have none.
      lazy_sources: lazy value -> (op index, result number).
      demands: every edge.
      positions: op index -> program point. definition_points: value -> program point of its definition.
      points: the number of program points.
      ops: op index -> Op.
      classes: colour -> the groups that share it, in order.
      leaves: argument or constant number -> group.
      outputs: for each output of the step its group and dims; None for a literal.
      traced: the step that is grouped: the folded one, if there is one.
      firsts: group -> the first value that it makes, of those that make any.
    """

    groups: tuple[Group, ...]
    homes: Mapping[int, Home]
    lazy_sources: Mapping[int, tuple[int, int]]
    demands: tuple[Demand, ...]
    positions: Mapping[int, int]
    definition_points: Mapping[int, int]
    points: int
    ops: Mapping[int, Op]
    classes: Mapping[str, tuple[int, ...]]
    leaves: tuple[int, ...]
    outputs: tuple[tuple[int, Dims] | None, ...]
    traced: Traced
    firsts: Mapping[int, int]

    def count(self, members: Iterable[int]) -> int:
        """Returns how many groups of the whole step some groups stand for."""
        return sum([self.groups[member].copies for member in members])

    def unfold(self, members: Sequence[int]) -> Sequence[int]:
        """Returns for each group of the whole step that some groups stand for that group, in the whole step's order."""
        copies = self.traced.copies
        if copies is None or self.count(members) == len(members):
            return members
        every: list[tuple[int, int]] = []
        for member in members:
            value = self.firsts[member]
            every += [(copies.order(one), member) for one in (value, *copies.values.get(value, ()))]
        return [member for _, member in sorted(every)]


@dataclass
class Draft:
    """A group while it is being built."""

    kind: GroupKind
    factors: list[Factor]
    trips: int
    name: str
    ops: list[int] = field(default_factory=list)
    op_factors: list[tuple[int, ...]] = field(default_factory=list)
    signature: list[Any] = field(default_factory=list)
    values: int = 0
    wants: int = 0


class Digests(dict[Any, str]):
    """Short texts of things that are equal, in every process, where the things have the same `repr`."""

    def __missing__(self, thing: Any) -> str:
        text = self[thing] = hashlib.blake2b(repr(thing).encode(), digest_size=10).hexdigest()
        return text


def colors_of(drafts: Sequence[Draft], demands: Sequence[Demand], homes: Mapping[int, Home]) -> list[str]:
    """Returns the colour of each group; that of group 0 is "fixed"."""
    digests = Digests()
    colors = []
    for d in drafts:
        parts = [s if s[0] == "leaf" else (digests[s[0]], *s[1:]) for s in d.signature]
        colors.append(digests[d.kind, d.trips, tuple((f.size, f.kind) for f in d.factors), tuple(parts)])
    for _ in range(_ROUNDS):
        arriving: list[list[Any]] = [[] for _ in drafts]
        leaving: list[list[Any]] = [[] for _ in drafts]
        for demand in demands:
            home = homes[demand.value]
            arriving[demand.group].append((demand.likeness, colors[home.group], home.likeness if home.group else ""))
            wanted = demand.likeness if demand.group else ""
            leaving[home.group].append((home.likeness, colors[demand.group], wanted, demand.dims))
        colors = [
            digests[own, tuple(sorted(a)), tuple(sorted(b))] if i else "fixed"
            for i, (own, a, b) in enumerate(zip(colors, arriving, leaving, strict=True))
        ]
    return colors


_ROUNDS = 2  # of refinement


@dataclass(frozen=True, eq=False)
class Form:
    """The properties that an operation's key determines, computed once for all operations of one key.

    Attributes:
      rule: its rule.
      key: as `keys.key_without_position`.
      is_light: whether it only follows, see `is_light`.
      lazy: whether its result is made anew for each consumer, or is so where its operands are.
      whole_operands: the operands that have all factors of the results; literals may be among them.
    """

    rule: Rule
    key: str
    is_light: bool
    lazy: Literal["", "always", "as operands"]
    whole_operands: tuple[int, ...]

    def placed_dims(self, factors: tuple[int, ...]) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
        """The dims of operands and of results by the factors of a group that those of the rule are."""

        def placed(tensors: Sequence[Dims]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple(factors[f] for f in dim) for dim in dims) for dims in tensors)

        return placed(self.rule.operands), placed(self.rule.results)

    def followed_factors(self, main: int, dims: Dims) -> tuple[int, ...] | None:
        """Returns the factor that an operand of these dims gives each factor of the rule; None if it lacks one."""
        of = {f[0]: g[0] for f, g in zip(self.rule.operands[main], dims, strict=True) if f and g}
        count = len(self.rule.factors)
        return tuple(of[f] for f in range(count)) if len(of) == count else None


def form_of(op: Op, rule: Rule, values: Sequence[Value]) -> Form:
    """Returns the properties that an operation and its rule determine."""
    light = is_light(rule, op)
    lazy: Literal["", "always", "as operands"] = ""
    if len(op.results) == 1 and all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims):
        source = op.operands[0] if op.name == "broadcast_in_dim" else None
        grows = isinstance(source, int) and values[op.results[0]].nbytes > values[source].nbytes
        if op.name == "iota" or isinstance(source, Lit) or grows:  # a large value out of nothing, or of a small one
            lazy = "always"
        elif light and op.reads:
            lazy = "as operands"
    every = factors_in(*rule.results)
    whole = tuple(k for k, dims in enumerate(rule.operands) if every <= factors_in(dims))
    return Form(rule, keys.key_without_position(op, values.__getitem__), light, lazy, whole)


def keeps_dims(rule: Rule) -> bool:
    """Whether every dim of a rule's tensors is one parallel factor or none, and every factor is in each result."""
    if any(f.kind != "parallel" for f in rule.factors):
        return False
    single = all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims)
    once = all(len(factors_in(dims)) == sum(map(len, dims)) for dims in rule.results)
    return single and once and len(factors_in(*rule.results)) == len(rule.factors)


def is_light(rule: Rule, op: Op) -> bool:
    """Whether an operation only follows: every factor parallel, no dim of several factors, every factor in a result."""
    if op.name == primitives.CONSTRAINT and any(axes is not None for axes in op.params["dims"]):
        return False
    turns = op.name == "reshape" and op.params.get("dimensions")
    return keeps_dims(rule) and not turns and op.name not in primitives.DECIDING


def leaf_dims(shape: tuple[int, ...]) -> tuple[list[Factor], Dims]:
    """Returns the factors of a tensor of which every dim may be sharded, and its dims by these."""
    factors = [Factor(size, "parallel") for size in shape if size > 1]
    numbers = itertools.count()
    return factors, tuple([(next(numbers),) if size > 1 else () for size in shape])
