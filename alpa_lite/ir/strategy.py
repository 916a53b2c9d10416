"""The nouns of intra-operator parallelism: factor rules, and the integer program that chooses strategies.

`Rule` says what an operation is: an einsum-like map of factors. `StrategyGraph` is the integer program in plain arrays,
free of JAX, so that the solver can be tested against brute force. `Solution` is what the solver returns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FactorKind = Literal["parallel", "sum", "max", "min", "special", "replicate"]


@dataclass(frozen=True)
class Factor:
    """One index of an operation.

    kind:
      parallel: each device computes its block; needs nothing.
      sum: reduced by addition; sharding it leaves a partial sum in every result that does not have it.
      max, min: reduced; sharding it needs an all-reduce with that operator inside the operation.
      special: can be sharded if `local.forms` has a form for it (a cumulative dim, a window, a sorted dim, ...).
      replicate: cannot be sharded.
    """

    size: int
    kind: FactorKind


@dataclass(frozen=True)
class Rule:
    """An operation as a map of factors.

    Attributes:
      factors: the indices of the operation.
      operands, results: for each tensor, for each dim, the factors that make up the dim, major to minor. A dim of size
        one, and a dim that has no factor, holds (). The product of the factors' sizes need not equal the dim's size
        for `special` factors (a strided slice); for the others it does.
      source: "table", "registered" (by the user) or "opaque": who described it.
      reason: for "opaque", why nothing describes it; else "".
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    source: str = "table"
    reason: str = ""

    @functools.cached_property
    def placements(self) -> dict[Any, Any]:
        """The cache of `local.forms` for a rule: the layouts that assignments to its factors give, on their meshes."""
        return {}


@dataclass(frozen=True, eq=False)
class Transfer:
    """A value that one node produces and others consume, each in its own layout.

    The producer's strategies fall into P classes, one for each layout that the value may be produced in; a consumer's
    into classes of Q layouts that it may be wanted in. Getting the value from layout p into layout q costs
    `cost[p, q]` seconds, once, however many consumers want layout q; `inf` forbids the pair. Multiplicity (how many
    identical values the transfer stands for, trip counts) is already in `cost`.

    Attributes:
      src: producing node. src_class: [strategies of src] -> p.
      consumers: (node, [strategies of node] -> q) for each consumer. The producer may be among them (a tied layer that
        feeds the next), then the pair (p, q) is that of one strategy.
      cost: [P, Q] seconds.
      name: for messages.
    """

    src: int
    src_class: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    cost: np.ndarray
    name: str = ""


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers per device and their lifetimes, for the memory constraint.

    Buffer b lives over the closed interval [start[b], end[b]] of program points. With `transfer[b] < 0` its owner is a
    node, and its size in bytes is `size[b][strategy]` of that. Otherwise the buffer is the resharded copy of transfer
    `transfer[b]` in layout class q = `copy[b]`, which exists only if some consumer wants q while the value is produced
    in another layout: its size is then `size[b][p]` for the produced class p (zero where p already is that layout).
    """

    points: int
    start: np.ndarray
    end: np.ndarray
    owner: np.ndarray
    transfer: np.ndarray
    copy: np.ndarray
    size: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class StrategyGraph:
    """Choose one strategy per node, to minimise node seconds plus transfer seconds, within `budget` bytes.

        minimise    sum_i  node_cost[i][s_i]  +  sum_t  sum_{q wanted by a consumer of t}  cost_t[p_t, q]
        subject to  at every program point, the bytes of the live buffers are at most `budget`.

    Attributes:
      node_cost: for each node the seconds of each strategy; `inf` forbids one.
      transfers: the edges.
      buffers: for the memory constraint, or None.
      budget: bytes per device, or None for no constraint.
      names: one a node, for messages.
    """

    node_cost: tuple[np.ndarray, ...]
    transfers: tuple[Transfer, ...]
    buffers: Buffers | None = None
    budget: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Solution:
    """The result of the solver.

    Attributes:
      status: "optimal", "feasible" (a gap remains), "infeasible", or "cutoff" (cannot beat the given cutoff).
      choice: the strategy of each node; empty unless optimal or feasible.
      objective, bound: seconds: of the choice, and the proven lower bound.
      peak: bytes per device at the fullest program point of the choice.
      work: spent, in the unit of `sharding.solver.work`: cells of cost matrices that are visited.
      variables, constraints: size of the largest program given to the solver.
    """

    status: Literal["optimal", "feasible", "infeasible", "cutoff"]
    choice: tuple[int, ...]
    objective: float
    bound: float
    peak: float
    work: int
    variables: int
    constraints: int

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, zero for an optimum."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective > 0 else 0.0
