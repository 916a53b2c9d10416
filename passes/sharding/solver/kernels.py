"""Loops over nodes, edges and cells, compiled by Numba.

They are plain loops over tables of whole numbers, without array expressions: these would take longer to compile than
to run. Minima may be taken in any order, but sums keep theirs, so that results do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

INF = np.inf

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compile_lazily(loop: Loop) -> Loop:
    """Compile a loop at its first call, and keep the code next to the module or in a cache of the user."""
    options: dict[str, Any] = {"fastmath": {"nnan", "nsz"}, "error_model": "numpy"}
    try:
        return cast(Loop, njit(cache=True, **options)(loop))
    except RuntimeError:  # no folder can be written
        return cast(Loop, njit(**options)(loop))


SRC, HIGH, ROW, KLASS = 0, 2, 4, 6  # of the source's end, and one further of the consumer's
CELL, ORIGIN = 8, 9


class Parts(NamedTuple):
    """The structure of a problem for message passing.

    A *part* is an edge to one consumer other than its source. It has a message for each of its rows, which go to the
    source, and for each of its columns, which go to the consumer. A column that no strategy of the consumer is in has
    the message `-inf`, so that it is never the least.

    Attributes:
      node: [nodes + 1, 2] where its strategies, and its ends in `end`, begin.
      end: 2 k for the source's end of part k, 2 k + 1 for the consumer's, by node.
      part: [parts, 10] for the source and for the consumer the node, how many classes it has, where its messages begin,
        and where the classes of its strategies begin; where the cells begin among those of all parts, and in the
        problem, -1 if they are divided.
      divided_edges: [n, 7] of each edge whose cells are divided among several consumers where they begin in the
        problem, how many rows and columns there are, the range of its parts, and that of its loops.
      loop: [loops, 4] of each consumer that is the source itself the node, where the classes of its rows and of its
        columns begin, and where what its strategies pay begins.
      classes: of all strategies of all ends.
    """

    node: np.ndarray
    end: np.ndarray
    part: np.ndarray
    divided_edges: np.ndarray
    loop: np.ndarray
    classes: np.ndarray


class State(NamedTuple):
    """The numbers of message passing, all of them changed but `edges`.

    Attributes:
      edges: [cells of the problem]. cost, cells, messages: of strategies, parts' cells and messages.
      loop_costs: what the strategies of the loops pay.
      room: to work in.
    """

    edges: np.ndarray
    cost: np.ndarray
    cells: np.ndarray
    messages: np.ndarray
    loop_costs: np.ndarray
    room: np.ndarray


@compile_lazily
def _collect(parts: Parts, cells: np.ndarray, given: np.ndarray, k: int, end: int, found: np.ndarray) -> None:
    """Compute the least of the cells of each class of an end, less the amounts given to the other end."""
    at, high, wide = parts.part[k, CELL], parts.part[k, HIGH], parts.part[k, HIGH + 1]
    row, column = parts.part[k, ROW], parts.part[k, ROW + 1]
    out, other = found[column : column + wide], given[column : column + wide]
    if end:
        for q in range(wide):
            out[q] = INF
    for p in range(high):
        held = cells[at : at + wide]  # numbers of a slice are not counted from its end
        at += wide
        if end:
            taken = given[row + p]
            for q in range(wide):
                out[q] = min(out[q], held[q] - taken)
        else:
            least = INF
            for q in range(wide):
                least = min(least, held[q] - other[q])
            found[row + p] = least


@compile_lazily
def collect(parts: Parts, cells: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Computes the least cell of each message, less the amounts given to the other end."""
    found = np.zeros(len(given))
    for h in parts.end:
        _collect(parts, cells, given, h >> 1, h & 1, found)
    return found


@compile_lazily
def least_remainders(parts: Parts, cells: np.ndarray, messages: np.ndarray) -> np.ndarray:
    """[parts] the least that each still holds."""
    found, rest = np.empty(len(messages)), np.full(len(parts.part), INF)
    for h in range(0, 2 * len(rest), 2):
        k, end = h >> 1, h & 1
        _collect(parts, cells, messages, k, end, found)
        for c in range(parts.part[k, ROW], parts.part[k, ROW] + parts.part[k, HIGH]):
            rest[k] = min(rest[k], found[c] - messages[c])
    return rest


@compile_lazily
def _total(parts: Parts, cost: np.ndarray, messages: np.ndarray, i: int, total: np.ndarray) -> None:
    """Seconds of each strategy of a node with the messages of its classes."""
    size = parts.node[i + 1, 0] - parts.node[i, 0]
    for s in range(size):
        total[s] = cost[parts.node[i, 0] + s]
    for h in range(parts.node[i, 1], parts.node[i + 1, 1]):
        k, end = parts.end[h] >> 1, parts.end[h] & 1
        at, message = parts.part[k, KLASS + end], parts.part[k, ROW + end]
        for s in range(size):
            total[s] += messages[message + parts.classes[at + s]]


@compile_lazily
def add(parts: Parts, cost: np.ndarray, messages: np.ndarray) -> np.ndarray:
    """Returns seconds of each strategy with the messages of its classes."""
    totals = np.empty(len(cost))
    for i in range(len(parts.node) - 1):
        _total(parts, cost, messages, i, totals[parts.node[i, 0] :])
    return totals


@compile_lazily
def _least(parts: Parts, values: np.ndarray, k: int, end: int, least: np.ndarray) -> None:
    """Computes the least value of the strategies of each message's class at an end; `inf` if there is none."""
    message, at, i = parts.part[k, ROW + end], parts.part[k, KLASS + end], parts.part[k, SRC + end]
    for c in range(message, message + parts.part[k, HIGH + end]):
        least[c] = INF
    for s in range(parts.node[i + 1, 0] - parts.node[i, 0]):
        c = message + parts.classes[at + s]
        least[c] = min(least[c], values[s])


@compile_lazily
def least_of_classes(parts: Parts, values: np.ndarray, messages: int) -> np.ndarray:
    """Computes the least value of the strategies of the class of each given message."""
    out = np.zeros(messages)
    for h in parts.end:
        k, end = h >> 1, h & 1
        _least(parts, values[parts.node[parts.part[k, SRC + end], 0] :], k, end, out)
    return out


@compile_lazily
def excess(parts: Parts, cells: np.ndarray, given: np.ndarray, rest: np.ndarray, out: np.ndarray) -> None:
    """Computes how far each cell of the undivided problem is above the least that its part still holds."""
    for k in range(len(parts.part)):
        origin, at, wide = parts.part[k, ORIGIN], parts.part[k, CELL], parts.part[k, HIGH + 1]
        for p in range(parts.part[k, HIGH] if origin >= 0 else 0):
            taken = given[parts.part[k, ROW] + p] + rest[k]
            for q in range(wide):
                out[origin + p * wide + q] = cells[at + p * wide + q] - taken - given[parts.part[k, ROW + 1] + q]


@compile_lazily
def ascend(parts: Parts, state: State, times: int, direction: int) -> None:
    """Pass messages, and divide the cells of shared edges after each sweep.

    Each node collects what its parts hold, and hands it on to those that lead on.

    Args:
      times: sweeps, or 0 to divide alone.
      direction: 0 or 1 for a pass forward or backward alone, without dividing; or -1.
    """
    nodes = len(parts.node) - 1
    messages, found, least, total = state.messages, state.room[0], state.room[1], state.room[2]
    for _ in range(max(times, 1)):
        for n in range(2 * nodes if times else 0):
            backward = n >= nodes
            i = 2 * nodes - 1 - n if backward else n
            if direction == 1 - backward:
                continue
            begin, stop = parts.node[i, 1], parts.node[i + 1, 1]
            ahead = 0
            for h in range(begin, stop):
                k, end = parts.end[h] >> 1, parts.end[h] & 1
                _collect(parts, state.cells, messages, k, end, found)
                ahead += parts.part[k, SRC + 1 - end] > i
            _total(parts, state.cost, found, i, total)
            share = 1.0 / max(ahead, stop - begin - ahead, 1)
            for h in range(begin, stop):
                k, end = parts.end[h] >> 1, parts.end[h] & 1
                _least(parts, total, k, end, least)
                leads = (parts.part[k, SRC + 1 - end] > i) != backward
                message = parts.part[k, ROW + end]
                for c in range(message, message + parts.part[k, HIGH + end]):
                    messages[c] = found[c] - (share * least[c] if leads else 0.0) if least[c] < INF else -INF
        for e in range(len(parts.divided_edges) if direction < 0 else 0):
            _divide(parts, state, e)


@compile_lazily
def _divide(parts: Parts, state: State, e: int) -> None:
    """Divide the cells of an edge among its consumers.

    Any parts of at least zero that sum to the cost of a cell give a lower bound. Each consumer gets what its messages
    have taken away, one that is the source itself what its best strategies pay, and all of them an equal part of the
    rest.
    """
    edges, cost, cells, messages, paid, room = state
    at, high, wide, k0, k1, l0, l1 = parts.divided_edges[e]
    spare, need, wants, pays = room[2], room[3], room[4], room[5]
    for c in range(high * wide):
        need[c] = wants[c] = 0.0
    for k in range(k0, k1):
        others = messages[parts.part[k, ROW + 1] : parts.part[k, ROW + 1] + wide]
        for p in range(high):
            taken = messages[parts.part[k, ROW] + p]
            needs, wanting = need[p * wide : (p + 1) * wide], wants[p * wide : (p + 1) * wide]
            for q in range(wide):
                needs[q] += max(taken + others[q], 0.0)
                wanting[q] += 1.0 if others[q] > -INF else 0.0
    for n in range(l0, l1):
        i, rows, columns, begin = parts.loop[n]
        first, size = parts.node[i, 0], parts.node[i + 1, 0] - parts.node[i, 0]
        _total(parts, cost, messages, i, spare)
        best = INF
        for s in range(size):
            best = min(best, spare[s])
            pays[parts.classes[rows + s] * wide + parts.classes[columns + s]] = -1.0
        for s in range(size):
            c = parts.classes[rows + s] * wide + parts.classes[columns + s]
            wants[c] += pays[c] < 0
            more = max(paid[begin + s] - (spare[s] - best) / (l1 - l0), 0.0) - max(pays[c], 0.0)
            need[c] += max(more, 0.0)
            pays[c] = max(pays[c], 0.0) + max(more, 0.0)
        for s in range(size):
            cost[first + s] -= paid[begin + s]
            paid[begin + s] = pays[parts.classes[rows + s] * wide + parts.classes[columns + s]]
    for c in range(high * wide):
        fit = edges[at + c] / need[c] if need[c] > edges[at + c] else 1.0
        wants[c] = (edges[at + c] - fit * need[c]) / max(wants[c], 1.0)
        need[c] = fit
    for k in range(k0, k1):
        others = messages[parts.part[k, ROW + 1] : parts.part[k, ROW + 1] + wide]
        for p in range(high):
            taken = messages[parts.part[k, ROW] + p]
            cell = parts.part[k, CELL] + p * wide
            out = cells[cell : cell + wide]
            fits, mores = need[p * wide : (p + 1) * wide], wants[p * wide : (p + 1) * wide]
            for q in range(wide):
                out[q] = max(taken + others[q], 0.0) * fits[q] + mores[q]
    for n in range(l0, l1):
        i, rows, columns, begin = parts.loop[n]
        for s in range(parts.node[i + 1, 0] - parts.node[i, 0]):
            c = parts.classes[rows + s] * wide + parts.classes[columns + s]
            paid[begin + s] = paid[begin + s] * need[c] + wants[c]
            cost[parts.node[i, 0] + s] += paid[begin + s]


@compile_lazily
def choose(parts: Parts, state: State, backward: bool) -> np.ndarray:
    """[nodes] node by node the best strategy given the nodes before, whose cells are the messages from then on."""
    nodes, cells, messages, total = len(parts.node) - 1, state.cells, state.messages, state.room[2]
    chosen = np.zeros(nodes, dtype=np.int64)
    for n in range(nodes):
        i = nodes - 1 - n if backward else n
        _total(parts, state.cost, messages, i, total)
        best = 0
        for s in range(parts.node[i + 1, 0] - parts.node[i, 0]):
            best = s if total[s] < total[best] else best
        chosen[i] = best
        for h in range(parts.node[i, 1], parts.node[i + 1, 1]):
            k, end = parts.end[h] >> 1, parts.end[h] & 1
            mine, wide = parts.classes[parts.part[k, KLASS + end] + best], parts.part[k, HIGH + 1]
            at, step = (mine, wide) if end else (mine * wide, 1)
            for c in range(parts.part[k, HIGH + 1 - end]):
                messages[parts.part[k, ROW + 1 - end] + c] = cells[parts.part[k, CELL] + at + c * step]
    return chosen


class Edges(NamedTuple):
    """The structure of a problem for descent and consistency.

    Attributes:
      node: [nodes + 1, 2] where its strategies, and its edges in `node_edges`, begin.
      node_edges: edges.
      edge: [edges + 1, 5] the source, where the cells begin, how many columns there are, where the classes of the
        source's strategies begin, and where its consumers begin.
      consumer: [consumers, 2] the node, and where the classes of its strategies begin.
      classes: of all strategies of all ends.
    """

    node: np.ndarray
    node_edges: np.ndarray
    edge: np.ndarray
    consumer: np.ndarray
    classes: np.ndarray


@compile_lazily
def _reply(
    edges: Edges, cells: np.ndarray, large: float, choice: np.ndarray, e: int, i: int, total: np.ndarray,
    wanted: np.ndarray,
) -> None:  # fmt: skip
    """Add to `total` the cost of an edge under each strategy of a node, without the part paid under all of them."""
    src, at, wide, rows, begin = edges.edge[e]
    stop = edges.edge[e + 1, 4]
    for q in range(wide):
        wanted[q] = False
    for c in range(begin, stop):
        node, klass = edges.consumer[c]
        if node != i:
            wanted[edges.classes[klass + choice[node]]] = True
    row = at + edges.classes[rows + choice[src]] * wide
    for s in range(edges.node[i + 1, 0] - edges.node[i, 0]):
        if src == i:
            row = at + edges.classes[rows + s] * wide
            for q in range(wide):
                if wanted[q]:
                    total[s] += min(cells[row + q], large)
        for c in range(begin, stop):
            if edges.consumer[c, 0] != i:
                continue
            q = edges.classes[edges.consumer[c, 1] + s]
            again = wanted[q]
            for d in range(begin, c):  # an earlier consumer of the same node pays for the column
                again |= edges.consumer[d, 0] == i and edges.classes[edges.consumer[d, 1] + s] == q
            if not again:
                total[s] += min(cells[row + q], large)


@compile_lazily
def descend(
    edges: Edges, cost: np.ndarray, cells: np.ndarray, large: float, choice: np.ndarray, waiting: np.ndarray,
    visits: int, fixed: int, gain: float,
) -> None:  # fmt: skip
    """Let one node at a time take the strategy that is best while its neighbours stay.

    Args:
      large: seconds that stand for infinite ones. choice: where it begins; changed.
      waiting: nodes in the order in which they are visited first, each once.
      visits: of nodes, after which the descent ends.
      fixed: a node that keeps its strategy, or -1. gain: the least relative gain of a move.
    """
    nodes, wide = len(edges.node) - 1, 1
    for e in range(len(edges.edge)):
        wide = max(wide, edges.edge[e, 2])
    total, wanted = np.empty(len(cost)), np.empty(wide, dtype=np.bool_)
    queue, queued = np.empty(nodes + 1, dtype=np.int64), np.zeros(nodes, dtype=np.bool_)
    head, tail = 0, len(waiting)
    for n in range(tail):
        queue[n] = waiting[n]
        queued[waiting[n]] = True
    for _ in range(visits):
        if head == tail:
            break
        i = queue[head]
        head = (head + 1) % (nodes + 1)
        queued[i] = False
        first, size = edges.node[i, 0], edges.node[i + 1, 0] - edges.node[i, 0]
        if size == 1 or i == fixed:
            continue
        for s in range(size):
            total[s] = min(cost[first + s], large)
        for t in range(edges.node[i, 1], edges.node[i + 1, 1]):
            _reply(edges, cells, large, choice, edges.node_edges[t], i, total, wanted)
        best, now = 0, total[choice[i]]
        for s in range(size):
            best = s if total[s] < total[best] else best
        if total[best] >= now - gain * abs(now):
            continue
        choice[i] = best
        for t in range(edges.node[i, 1], edges.node[i + 1, 1]):
            e = edges.node_edges[t]
            for c in range(edges.edge[e, 4] - 1, edges.edge[e + 1, 4]):
                j = edges.edge[e, 0] if c < edges.edge[e, 4] else edges.consumer[c, 0]
                if j != i and not queued[j]:
                    queued[j] = True
                    queue[tail] = j
                    tail = (tail + 1) % (nodes + 1)
