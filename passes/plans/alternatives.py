"""What the whole step would cost with another strategy: a decision's alternatives, weighed against the choice.

For strategy s of node i let best(i, s) be the seconds of the best plan that takes s. Solving anew for each would cost
hundreds of integer programs. Two numbers enclose it instead, and where they meet both are best(i, s):

  from below   message passing (`sharding.solver.messages`) gives a bound for all choices, and for each strategy how far
               above the bound a choice must be that takes it (a lower min-marginal);
  from above   a plan that takes s: coordinate descent from the chosen plan with node i fixed at s. Only neighbours of
               what has changed are asked, so that a plan costs some dozens of array operations.

Both are for the tied operations of a node together. A budget that binds is respected through a price of memory
(`sharding.solver.memory`): bounds and descent are those of the priced problem, and a plan counts as fitting only if its
bytes, summed anew, do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.passes.sharding.solver.memory import MemoryDual
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Edge, Problem, allowance, forget_memory, price_memory, timeline
from alpa_lite.passes.sharding.solver.reductions import Contradiction, consistent, edges_of

Changes = Mapping[int, int]
"""Node -> strategy, for the nodes in which a plan differs from the chosen one."""

SWEEPS = 4
"""Message passing sweeps: bounds of whole models are then within about one part in 1e3 of the optimum."""
_STEPS = 6  # prices of memory tried where the budget binds
_BINDING = 1e-3  # share of the objective by which a choice must exceed the bound without memory for a price to be tried
_RAISES = 3  # times that the price of memory is doubled for a plan that does not fit
_VISITS = 300  # of nodes in one descent


@dataclass(frozen=True)
class Weighed:
    """One strategy of one node.

    Attributes:
      strategy: its number.
      bound: seconds that no plan with it undercuts, within the budget.
      fitting: the best plan found with it that fits the budget; None if none was found.
      fastest: the fastest plan found with it, were memory unlimited.
    """

    strategy: int
    bound: float
    fitting: Changes | None
    fastest: Changes


def weigh(problem: Problem, choice: Sequence[int], kept: Sequence[int]) -> list[tuple[Weighed, ...]]:
    """For each node of a problem its chosen strategy, and then the best others, by bound.

    Strategies that nothing allows, and those with which descent finds no allowed plan, are left out.

    Args:
      problem: with its budget, if there is one.
      choice: the strategy of each node; allowed, and taken to be good.
      kept: for each node, how many other strategies to weigh.
    """
    chosen = [int(s) for s in choice]
    objective = problem.seconds(chosen)
    free = _Answers(forget_memory(problem), chosen)
    bounds = [np.maximum(b, 0.0) for b in free.bounds]
    sizes = Sizes(problem, chosen)
    priced: list[_Answers] = []
    if problem.budget is not None and sizes.fits({}) and objective - free.bound > _BINDING * objective:
        price = _price(problem, chosen)
        if price.any():
            within = _Answers(price_memory(problem, price), chosen, float(price @ (problem.base - problem.budget)))
            bounds = [np.maximum(a, b) for a, b in zip(bounds, within.bounds, strict=True)]
            dearer = [price_memory(problem, price * 2.0**k) for k in range(1, _RAISES + 1)]
            priced = [within, *(_Answers(p, chosen, sweeps=0) for p in dearer)]
    out = []
    for i, node in enumerate(problem.nodes):
        roomy = free.plan(i, chosen[i]) if priced and kept[i] else None  # what the choice itself gains from more memory
        row = [Weighed(chosen[i], min(float(bounds[i][chosen[i]]), objective), {}, roomy or {})]
        for s in map(int, np.argsort(bounds[i], kind="stable")) if len(node.cost) > 1 else ():
            if len(row) > kept[i] or not math.isfinite(bounds[i][s]):
                break
            if s == chosen[i] or (fastest := free.plan(i, s)) is None:
                continue
            row.append(Weighed(s, float(bounds[i][s]), _fitting(i, s, fastest, free, priced, sizes), fastest))
        out.append(tuple(row))
    return out


def _fitting(
    node: int, strategy: int, fastest: Changes, free: _Answers, priced: Sequence[_Answers], sizes: Sizes
) -> Changes | None:
    """The best plan found that fits: the fastest, or else one at the lowest price of memory that makes it fit."""
    if sizes.fits(fastest):
        return fastest
    for answers in priced:
        plan = answers.plan(node, strategy)
        if plan is not None and sizes.fits(plan) and math.isfinite(free.more(plan)):
            return plan
    return None


class _Answers:
    """The plans that answer to forced strategies, and the bounds, of one problem without a budget.

    Attributes:
      bound: seconds of any choice, at least. bounds: [S] for each node, of the choices that take a strategy.
    """

    def __init__(self, problem: Problem, chosen: list[int], offset: float = 0.0, sweeps: int = SWEEPS) -> None:
        self._chosen, self._nodes = chosen, [node.cost for node in problem.nodes]
        self._touching = edges_of(problem)
        self._edges = problem.edges
        self._paid = [_paid(edge, chosen) for edge in problem.edges]
        # Descent must be able to leave what is forbidden, so there a large cost stands for an infinite one.
        finite = [float(np.max(edge.cost, initial=0.0, where=np.isfinite(edge.cost))) for edge in problem.edges]
        self._large = 1e3 * (sum(finite) + sum(float(c[s]) for c, s in zip(self._nodes, chosen, strict=True)))
        self._costs = [np.minimum(edge.cost, self._large) for edge in problem.edges]
        self._around = [
            [[n for n in edge.nodes if n != i] for edge in (problem.edges[e] for e in self._touching[i])]
            for i in range(len(chosen))
        ]
        self.bound, self.bounds = -math.inf, [np.full(len(cost), -np.inf) for cost in self._nodes]
        if sweeps:
            self.bound, self.bounds = _bounds(problem, offset, sweeps)

    def plan(self, node: int, strategy: int) -> Changes | None:
        """A plan in which a node takes a strategy and no other wants to move; None if it holds what is forbidden."""
        choice, changed = self._chosen.copy(), {node}
        choice[node] = strategy
        waiting = dict.fromkeys(n for near in self._around[node] for n in near)
        for _ in range(_VISITS):
            if not waiting:
                break
            i = next(iter(waiting))
            del waiting[i]
            if len(self._nodes[i]) == 1:
                continue
            total = self._nodes[i].copy()
            for e in self._touching[i]:
                _add_replies(total, self._edges[e], self._costs[e], choice, i)
            best = int(total.argmin())
            if total[best] < total[choice[i]]:
                choice[i] = best
                changed.add(i)
                waiting.update(dict.fromkeys(n for near in self._around[i] for n in near if n != node))
        plan = {i: choice[i] for i in changed if choice[i] != self._chosen[i]}
        return plan if math.isfinite(self.more(plan)) else None

    def more(self, changes: Changes) -> float:
        """Seconds that a plan costs more than the chosen one."""
        after = changed_choice(self._chosen, changes)
        total = sum(float(self._nodes[i][s] - self._nodes[i][self._chosen[i]]) for i, s in changes.items())
        return total + sum(
            _paid(self._edges[e], after) - self._paid[e] for e in {e for i in changes for e in self._touching[i]}
        )


def changed_choice(choice: Sequence[int], changes: Changes) -> list[int]:
    """The choice with some nodes changed."""
    after = list(choice)
    for i, s in changes.items():
        after[i] = s
    return after


def _bounds(problem: Problem, offset: float, sweeps: int) -> tuple[float, list[np.ndarray]]:
    """Lower bounds by message passing: of all choices, and for each node of those that take a strategy; `inf` if none.

    offset: added to all of them.
    """
    every = [np.full(len(node.cost), np.inf) for node in problem.nodes]
    try:
        reduction = consistent(problem)
    except Contradiction:
        return math.inf, every
    ascent = Ascent(reduction.problem)
    ascent.sweep(sweeps)
    kept = _kept(reduction.lift, [len(node.cost) for node in reduction.problem.nodes])
    for bounds, mine, slack in zip(every, kept, ascent.slack()[0], strict=True):
        bounds[mine] = ascent.bound + offset + slack
    return ascent.bound + offset, every


def _kept(lift: Callable[[np.ndarray], np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
    """For each node the strategies that a restriction keeps, given how many."""
    rows = np.stack([lift(np.minimum(k, np.array(sizes) - 1)) for k in range(max(sizes))])
    return [rows[:size, i] for i, size in enumerate(sizes)]


def _paid(edge: Edge, choice: Sequence[int]) -> float:
    """Seconds of an edge under a choice."""
    row = edge.cost[edge.src_class[choice[edge.src]]]
    if len(edge.consumers) == 1:
        node, klass = edge.consumers[0]
        return float(row[klass[choice[node]]])
    return float(sum(row[q] for q in {int(klass[choice[node]]) for node, klass in edge.consumers}))


def _add_replies(total: np.ndarray, edge: Edge, cost: np.ndarray, choice: Sequence[int], i: int) -> None:
    """Add to `total`, [S], what an edge of the given cost pays under each strategy of node i."""
    if edge.src == i:
        rows = cost[edge.src_class]
        others = {int(klass[choice[node]]) for node, klass in edge.consumers if node != i}
        for q in others:
            total += rows[:, q]
    else:
        rows = cost[edge.src_class[choice[edge.src]]]
        others = {int(klass[choice[node]]) for node, klass in edge.consumers if node != i}
        total += sum(rows[q] for q in others)
    own: list[np.ndarray] = []
    for node, klass in edge.consumers:
        if node == i:
            paid = rows[np.arange(len(klass)), klass] if edge.src == i else rows[klass]
            for taken in (*others, *own):
                paid = np.where(klass == taken, 0.0, paid)
            own.append(klass)
            total += paid


class Sizes:
    """Peak bytes of plans that differ little from a chosen one."""

    def __init__(self, problem: Problem, chosen: list[int]) -> None:
        self._problem, self._chosen = problem, chosen
        self._live = problem.bytes(chosen)
        self._touching = edges_of(problem)
        self._limit = math.inf if problem.budget is None else allowance(problem.budget)
        self._known: dict[tuple[tuple[int, int], ...], float] = {}  # a memo, invisible to callers

    def fits(self, changes: Changes) -> bool:
        """Whether a plan fits the budget."""
        return self.peak(changes) <= self._limit

    def peak(self, changes: Changes) -> float:
        """Bytes at the fullest program point of a plan."""
        key = tuple(changes.items())
        if key not in self._known:
            self._known[key] = self._peak(changes)
        return self._known[key]

    def _peak(self, changes: Changes) -> float:
        after = changed_choice(self._chosen, changes)
        spans, sizes = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0)]
        for i, s in changes.items():
            memory = self._problem.nodes[i].memory
            if memory:
                spans.append(memory.span)
                sizes.append(memory.size[:, s] - memory.size[:, self._chosen[i]])
        for e in {e for i in changes for e in self._touching[i]}:
            edge = self._problem.edges[e]
            if edge.memory:
                new, old = _copy_index(edge, after), _copy_index(edge, self._chosen)
                if new != old:
                    spans.append(edge.memory.span)
                    sizes.append(_copies(edge, *new) - _copies(edge, *old))
        start, end = np.concatenate(spans).T
        return float((self._live + timeline(len(self._live), start, end, np.concatenate(sizes))).max(initial=0.0))


def _copy_index(edge: Edge, choice: Sequence[int]) -> tuple[int, set[int]]:
    """The produced layout and the wanted ones of an edge under a choice."""
    return int(edge.src_class[choice[edge.src]]), {int(klass[choice[node]]) for node, klass in edge.consumers}


def _copies(edge: Edge, made: int, wanted: set[int]) -> np.ndarray:
    """[n] bytes of an edge's copies."""
    sizes = edge.memory.size
    return sum((sizes[:, made, q] for q in wanted), np.zeros(len(sizes)))


def _price(problem: Problem, chosen: list[int]) -> np.ndarray:
    """[points] a good price of memory, in seconds per byte."""
    reduction = consistent(problem)
    dual = MemoryDual(replace(reduction.problem, budget=problem.budget))
    dual.add(problem.seconds(chosen), problem.bytes(chosen))
    for i in range(_STEPS):
        dual.step(SWEEPS if i == 0 else 2)
        if dual.finished:
            break
    return dual.price
