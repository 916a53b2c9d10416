"""The nouns of grouping: where a value is made, who wants it, and the groups that decide. See `sharding.grouping`.

Groups of equal colour are identical, and share one decision. The first colour is what a group consists of. Two rounds
of Weisfeiler-Lehman refinement over demands (Weisfeiler & Leman 1968) add what its neighbours are, so that a model of
any depth has a bounded number of classes. Values of a neighbour that are alike are not told apart: each layer may make
a mask for itself from the same batch, and it does not matter which of them is its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from alpa_lite.ir.graph import Op
from alpa_lite.ir.strategy import Factor

Dims = tuple[tuple[int, ...], ...]


def factors_in(*tensors: Dims) -> set[int]:
    """The factors that the dims of some tensors are made of."""
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

    `slot` numbers the demands of a group. Of those with equal `likeness` it does not matter whose value comes where:
    operations of equal likeness want them, in equal dims, as the same operand, or as any of those that are joined.
    `position` is the program point of the use; `trips` how often it happens. `op` is the operation that wants it, or -1
    for an output, a carry or a port; `operand` its operand number.
    """

    value: int
    group: int
    dims: Dims
    slot: int
    position: int
    trips: int
    op: int = -1
    operand: int = -1
    likeness: str = ""


@dataclass(frozen=True, eq=False)
class Group:
    """One decision. `op_factors[i][f]` is the group's factor for factor f of the rule of `ops[i]`."""

    index: int
    kind: GroupKind
    factors: tuple[Factor, ...]
    ops: tuple[int, ...]
    op_factors: tuple[tuple[int, ...], ...]
    trips: int
    color: str
    name: str


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of a graph.

    Attributes:
      groups: by index; group 0 is the fixed group.
      homes: value -> home; lazy values have none.
      lazy: lazy value -> (op index, result number).
      demands: every edge.
      positions: op index -> program point. defined: value -> program point of its definition.
      points: the number of program points.
      ops: op index -> Op.
      classes: colour -> the groups that share it, in order.
      leaves: argument or constant number -> group.
      outputs: for each output of the step its group and dims; None for a literal.
    """

    groups: tuple[Group, ...]
    homes: Mapping[int, Home]
    lazy: Mapping[int, tuple[int, int]]
    demands: tuple[Demand, ...]
    positions: Mapping[int, int]
    defined: Mapping[int, int]
    points: int
    ops: Mapping[int, Op]
    classes: Mapping[str, tuple[int, ...]]
    leaves: tuple[int, ...]
    outputs: tuple[tuple[int, Dims] | None, ...]


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
    """The colour of each group; that of group 0 is "fixed"."""
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
