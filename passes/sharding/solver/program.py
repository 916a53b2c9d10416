"""A sharding problem as a linear program, for HiGHS.

    x[i, s] in {0, 1}   node i takes strategy s                    sum_s x[i, s] = 1
    z[e, k, p, q] >= 0  transfer e comes in layout p, its consumer k wants q
                        sum_q z = sum_{s in class p} x[src, s],    sum_p z = sum_{s in class q} x[node_k, s]
    w[e, p, q] >= z[e, k, p, q] for all k that may want q, where several may

A pair (p, q) costs once: on w where several consumers may want q, else on z. A pair that is forbidden has no variable.
A consumer that is the source itself needs no z: its pair is the sum of the x of the strategies in that pair. With x
integral all z are integral, so only x is branched on; the relaxation is that of facility location, which is tight in
practice.

Memory is one row a program point, bytes on x, z and w. There may be thousands, few of which bind: rows are added as
needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from alpa_lite.passes.sharding.solver.links import offsets, split
from alpa_lite.passes.sharding.solver.problem import Problem, timeline
from alpa_lite.passes.sharding.solver.work import BRANCH_NODES, INTEGER_WORK, NODE_ITERATIONS

SCALE = 1e4  # the solver's tolerances are absolute, 1e-7 to 1e-6: this many units make the objective and a memory row


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """The arrays of the program. Variables: all x, node by node, then all z and w.

    cost: [n] seconds. equalities: equality rows; those of the nodes are first, and are one, the others zero. at_most:
    rows that are at most zero. payer: [entries] the variable that pays for each, or -1. sole_payer: [cells] the z that
    alone stands for each, or -1.
    """

    problem: Problem
    cost: np.ndarray
    equalities: sparse.csr_array
    at_most: sparse.csr_array
    payer: np.ndarray
    sole_payer: np.ndarray

    @property
    def equality_values(self) -> np.ndarray:
        """The value of each equality row."""
        return (np.arange(len(self.equalities.indptr) - 1) < self.problem.links.nodes) * 1.0

    @property
    def inequalities(self) -> int:
        """How many rows of `at_most` there are."""
        return len(self.at_most.indptr) - 1

    @property
    def integer_work(self) -> int:
        """The least work of solving it with integer variables: that of its root node."""
        return INTEGER_WORK * (self.equalities.nnz + self.at_most.nnz) * self.height

    @property
    def height(self) -> int:
        """How many rows there are, those of memory aside."""
        return len(self.equalities.indptr) - 1 + self.inequalities

    @property
    def integers(self) -> int:
        """How many x there are."""
        return int(self.problem.links.first[-1])

    def round(self, x: np.ndarray) -> np.ndarray:
        """Returns the choice nearest to a solution."""
        return np.array([one.argmax() for one in split(x[: self.integers], self.problem.links.first)], dtype=int)

    def bytes(self, x: np.ndarray) -> np.ndarray:
        """[points] bytes of a solution, fractional or not."""
        entry, start, end, size = self.problem.items
        base, variable = self.problem.base, self.payer[entry]
        return base + timeline(len(base), start, end, size * np.where(variable >= 0, x[variable], 0.0))

    def slack(self, reduced_cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns how far above the relaxation a choice is that takes a strategy, or a cell; as `Ascent.slack`."""
        return reduced_cost[: self.integers], np.where(self.sole_payer >= 0, reduced_cost[self.sole_payer], 0.0)

    def memory_row(self, point: int) -> np.ndarray:
        """[n] bytes of each variable at a program point."""
        entry, start, end, size = self.problem.items
        live = (start <= point) & (point <= end) & (self.payer[entry] >= 0)
        return np.bincount(self.payer[entry[live]], size[live], minlength=len(self.cost))


@dataclass(frozen=True, eq=False)
class RelaxedSolution:
    """Answer of the solver.

    x: None if there is none. bound: of the program in its own unit; `inf` if infeasible. work: as of `solver.work`.
    """

    x: np.ndarray | None
    bound: float
    reduced_cost: np.ndarray | None = None
    price: np.ndarray | None = None
    work: int = 0


@dataclass
class _Nonzeros:
    """The nonzeros of rows, collected; `add` numbers rows from the first that is not finished, and finishes some."""

    nonzeros: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    height: int = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, value: float, finished: int = 0) -> None:
        self.nonzeros.append((np.full(len(rows), value), self.height + rows, columns))
        self.height += finished

    def matrix(self, width: int) -> sparse.csr_array:
        if not self.nonzeros:
            return sparse.csr_array((self.height, width))
        values, rows, columns = map(np.concatenate, zip(*self.nonzeros, strict=True))
        return sparse.csr_array((values, (rows, columns)), shape=(self.height, width))


class _Edge(NamedTuple):
    """A transfer. entry: of its first cell. cost: [P, Q] seconds."""

    entry: int
    src: int
    src_class: np.ndarray
    cost: np.ndarray


def build(problem: Problem) -> LinearProgram:
    """Returns the program of a problem; see the module's docstring."""
    draft = _Draft(problem)
    for e in range(problem.links.edges):
        draft.add_edge(e)
    matrices = draft.equal.matrix(draft.width), draft.at_most.matrix(draft.width)
    sole_payer = np.where(draft.shared, -1, draft.payer)[len(problem.cost) :]
    return LinearProgram(problem, np.concatenate(draft.cost), *matrices, draft.payer, sole_payer)


class _Draft:
    """A program under construction: all x are there, z and w are added edge by edge."""

    def __init__(self, problem: Problem) -> None:
        links = problem.links
        self.problem, self.links, self.width = problem, links, len(problem.cost)
        self.consumers = split(np.arange(links.edges, len(links.edge)), offsets(links.counts))
        self.equal, self.at_most = _Nonzeros(), _Nonzeros()
        self.equal.add(np.repeat(np.arange(links.nodes), links.sizes), np.arange(self.width), 1.0, links.nodes)
        self.cost = [problem.cost]
        entries = int(links.begin[-1])
        self.payer = np.where(np.arange(entries) < self.width, np.arange(entries), -1)
        self.shared, self.takes_bytes = np.zeros((2, entries), dtype=bool)
        self.takes_bytes[problem.items.entry] = True

    def add_edge(self, e: int) -> None:
        """Append the variables and rows of one edge."""
        entries = slice(*self.links.begin[self.links.nodes + e :][:2])
        cost = self.problem.cells[self.links.cell[e] : self.links.cell[e + 1]].reshape(self.links.shape[e])
        edge = _Edge(entries.start, int(self.links.node[e]), self._classes(e), cost)
        consumers = [(int(self.links.node[end]), self._classes(end)) for end in self.consumers[e]]
        wants = np.zeros(cost.shape[1], dtype=int)
        for node, klass in consumers:
            wants[np.unique(klass)] += 2 if node == edge.src else 1
        once = np.full(cost.shape, -1)
        charged = (cost > 0) | self.takes_bytes[entries].reshape(cost.shape)
        p, q = np.nonzero(np.isfinite(cost) & (wants > 1) & charged)
        once[p, q] = self._new_pairs(edge, p, q, np.ones(len(p), dtype=bool))
        self.shared[entries] = (once >= 0).ravel()
        for node, klass in consumers:
            if node == edge.src:
                self._add_own(edge, klass, once)
            else:
                self._add_consumer(edge, node, klass, once, wants)

    def _add_own(self, edge: _Edge, klass: np.ndarray, once: np.ndarray) -> None:
        """A consumer that is the source itself: its pair is the sum of the x of the strategies in that pair."""
        src_x, w = self._x(edge.src), once[edge.src_class, klass]
        names, row = np.unique(w[w >= 0], return_inverse=True)
        self.at_most.add(row, src_x[w >= 0], 1.0)
        self.at_most.add(np.arange(len(names)), names, -1.0, len(names))
        banned = np.flatnonzero(np.isinf(edge.cost[edge.src_class, klass]))
        self.equal.add(np.zeros_like(banned), src_x[banned], 1.0, bool(len(banned)))

    def _add_consumer(self, edge: _Edge, node: int, klass: np.ndarray, once: np.ndarray, wants: np.ndarray) -> None:
        """Another consumer: a z for each pair, whose marginals are those of the x of both ends."""
        rows = len(edge.cost)
        wanted, column = np.unique(klass, return_inverse=True)
        p, c = np.nonzero(np.isfinite(edge.cost[:, wanted]))
        q = wanted[c]
        z = self._new_pairs(edge, p, q, wants[q] <= 1)  # w pays for what several may want
        self.equal.add(p, z, 1.0)
        self.equal.add(edge.src_class, self._x(edge.src), -1.0)
        self.equal.add(rows + c, z, 1.0)
        self.equal.add(rows + column, self._x(node), -1.0, rows + len(wanted))
        w = once[p, q]
        count = int((w >= 0).sum())
        self.at_most.add(np.arange(count), z[w >= 0], 1.0)
        self.at_most.add(np.arange(count), w[w >= 0], -1.0, count)

    def _new_pairs(self, edge: _Edge, p: np.ndarray, q: np.ndarray, pays: np.ndarray) -> np.ndarray:
        """Returns variables for the pairs (p, q). Those of `pays` have their costs and bytes."""
        new = self.width + np.arange(len(p))
        self.width += len(p)
        self.cost.append(np.where(pays, edge.cost[p, q], 0.0))
        self.payer[edge.entry + (p * edge.cost.shape[1] + q)[pays]] = new[pays]
        return new

    def _classes(self, end: int) -> np.ndarray:
        return self.links.classes[self.links.at[end] : self.links.at[end + 1]]

    def _x(self, i: int) -> np.ndarray:
        return np.arange(self.links.first[i], self.links.first[i + 1])


def solve_relaxation(program: LinearProgram, points: Sequence[int], unit: float) -> RelaxedSolution:
    """The linear relaxation with the memory rows of some program points. unit: about the seconds of the objective."""
    rows, limits = _memory_rows(program, points)
    scale = SCALE / unit
    bounds = [(0.0, 1.0)] * program.integers + [(0.0, np.inf)] * (len(program.cost) - program.integers)
    result = linprog(
        program.cost * scale,
        A_ub=sparse.csr_array(sparse.vstack([program.at_most, rows])),
        b_ub=np.append(np.zeros(program.inequalities), limits),
        A_eq=program.equalities,
        b_eq=program.equality_values,
        bounds=bounds,
        method="highs-ds",  # the interior point method is no faster at these sizes, and its threads wait spinning
        options={"disp": False},
    )
    work = (program.equalities.nnz + program.at_most.nnz + rows.nnz) * max(int(result.nit), 1)
    if result.status == 2:
        return RelaxedSolution(None, np.inf, work=work)
    if result.status != 0:
        return RelaxedSolution(None, 0.0, work=work)
    price = np.zeros(len(program.problem.base))
    dual = -np.asarray(result.ineqlin.marginals)[program.inequalities :]
    np.add.at(price, np.asarray(points, dtype=int), dual * (_row_scale(program) / scale))
    return RelaxedSolution(result.x, result.fun / scale, np.asarray(result.lower.marginals) / scale, price, work)


def branch(
    program: LinearProgram, points: Sequence[int], covers: Sequence[np.ndarray], unit: float, gap: float
) -> RelaxedSolution:  # fmt: skip
    """The integer program with the memory rows of some program points, and with sets of which not all may be chosen."""
    rows, limits = _memory_rows(program, points)
    more: list[_Rows] = [(rows, -np.inf, limits)] if len(points) else []
    if covers:
        sets = np.stack(covers)
        more.append((sparse.csr_array(sets), -np.inf, sets.sum(1) - 1.0))
    return _milp(program, program.cost * (SCALE / unit), [*_own_rows(program), *more], unit / SCALE, gap)


def flatten(program: LinearProgram, points: Sequence[int], integral: bool, gap: float) -> RelaxedSolution:
    """Minimise the largest of the bytes at some program points; the bound is in bytes."""
    matrix = sparse.csr_array(np.stack([program.memory_row(t) for t in points]))
    base = program.problem.base[list(points)]
    unit = float((base + matrix.sum(1)).max()) or 1.0
    scale = SCALE / unit
    width = len(program.cost)
    column = sparse.csr_array(np.full((len(points), 1), -1.0))
    peak = sparse.csr_array(sparse.hstack([matrix * scale, column])), -np.inf, -base * scale
    cost = np.zeros(width + 1)
    cost[-1] = 1.0
    result = _milp(program, cost, [peak, *_own_rows(program, 1)], 1.0 / scale, gap, integral)
    return replace(result, x=None if result.x is None else result.x[:width])


_Rows = tuple[sparse.csr_array, np.ndarray | float, np.ndarray | float]
"""A matrix, and the least and the largest values of its product with the variables."""


def _own_rows(program: LinearProgram, others: int = 0) -> list[_Rows]:
    """Returns the rows of a program, those of memory aside, over its own variables and others behind them."""

    def wider(rows: sparse.csr_array) -> sparse.csr_array:
        shape = len(rows.indptr) - 1, len(program.cost) + others
        return sparse.csr_array((rows.data, rows.indices, rows.indptr), shape=shape)

    equal: _Rows = wider(program.equalities), program.equality_values, program.equality_values
    return [equal, (wider(program.at_most), -np.inf, 0.0)] if program.inequalities else [equal]


def _milp(
    program: LinearProgram, cost: np.ndarray, rows: list[_Rows], unit: float, gap: float, integral: bool = True
) -> RelaxedSolution:  # fmt: skip
    is_integer = np.arange(len(cost)) < program.integers
    result = milp(
        cost,
        integrality=is_integer * integral,
        bounds=Bounds(0.0, cast(float, np.where(is_integer, 1.0, np.inf))),
        # SciPy takes arrays, but its defaults make type checkers expect numbers.
        constraints=[LinearConstraint(matrix, cast(float, low), cast(float, high)) for matrix, low, high in rows],
        options={"node_limit": BRANCH_NODES, "mip_rel_gap": gap, "disp": False},
    )
    height = sum(len(matrix.indptr) - 1 for matrix, _, _ in rows) + NODE_ITERATIONS * int(result.mip_node_count or 0)
    work = sum(matrix.nnz for matrix, _, _ in rows) * height * (INTEGER_WORK if integral else 1)
    if result.status == 2:
        return RelaxedSolution(None, np.inf, work=work)
    bound = result.mip_dual_bound if integral or result.status != 0 else result.fun
    bound = float(bound) * unit if bound is not None and np.isfinite(bound) else 0.0
    return RelaxedSolution(result.x, bound, work=work)


def _row_scale(program: LinearProgram) -> float:
    """Returns the factor that makes a row's budget `SCALE`, where the solver's tolerance is 1e-10 of the budget."""
    budget = program.problem.budget
    return SCALE / abs(budget) if budget else 1.0


def _memory_rows(program: LinearProgram, points: Sequence[int]) -> tuple[sparse.csr_array, np.ndarray]:
    """Returns rows and limits: bytes at these points within the budget."""
    if not len(points):
        return sparse.csr_array((0, len(program.cost))), np.zeros(0)
    budget = program.problem.budget
    assert budget is not None
    scale = _row_scale(program)
    rows = np.stack([program.memory_row(t) for t in points]) * scale
    return sparse.csr_array(rows), (budget - program.problem.base[list(points)]) * scale
