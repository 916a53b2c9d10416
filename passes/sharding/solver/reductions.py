"""Reductions of a sharding problem that keep its optimum.

Three ideas, each a pure function from a problem to a smaller one and to the map that lifts its choices back:

`prune` drops strategies that are forbidden, or that no optimum needs (`sharding.solver.dominance`).

`compress` moves constants from edges to nodes: a row p of a single consumer's matrix is paid exactly if the source
takes p, so min_q cost[p, q] is the source's own; rows that then are equal are one. Columns likewise, also of a
transfer with many consumers where one of them alone wants the column. (A row of a shared transfer stays: how often it
is paid depends on how many layouts are wanted.)

`fold` minimises nodes out, as dynamic programming does: a node with one strategy is a constant, a node with one
neighbour a cost of that neighbour, a node with two neighbours an edge between them if that edge is not larger than
what it replaces. On the way transfers are brought to their simplest form: consumers that share nothing get an edge of
their own, transfers between two nodes become one matrix. Only nodes and edges without memory are minimised out.

Eliminated nodes remain, with one strategy, so that the numbers of nodes mean the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.passes.sharding.solver.dominance import LARGE, copied_layouts, undominated
from alpa_lite.passes.sharding.solver.problem import Consumer, Edge, Memory, Node, Problem, nothing, timeline, used


class Contradiction(Exception):
    """A node has no strategy left: the problem has no solution."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A smaller problem with the same optimum. lift: its choices -> those of the original, of equal seconds."""

    problem: Problem
    lift: Callable[[np.ndarray], np.ndarray]


def reduce(problem: Problem, rounds: int = 8) -> Reduction:
    """All reductions, again and again until nothing is gained.

    Raises:
      Contradiction: no choice is allowed.
    """
    result = Reduction(problem, lambda choice: choice)
    for _ in range(rounds):
        before = result.problem.size
        for step in (prune, compress, fold):
            result = chain(result, step(result.problem))
        if result.problem.size > 0.95 * before:
            break
    return chain(result, prune(result.problem))


def chain(first: Reduction, second: Reduction) -> Reduction:
    """The second reduction after the first."""
    return Reduction(second.problem, lambda choice: first.lift(second.lift(choice)))


def prune(problem: Problem) -> Reduction:
    """Drop forbidden and dominated strategies, and the classes that nobody needs any more.

    Raises:
      Contradiction: no choice is allowed.
    """
    keep = _consistent(problem)
    touching = edges_of(problem)
    for i, node in enumerate(problem.nodes):
        if keep[i].sum() > 1:
            keep[i] = undominated(node, [problem.edges[e] for e in touching[i]], i, keep)
    return restrict(problem, keep)


def consistent(problem: Problem) -> Reduction:
    """Drop only what is forbidden: strategies of infinite cost, and those that a neighbour cannot meet.

    Raises:
      Contradiction: no choice is allowed.
    """
    return restrict(problem, _consistent(problem))


def restrict(problem: Problem, keep: Sequence[np.ndarray]) -> Reduction:
    """The problem with the strategies of the masks `keep` alone.

    Raises:
      Contradiction: a node keeps nothing.
    """
    kept = [np.flatnonzero(mask) for mask in keep]
    if any(not len(k) for k in kept):
        raise Contradiction
    draft = _Draft(problem)
    for i, k in enumerate(kept):
        draft.cost[i] = draft.cost[i][k]
        draft.memory[i] = draft.memory[i].at(k)
    for edge in problem.edges:
        src_class = edge.src_class[kept[edge.src]]
        consumers = [(node, klass[kept[node]]) for node, klass in edge.consumers]
        draft.edges.append(_compact(edge, src_class, consumers))
    return Reduction(
        draft.finish(), lambda choice: np.array([k[s] for k, s in zip(kept, choice, strict=True)], dtype=int)
    )


def compress(problem: Problem) -> Reduction:
    """Move constants from edges to nodes, and merge the rows and columns that become equal."""
    draft = _Draft(problem)
    for edge in problem.edges:
        draft.edges.extend(_compress_edge(draft, edge))
    return Reduction(draft.finish(), lambda choice: choice)


def fold(problem: Problem) -> Reduction:
    """Minimise nodes out, exactly: constants, leaves, and nodes between two neighbours."""
    draft = _Draft(problem)
    simple = [piece for edge in problem.edges for piece in _simplify(draft, edge)]
    for edge in _merge_parallel(simple):
        draft.edges.extend(_compress_edge(draft, edge))
    eliminated = _eliminate(draft)

    def lift(choice: np.ndarray) -> np.ndarray:
        choice = np.array(choice, dtype=int)
        for node, neighbours, table in reversed(eliminated):
            choice[node] = table[tuple(klass[choice[n]] for n, klass in neighbours)]
        return choice

    return Reduction(draft.finish(), lift)


def edges_of(problem: Problem) -> list[list[int]]:
    """For each node the edges that it is part of."""
    touching: list[list[int]] = [[] for _ in problem.nodes]
    for e, edge in enumerate(problem.edges):
        for node in edge.nodes:
            touching[node].append(e)
    return touching


def live_columns(edge: Edge) -> np.ndarray:
    """[consumers, Q] whether a strategy of that consumer wants layout q."""
    live = np.zeros((len(edge.consumers), edge.cost.shape[1]), dtype=bool)
    for k, (_, klass) in enumerate(edge.consumers):
        live[k, klass] = True
    return live


class _Draft:
    """A problem under construction: costs and memory that edges may charge to nodes."""

    def __init__(self, problem: Problem) -> None:
        self.cost = [node.cost for node in problem.nodes]
        self.memory: list[Memory] = [node.memory for node in problem.nodes]
        self.edges: list[Edge] = []
        self.base, self.budget = problem.base, problem.budget
        # Costs closer than this are equal. All nodes at their cheapest is a lower bound of the optimum, so a thousand
        # such merges change the optimum by less than one part in 1e9; without a bound, equal means equal.
        bound = problem.lower_bound
        self.tolerance = 1e-13 * bound if np.isfinite(bound) else 0.0

    def charge(self, node: int, cost: np.ndarray, memory: Memory | None = None) -> None:
        self.cost[node] = self.cost[node] + cost
        self.memory[node] = self.memory[node].plus(memory or nothing())

    def finish(self) -> Problem:
        """The problem, with the bytes that every strategy of a node has moved to the base."""
        nodes, spans, least = [], [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0)]
        for cost, memory in zip(self.cost, self.memory, strict=True):
            if memory:
                spans.append(memory.span)
                least.append(memory.size.min(1))
                memory = Memory(memory.span, memory.size - least[-1][:, None]).tidy()
            nodes.append(Node(cost, memory))
        edges = []
        for edge in self.edges:
            if edge.consumers:
                edges.append(replace(edge, memory=edge.memory.where(np.isfinite(edge.cost)).tidy()))
        start, end = np.concatenate(spans).T
        base = self.base + timeline(len(self.base), start, end, np.concatenate(least))
        return Problem(tuple(nodes), tuple(edges), base, self.budget)


def _compact(edge: Edge, src_class: np.ndarray, consumers: Sequence[Consumer]) -> Edge:
    """The edge with these classes, without the rows and columns that nobody uses; alike consumers once."""
    rows, src_class = used(src_class, edge.cost.shape[0])
    read = [klass for _, klass in consumers] or [np.zeros(0, dtype=int)]
    columns, column = used(np.concatenate(read), edge.cost.shape[1])
    unique = {}
    start = 0
    for node, klass in consumers:
        klass, start = column[start : start + len(klass)], start + len(klass)
        unique[node, klass.tobytes()] = (node, klass)
    pick = np.ix_(rows, columns)
    return Edge(edge.src, src_class, tuple(unique.values()), edge.cost[pick], edge.memory.at(*pick))


# --- prune ------------------------------------------------------------------------------------------------------------


def _consistent(problem: Problem) -> list[np.ndarray]:
    """Masks of the strategies that are allowed and that every neighbour can meet."""
    keep = [np.isfinite(node.cost) for node in problem.nodes]
    constrained = [edge for edge in problem.edges if np.isinf(edge.cost).any()]
    changed = True
    while changed:
        changed = False
        for edge in constrained:
            allowed = np.isfinite(edge.cost)
            for node, klass in edge.consumers:
                before = keep[edge.src].sum() + keep[node].sum()
                if node == edge.src:
                    keep[node] = keep[node] & allowed[edge.src_class, klass]
                else:
                    met = allowed & _live(edge.src_class, keep[edge.src], 0, allowed)
                    keep[node] = keep[node] & np.asarray(met.any(0))[klass]
                    met = met & _live(klass, keep[node], 1, allowed)
                    keep[edge.src] = keep[edge.src] & np.asarray(met.any(1))[edge.src_class]
                changed |= bool(keep[edge.src].sum() + keep[node].sum() < before)
    if not all(mask.any() for mask in keep):
        raise Contradiction
    return keep


def _live(klass: np.ndarray, keep: np.ndarray, axis: int, like: np.ndarray) -> np.ndarray:
    """Mask of the classes that a kept strategy has, shaped to broadcast along `axis` of [P, Q]."""
    live = np.zeros(like.shape[axis], dtype=bool)
    live[klass[keep]] = True
    return live[:, None] if axis == 0 else live[None, :]


# --- compress ---------------------------------------------------------------------------------------------------------


def _compress_edge(draft: _Draft, edge: Edge) -> list[Edge]:
    """The edge with its constants charged to nodes and its alike rows and columns merged; perhaps nothing is left."""
    cost, memory = edge.cost.copy(), edge.memory
    live = live_columns(edge)
    label = _column_labels(edge, live)
    for k, (node, klass) in enumerate(edge.consumers):
        least = _finite_min(cost, 0) * (label == k)
        cost -= least
        draft.charge(node, least[klass])
    if len(edge.consumers) == 1 and edge.consumers[0][0] != edge.src:
        least = _finite_min(cost, 1)
        cost -= least[:, None]
        draft.charge(edge.src, least[edge.src_class])
    tolerance = draft.tolerance
    free = ((cost == 0) | np.isinf(cost)).all(0) & ~copied_layouts(edge)
    label[free] = -1
    column_of = _alike(cost.T, memory.size.swapaxes(1, 2) if memory else None, tolerance, label)
    row_of = _alike(cost, memory.size if memory else None, tolerance, np.zeros(len(cost), dtype=int))
    needed = [(n, column_of[c]) for n, c in edge.consumers if not (free[c].all() and np.isfinite(cost[:, c]).all())]
    if not needed:
        return []
    result = _compact(Edge(edge.src, edge.src_class, (), cost, memory), row_of[edge.src_class], needed)
    if len(result.consumers) == 1 and 1 in result.cost.shape:  # a cost of one end alone
        (node, klass), src_class = result.consumers[0], result.src_class
        end, pick = (node, (0, klass)) if len(result.cost) == 1 else (edge.src, (src_class, 0))
        draft.charge(end, result.cost[pick], result.memory.at(*pick))
        return []
    return [result]


def _column_labels(edge: Edge, live: np.ndarray) -> np.ndarray:
    """[Q] the one consumer that wants a layout; a negative number of its own if several do."""
    several = live.sum(0) > 1
    return np.where(several, -2 - np.arange(live.shape[1]), live.argmax(0))


def _finite_min(cost: np.ndarray, axis: int) -> np.ndarray:
    """The least allowed cost, zero where nothing is allowed."""
    least = cost.min(axis)
    return np.where(np.isinf(least), 0.0, least)


def _alike(rows: np.ndarray, size: np.ndarray | None, tolerance: float, label: np.ndarray) -> np.ndarray:
    """For each row the first of the same label, costs (within the tolerance) and bytes; too many are left alone."""
    if rows.size * len(rows) * (1 if size is None else 1 + len(size)) > LARGE:
        return np.arange(len(rows))
    finite = np.isfinite(rows)
    value = np.where(finite, rows, -1.0)
    same = (np.abs(value[:, None] - value[None, :]) <= tolerance).all(2) & (label[:, None] == label[None, :])
    same &= (finite[:, None] == finite[None, :]).all(2)
    if size is not None:
        same &= (size[:, :, None] == size[:, None]).all((0, 3))
    return same.argmax(1)


# --- fold -------------------------------------------------------------------------------------------------------------


def _simplify(draft: _Draft, edge: Edge) -> list[Edge]:
    """Equivalent edges, simpler: what one node decides is charged to it, what shares nothing is split off."""
    cost, memory = edge.cost.copy(), edge.memory
    src, src_class = edge.src, edge.src_class

    def settle(klass: np.ndarray, mask: np.ndarray) -> None:
        """The source pays for the layouts of `mask`, which it wants by class; nobody pays again."""
        paid = np.where(mask, cost, np.where(np.isinf(cost), np.inf, 0.0))[src_class, klass]
        nonlocal memory
        draft.charge(src, paid, memory.where(mask).at(src_class, klass))
        cost[:, mask] = 0.0
        memory = memory.where(~mask)

    rest = []
    for node, klass in edge.consumers:
        if len(draft.cost[node]) == 1:  # one strategy: the layout is wanted always
            settle(np.full(len(src_class), klass[0]), np.arange(cost.shape[1]) == klass[0])
        else:
            rest.append((node, klass))
    if not rest:
        return []
    live = live_columns(Edge(src, src_class, tuple(rest), cost))
    alone = live.sum(0) == 1
    for k, (node, klass) in enumerate(rest):
        if node == src:
            settle(klass, live[k] & alone)
    free = ((cost == 0) | np.isinf(cost)).all(0) & ~copied_layouts(Edge(src, src_class, (), cost, memory))
    pieces, shared = [], []
    for k, (node, klass) in enumerate(rest):
        apart = (free | alone)[live[k]].all()
        if not apart:
            shared.append((node, klass))
        elif node != src:
            pieces.append(_compact(Edge(src, src_class, (), cost, memory), src_class, [(node, klass)]))
    if shared:
        whole = _compact(Edge(src, src_class, (), cost, memory), src_class, shared)
        pieces.extend(_between_two(draft, whole))
    return pieces


def _between_two(draft: _Draft, edge: Edge) -> list[Edge]:
    """A transfer that at most two nodes decide, as one matrix between them (or as a cost of the one)."""
    others = sorted(edge.nodes - {edge.src})
    if len(others) > 1 or (len(edge.consumers) == 1 and others):
        return [edge]
    own = [klass for node, klass in edge.consumers if node == edge.src]
    theirs = [klass for node, klass in edge.consumers if node != edge.src]
    ours, src_class = np.unique(np.stack([edge.src_class, *own]), axis=1, return_inverse=True)
    columns = edge.cost.shape[1]
    wanted = np.zeros((ours.shape[1], 1, columns), dtype=bool)
    for klass in ours[1:]:
        wanted[np.arange(len(klass)), 0, klass] = True
    klass = np.zeros(1, dtype=int)
    if theirs:
        joint, klass = np.unique(np.stack(theirs), axis=1, return_inverse=True)
        more = np.zeros((1, joint.shape[1], columns), dtype=bool)
        for column in joint:
            more[0, np.arange(len(column)), column] = True
        wanted = wanted | more

    def paid(cost: np.ndarray) -> np.ndarray:
        return np.where(wanted, cost[ours[0]][:, None, :], 0.0).sum(2)

    cost, memory = paid(edge.cost), edge.memory
    if memory:
        memory = Memory(memory.span, np.stack([paid(size) for size in memory.size]))
    if not theirs:
        draft.charge(edge.src, cost[src_class, 0], memory.at(src_class, 0))
        return []
    return [Edge(edge.src, src_class, ((others[0], klass),), cost, memory)]


def _is_pair(edge: Edge) -> bool:
    return len(edge.consumers) == 1 and edge.consumers[0][0] != edge.src


def _merge_parallel(edges: Sequence[Edge]) -> list[Edge]:
    """Edges between the same two nodes as one, unless the joint classes make it much larger."""
    result: list[Edge] = []
    slot: dict[tuple[int, int], int] = {}
    for edge in edges:
        merged = None
        if _is_pair(edge):
            ends = (edge.src, edge.consumers[0][0])
            key = (min(ends), max(ends))
            if key in slot and (merged := _join(result[slot[key]], edge)) is not None:
                result[slot[key]] = merged
            else:
                slot[key] = len(result)
        if merged is None:
            result.append(edge)
    return result


def _join(first: Edge, second: Edge) -> Edge | None:
    """Two edges between the same nodes as one matrix over joint classes; None if that is much larger."""
    node, klass = first.consumers[0]
    a = (first.src_class, klass, first.cost, first.memory)
    b_node, b_klass = second.consumers[0]
    if second.src == first.src:
        b = (second.src_class, b_klass, second.cost, second.memory)
    else:
        assert b_node == first.src
        turned = Memory(second.memory.span, second.memory.size.swapaxes(1, 2)) if second.memory else second.memory
        b = (b_klass, second.src_class, second.cost.T, turned)
    rows, src_class = np.unique(np.stack([a[0], b[0]]), axis=1, return_inverse=True)
    columns, klass = np.unique(np.stack([a[1], b[1]]), axis=1, return_inverse=True)
    if rows.shape[1] * columns.shape[1] > 2 * (a[2].size + b[2].size) + 64:
        return None
    pick_a, pick_b = np.ix_(rows[0], columns[0]), np.ix_(rows[1], columns[1])
    memory = a[3].at(*pick_a).plus(b[3].at(*pick_b))
    return Edge(first.src, src_class, ((node, klass),), a[2][pick_a] + b[2][pick_b], memory)


Eliminated = tuple[int, list[Consumer], np.ndarray]


def _eliminate(draft: _Draft) -> list[Eliminated]:
    """Minimise out nodes with at most two neighbours, until none is left; returns each with its best replies."""
    edges = dict(enumerate(draft.edges))
    touching: list[set[int]] = [set() for _ in draft.cost]
    for e, edge in edges.items():
        for node in edge.nodes:
            touching[node].add(e)
    eliminated: list[Eliminated] = []
    work = sorted(range(len(draft.cost)), key=lambda i: -len(touching[i]))
    waiting = set(work)
    while work:
        v = work.pop()
        waiting.discard(v)
        around = [edges[e] for e in touching[v]]
        if len(draft.cost[v]) == 1 or len(around) > 2 or _varies(draft.memory[v]):
            continue
        if not all(_is_pair(edge) and not edge.memory for edge in around):
            continue
        sides = [_seen_from(edge, v) for edge in around]
        if len(sides) == 2 and (
            sides[0][0] == sides[1][0]
            or sides[0][2].shape[1] * sides[1][2].shape[1] > sides[0][2].size + sides[1][2].size + len(draft.cost[v])
        ):
            continue
        new = _minimise_out(draft, v, sides, eliminated)
        for e in list(touching[v]):
            for node in edges.pop(e).nodes:
                touching[node].discard(e)
        for edge in new:
            _insert(draft, edge, edges, touching)
        for node, _, _ in sides:
            if node not in waiting:
                waiting.add(node)
                work.append(node)
    draft.edges = list(edges.values())
    return eliminated


def _varies(memory: Memory) -> bool:
    return bool(memory) and bool((memory.size != memory.size[:, :1]).any())


def _seen_from(edge: Edge, v: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The other end, its classes, and the matrix [strategies of v, classes of the other end]."""
    node, klass = edge.consumers[0]
    return (node, klass, edge.cost[edge.src_class]) if edge.src == v else (edge.src, edge.src_class, edge.cost.T[klass])


def _minimise_out(
    draft: _Draft, v: int, sides: list[tuple[int, np.ndarray, np.ndarray]], eliminated: list[Eliminated]
) -> list[Edge]:
    """Replace node v by its best reply to each pair of neighbours' classes."""
    total = draft.cost[v].reshape(-1, *[1] * len(sides))
    if sides:
        total = total + (sides[0][2] if len(sides) == 1 else sides[0][2][:, :, None])
    if len(sides) == 2:
        total = total + sides[1][2][:, None, :]
    best = total.min(0)
    eliminated.append((v, [(node, klass) for node, klass, _ in sides], total.argmin(0)))
    draft.memory[v] = draft.memory[v].at(np.zeros(1, dtype=int))
    draft.cost[v] = np.zeros(1) if sides else np.reshape(best, 1)
    if len(sides) == 1:
        draft.charge(sides[0][0], best[sides[0][1]])
    if len(sides) < 2:
        return []
    (a, a_class, _), (b, b_class, _) = sides
    return [Edge(a, a_class, ((b, b_class),), best)]


def _insert(draft: _Draft, edge: Edge, edges: dict[int, Edge], touching: list[set[int]]) -> None:
    """Add an edge, joined with one between the same nodes, and compressed."""
    ends = edge.nodes
    for e in touching[edge.src] & touching[edge.consumers[0][0]]:
        if _is_pair(edges[e]) and edges[e].nodes == ends and (joint := _join(edges[e], edge)) is not None:
            edge = joint
            del edges[e]
            for node in ends:
                touching[node].discard(e)
            break
    for piece in _compress_edge(draft, edge):
        e = max(edges, default=-1) + 1
        edges[e] = piece
        for node in ends:
            touching[node].add(e)
