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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from alpa_lite.passes.sharding.solver.problem import Problem, timeline
from alpa_lite.passes.sharding.solver.ragged import entries, joined, offsets, split
from alpa_lite.passes.sharding.solver.work import BRANCH_NODES, INTEGER_WORK, NODE_ITERATIONS

SCALE = 1e4  # the solver's tolerances are absolute, 1e-7 to 1e-6: this many units make the objective and a memory row


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """The arrays of the program. Variables: all x, node by node from `first[i]`, then all z and w.

    cost: [n] seconds. equal, equal_to: equality rows. at_most: rows that are at most zero. start, end, variable, size:
    the bytes of a variable over an interval of program points. pair_edge, pair: [n - x] the edge and flat (p, q) of a z
    that alone stands for its pair, else -1.
    """

    problem: Problem
    first: np.ndarray
    cost: np.ndarray
    equal: sparse.csr_array
    equal_to: np.ndarray
    at_most: sparse.csr_array
    start: np.ndarray
    end: np.ndarray
    variable: np.ndarray
    size: np.ndarray
    pair_edge: np.ndarray
    pair: np.ndarray

    @property
    def inequalities(self) -> int:
        """How many rows of `at_most` there are."""
        return len(self.at_most.indptr) - 1

    @property
    def height(self) -> int:
        """How many rows there are, those of memory aside."""
        return len(self.equal_to) + self.inequalities

    @property
    def nonzeros(self) -> int:
        """Nonzeros of the rows, those of memory aside."""
        return self.equal.nnz + self.at_most.nnz

    @property
    def integers(self) -> int:
        """How many x there are."""
        return int(self.first[-1])

    def round(self, x: np.ndarray) -> np.ndarray:
        """The choice nearest to a solution."""
        return np.array([x[a:b].argmax() for a, b in zip(self.first[:-1], self.first[1:], strict=True)], dtype=int)

    def bytes(self, x: np.ndarray) -> np.ndarray:
        """[points] bytes of a solution, fractional or not."""
        base = self.problem.base
        return base + timeline(len(base), self.start, self.end, self.size * x[self.variable])

    def slack(self, reduced_cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How far above the relaxation a choice is that takes a strategy, or a cell; as `Ascent.slack`."""
        cells = np.zeros(len(self.problem.cells))
        mine = np.flatnonzero(self.pair_edge >= 0)
        cells[self.problem.links.cell[self.pair_edge[mine]] + self.pair[mine]] = reduced_cost[self.integers + mine]
        return reduced_cost[: self.integers], cells

    def memory_row(self, point: int) -> np.ndarray:
        """[n] bytes of each variable at a program point."""
        live = (self.start <= point) & (point <= self.end)
        return np.bincount(self.variable[live], self.size[live], minlength=len(self.cost))


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Answer of the solver.

    x: None if there is none. bound: of the program in its own unit; `inf` if infeasible. work: as of `solver.work`.
    """

    x: np.ndarray | None
    bound: float
    reduced_cost: np.ndarray | None = None
    price: np.ndarray | None = None
    work: int = 0


@dataclass
class _Matrix:
    """A sparse matrix, collected; `add` numbers rows from the first that is not finished."""

    rows: list[np.ndarray] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    height: int = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, value: float) -> None:
        self.rows.append(self.height + rows)
        self.columns.append(columns)
        self.values.append(np.full(len(rows), value))

    def matrix(self, width: int) -> sparse.csr_array:
        entries = joined(self.values, np.float64), (joined(self.rows), joined(self.columns))
        return sparse.csr_array(entries, shape=(self.height, width))


@dataclass(frozen=True, eq=False)
class _Edge:
    """One transfer. cost: [P, Q] seconds. items: [n, P, Q] bytes of the copies, which live over `start` to `end` [n].

    src_class: [S of src] -> p. consumers: (node, [S of node] -> q).
    """

    src: int
    src_class: np.ndarray
    consumers: tuple[tuple[int, np.ndarray], ...]
    cost: np.ndarray
    items: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _edges(problem: Problem) -> Iterator[_Edge]:
    """The edges of a problem one by one."""
    links, items = problem.links, problem.items
    classes, cells = split(links.classes, links.at), split(problem.cells, links.cell)
    consumers = split(np.arange(links.edges, len(links.edge)), offsets(links.counts))
    at = np.searchsorted(items.owner, links.nodes + np.arange(links.edges + 1))
    for e, cost in enumerate(cells):
        mine = slice(at[e], at[e + 1])
        cost = cost.reshape(links.shape[e])
        size = items.size[items.at[at[e]] : items.at[at[e + 1]]].reshape(-1, *cost.shape)
        ends = tuple((int(links.node[end]), classes[end]) for end in consumers[e])
        yield _Edge(int(links.node[e]), classes[e], ends, cost, size, items.start[mine], items.end[mine])


def build(problem: Problem) -> LinearProgram:
    """The program of a problem; see the module's docstring."""
    draft = _Draft(problem)
    for e, edge in enumerate(_edges(problem)):
        draft.add_edge(e, edge)
    return draft.program()


class _Draft:
    """A program under construction: all x are there, z and w are added edge by edge."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.first = problem, problem.links.first
        self.width = int(self.first[-1])
        self.equal, self.at_most = _Matrix(), _Matrix()
        self.equal.add(np.repeat(np.arange(problem.links.nodes), problem.links.sizes), np.arange(self.width), 1.0)
        self.equal.height = problem.links.nodes
        self.cost = [problem.cost]
        self.bytes: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # start, end, variable, bytes
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []  # edge, flat (p, q)
        items = problem.items.of(np.flatnonzero(problem.items.owner < problem.links.nodes))
        times = np.diff(items.at)
        span = np.repeat(items.start, times), np.repeat(items.end, times)
        self._add_bytes(*span, entries(self.first, items.owner), items.size)

    def program(self) -> LinearProgram:
        equal_to = np.zeros(self.equal.height)
        equal_to[: self.problem.links.nodes] = 1.0
        start, end, variable, size = zip(*self.bytes, strict=True)
        edge, pair = zip(*self.pairs, strict=True) if self.pairs else ((), ())
        return LinearProgram(
            problem=self.problem,
            first=self.first,
            cost=joined(self.cost, np.float64),
            equal=self.equal.matrix(self.width),
            equal_to=equal_to,
            at_most=self.at_most.matrix(self.width),
            start=joined(start),
            end=joined(end),
            variable=joined(variable),
            size=joined(size, np.float64),
            pair_edge=joined(edge),
            pair=joined(pair),
        )

    def add_edge(self, e: int, edge: _Edge) -> None:
        """Append the variables and rows of one edge."""
        wants = np.zeros(edge.cost.shape[1], dtype=int)
        for node, klass in edge.consumers:
            wants[np.unique(klass)] += 2 if node == edge.src else 1
        charged = (edge.cost > 0) | edge.items.any(0)
        once = np.full(edge.cost.shape, -1)
        p, q = np.nonzero(np.isfinite(edge.cost) & (wants > 1) & charged)
        once[p, q] = self._new_pairs(edge, p, q, np.ones(len(p), dtype=bool), name=-1)
        for node, klass in edge.consumers:
            if node == edge.src:
                self._add_own(edge, klass, once)
            else:
                self._add_consumer(e, edge, node, klass, once, wants)

    def _add_own(self, edge: _Edge, klass: np.ndarray, once: np.ndarray) -> None:
        """A consumer that is the source itself: its pair is the sum of the x of the strategies in that pair."""
        src_x, w = self._x(edge.src), once[edge.src_class, klass]
        names, row = np.unique(w[w >= 0], return_inverse=True)
        self.at_most.add(row, src_x[w >= 0], 1.0)
        self.at_most.add(np.arange(len(names)), names, -1.0)
        self.at_most.height += len(names)
        banned = np.flatnonzero(np.isinf(edge.cost[edge.src_class, klass]))
        self.equal.add(np.zeros_like(banned), src_x[banned], 1.0)
        self.equal.height += bool(len(banned))

    def _add_consumer(
        self, e: int, edge: _Edge, node: int, klass: np.ndarray, once: np.ndarray, wants: np.ndarray
    ) -> None:
        """Another consumer: a z for each pair, whose marginals are those of the x of both ends."""
        rows = len(edge.cost)
        wanted, column = np.unique(klass, return_inverse=True)
        p, c = np.nonzero(np.isfinite(edge.cost[:, wanted]))
        q = wanted[c]
        z = self._new_pairs(edge, p, q, wants[q] <= 1, name=e)  # w pays for what several may want
        self.equal.add(p, z, 1.0)
        self.equal.add(edge.src_class, self._x(edge.src), -1.0)
        self.equal.add(rows + c, z, 1.0)
        self.equal.add(rows + column, self._x(node), -1.0)
        self.equal.height += rows + len(wanted)
        w = once[p, q]
        count = int((w >= 0).sum())
        self.at_most.add(np.arange(count), z[w >= 0], 1.0)
        self.at_most.add(np.arange(count), w[w >= 0], -1.0)
        self.at_most.height += count

    def _new_pairs(self, edge: _Edge, p: np.ndarray, q: np.ndarray, pays: np.ndarray, *, name: int) -> np.ndarray:
        """Variables for the pairs (p, q). Those of `pays` have their costs and bytes, and the edge's number."""
        new = self.width + np.arange(len(p))
        self.width += len(p)
        self.cost.append(np.where(pays, edge.cost[p, q], 0.0))
        size = np.where(pays, edge.items[:, p, q], 0.0)
        spans = np.repeat(edge.start, len(p)), np.repeat(edge.end, len(p))
        self._add_bytes(*spans, np.tile(new, len(size)), size.ravel())
        self.pairs.append((np.where(pays, name, -1), p * edge.cost.shape[1] + q))
        return new

    def _x(self, i: int) -> np.ndarray:
        return np.arange(self.first[i], self.first[i + 1])

    def _add_bytes(self, start: np.ndarray, end: np.ndarray, variable: np.ndarray, size: np.ndarray) -> None:
        some = size > 0
        self.bytes.append((start[some], end[some], variable[some], size[some]))


def relax(program: LinearProgram, points: Sequence[int], unit: float) -> Relaxed:
    """The linear relaxation with the memory rows of some program points. unit: about the seconds of the objective."""
    rows, limits = _memory_rows(program, points)
    scale = SCALE / unit
    bounds = np.zeros((len(program.cost), 2))
    bounds[:, 1] = np.where(np.arange(len(bounds)) < program.integers, 1.0, np.inf)
    result = linprog(
        program.cost * scale,
        A_ub=sparse.csr_array(sparse.vstack([program.at_most, rows])),
        b_ub=np.append(np.zeros(program.inequalities), limits),
        A_eq=program.equal,
        b_eq=program.equal_to,
        bounds=bounds,
        method="highs-ds",  # the interior point method is no faster at these sizes, and its threads wait spinning
        options={"disp": False},
    )
    work = (program.nonzeros + rows.nnz) * max(int(result.nit), 1)
    if result.status == 2:
        return Relaxed(None, np.inf, work=work)
    if result.status != 0:
        return Relaxed(None, 0.0, work=work)
    price = np.zeros(len(program.problem.base))
    dual = -np.asarray(result.ineqlin.marginals)[program.inequalities :]
    np.add.at(price, np.asarray(points, dtype=int), dual * (_row_scale(program) / scale))
    return Relaxed(result.x, result.fun / scale, np.asarray(result.lower.marginals) / scale, price, work)


def branch(
    program: LinearProgram,
    points: Sequence[int],
    covers: Sequence[np.ndarray],
    unit: float,
    gap: float,
) -> Relaxed:
    """The integer program with the memory rows of some program points, and with sets of which not all may be chosen."""
    rows, limits = _memory_rows(program, points)
    constraints = _own_rows(program, len(program.cost))
    if len(points):
        constraints.append(_rows(rows, -np.inf, limits))
    if covers:
        sets = np.stack(covers)
        constraints.append(_rows(sparse.csr_array(sets), -np.inf, sets.sum(1) - 1.0))
    return _milp(program, program.cost * (SCALE / unit), constraints, unit / SCALE, gap)


def flatten(program: LinearProgram, points: Sequence[int], integral: bool, gap: float) -> Relaxed:
    """Minimise the largest of the bytes at some program points; the bound is in bytes."""
    matrix = sparse.csr_array(np.stack([program.memory_row(t) for t in points]))
    base = program.problem.base[list(points)]
    unit = float((base + matrix.sum(1)).max()) or 1.0
    scale = SCALE / unit
    width = len(program.cost)
    column = sparse.csr_array(np.full((len(points), 1), -1.0))
    peak = _rows(sparse.csr_array(sparse.hstack([matrix * scale, column])), -np.inf, -base * scale)
    cost = np.zeros(width + 1)
    cost[-1] = 1.0
    result = _milp(program, cost, [peak, *_own_rows(program, width + 1)], 1.0 / scale, gap, integral)
    return replace(result, x=None if result.x is None else result.x[:width])


def _own_rows(program: LinearProgram, width: int) -> list[LinearConstraint]:
    """The rows of a program, those of memory aside, over its own variables and others behind them."""

    def wider(rows: sparse.csr_array) -> sparse.csr_array:
        return sparse.csr_array((rows.data, rows.indices, rows.indptr), shape=(len(rows.indptr) - 1, width))

    rows = [_rows(wider(program.equal), program.equal_to, program.equal_to)]
    if program.inequalities:
        rows.append(_rows(wider(program.at_most), -np.inf, 0.0))
    return rows


def _milp(
    program: LinearProgram,
    cost: np.ndarray,
    constraints: list[LinearConstraint],
    unit: float,
    gap: float,
    integral: bool = True,
) -> Relaxed:
    integrality = np.zeros(len(cost))
    integrality[: program.integers] = integral
    upper = np.full(len(cost), np.inf)
    upper[: program.integers] = 1.0
    options = {"node_limit": BRANCH_NODES, "mip_rel_gap": gap, "disp": False}
    result = milp(
        cost, integrality=integrality, bounds=Bounds(0.0, cast(float, upper)), constraints=constraints, options=options
    )
    nonzeros = sum(cast(sparse.csr_array, rows.A).nnz for rows in constraints)
    iterations = sum(rows.A.shape[0] for rows in constraints) + NODE_ITERATIONS * int(result.mip_node_count or 0)
    work = nonzeros * iterations * (INTEGER_WORK if integral else 1)
    if result.status == 2:
        return Relaxed(None, np.inf, work=work)
    bound = result.mip_dual_bound if integral or result.status != 0 else result.fun
    bound = float(bound) * unit if bound is not None and np.isfinite(bound) else 0.0
    return Relaxed(result.x, bound, work=work)


def _rows(matrix: sparse.csr_array, low: np.ndarray | float, high: np.ndarray | float) -> LinearConstraint:
    """low <= matrix @ x <= high. SciPy takes arrays, but its defaults make type checkers expect numbers."""
    return LinearConstraint(matrix, cast(float, low), cast(float, high))


def _row_scale(program: LinearProgram) -> float:
    """Returns the factor that makes a row's budget `SCALE`, where the solver's tolerance is 1e-10 of the budget."""
    budget = program.problem.budget
    return SCALE / abs(budget) if budget else 1.0


def _memory_rows(program: LinearProgram, points: Sequence[int]) -> tuple[sparse.csr_array, np.ndarray]:
    """Rows and limits: bytes at these points within the budget."""
    if not len(points):
        return sparse.csr_array((0, len(program.cost))), np.zeros(0)
    budget = program.problem.budget
    assert budget is not None
    scale = _row_scale(program)
    rows = np.stack([program.memory_row(t) for t in points]) * scale
    return sparse.csr_array(rows), (budget - program.problem.base[list(points)]) * scale
