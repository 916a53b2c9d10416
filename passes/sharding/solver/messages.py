"""Lower bounds of a sharding problem without an optimiser: ascent of the dual of its linear relaxation.

Costs may be moved between an edge and its two ends without changing any choice's seconds: with messages u[p], v[q],

    node[s] += sum_e u_e[class of s],      edge_e[p, q] -= u_e[p] + v_e[q].

However they are moved, sum_i min node_i + sum_e min edge_e is a lower bound, and the best such bound is the linear
relaxation. Each node collects all that its edges hold and hands it on along an order of the nodes, forward, then
backward; the bound never falls (sequential reweighted message passing: Kolmogorov, 2015).

The order is that of colours (`solver.wiring`): nodes of one colour share no edge and are visited together, in a handful
of array operations. Models take 5 to 20 colours; a bound rises in a sweep over them about as much as in one over the
program's order, at a tenth of the time.

A transfer with several consumers is split between them (`solver.sharing`); what a consumer's part has left over after a
sweep is divided again.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.solver.decoding import Decoder
from alpa_lite.passes.sharding.solver.problem import Problem
from alpa_lite.passes.sharding.solver.ragged import ranges, reduced, summed
from alpa_lite.passes.sharding.solver.sharing import Sharing
from alpa_lite.passes.sharding.solver.wiring import Step, Wiring


class Ascent:
    """Messages that make a lower bound of a problem, improved by `sweep`.

    Every class of the problem must be in use, and every strategy have an allowed partner: see `restrict.consistent`.

    Attributes:
      bound: seconds, valid for every choice.
    """

    def __init__(self, problem: Problem, messages: np.ndarray | None = None) -> None:
        """Args: messages: where to begin, as of `messages` for a problem of the same structure."""
        self.wiring, self.sharing = problem.links.prepared(Wiring), problem.links.prepared(Sharing)
        self._messages = np.zeros(self.wiring.count)
        self._room = np.empty(max((len(step.other) for step in self.wiring.steps), default=0))
        if messages is not None:
            self._messages = messages[self.wiring.canonical]
        self.reprice(problem)

    @property
    def messages(self) -> np.ndarray:
        """For each consumer the messages of its edge's rows, then of its columns."""
        links = self.wiring.links
        out = np.zeros(int((links.rows + links.columns)[links.edge].sum()))
        out[self.wiring.canonical] = self._messages
        return out

    def reprice(self, problem: Problem) -> None:
        """Begin the bound again for a problem that differs in costs alone, with the messages as they are."""
        self.problem, self.bound = problem, -np.inf
        wiring, links, sharing = self.wiring, problem.links, self.sharing
        self._cost = problem.cost[wiring.strategy]
        self._cells = problem.cells[wiring.cell_from]
        alone = np.flatnonzero(links.own & (links.counts[links.edge] == 1))
        size = links.sizes[links.node[alone]]
        e, row = np.repeat(links.edge[alone], size), links.source[ranges(links.source_at[links.edge[alone]], size)]
        entry = ranges(links.klass_at[alone], size)
        paid = problem.cells[links.cell[e] + row * links.columns[e] + links.klass[entry]]
        self._cost += summed(wiring.place[links.klass_strategy[entry]], paid, len(self._cost))
        self._paid = np.zeros(len(sharing.loop_strategy))
        self._shared = problem.cells[sharing.cells]
        self._share()

    def sweep(self, times: int) -> None:
        """Pass the messages forward and backward some number of times."""
        steps = self.wiring.steps
        for _ in range(times):
            for step in steps:
                self._visit(step, step.forward)
            for step in reversed(steps):
                self._visit(step, step.backward)
            self._share()
        self.bound = max(self.bound, self._bound())

    def _visit(self, step: Step, shares: np.ndarray) -> None:
        """Collect what the edges of a colour's nodes hold, and hand it on to those that lead on."""
        potential = self._cost[step.strategies]
        if not len(step.entries):
            return
        found = self._collected(step, self._messages)
        potential = potential + summed(step.entries, found[step.entry_message - step.messages.start], len(potential))
        least = np.minimum.reduceat(potential[step.entries], step.entry_at)
        self._messages[step.messages] = found - shares * least

    def _collected(self, step: Step, taken: np.ndarray) -> np.ndarray:
        """[messages of a colour] the least of each row of cells, less what is taken from the other end."""
        count = step.messages.stop - step.messages.start
        return self.wiring.collected(step, count, self._cells, taken, self._room)

    def _potentials(self) -> np.ndarray:
        """[strategies, by colour] seconds of each strategy with what was moved to it."""
        potential = self._cost.copy()
        for step in self.wiring.steps:
            given = self._messages[step.entry_message]
            potential[step.strategies] += summed(step.entries, given, step.strategies.stop - step.strategies.start)
        return potential

    def _spare(self) -> np.ndarray:
        """[strategies, by colour] how far each is above the best of its node."""
        potential = self._potentials()
        first = self.wiring.first
        return potential - np.repeat(reduced(np.minimum, potential, first), np.diff(first))

    def _rest(self) -> np.ndarray:
        """[halves] the least that each part holds still, as seen from the half."""
        out = np.zeros(len(self.wiring.high))
        for step in self.wiring.steps:
            if len(step.halves):
                rest = self._collected(step, self._messages) - self._messages[step.messages]
                out[step.halves] = np.minimum.reduceat(rest, step.half_at)
        return out

    def _bound(self) -> float:
        total = float(reduced(np.minimum, self._potentials(), self.wiring.first).sum())
        return total + float(self._rest()[: len(self.wiring.part)].sum())

    def _share(self) -> None:
        """Divide the shared transfers among their consumers again."""
        sharing = self.sharing
        if not len(sharing.cells):
            return
        spare = self._spare() if len(sharing.loop_strategy) else self._cost
        parts, loops = sharing.divide(self._shared, self._messages, spare, self._paid)
        self._cells[sharing.kept] = np.concatenate([parts, parts])
        self._cost += summed(sharing.loop_strategy, loops - self._paid, len(self._cost))
        self._paid = loops

    def choice(self, backward: bool = False) -> np.ndarray:
        """A choice that the messages suggest: node by node in the order of the program, or from its end."""
        return self.problem.links.prepared(Decoder).choice(self._cost, self._cells, self._messages.copy(), backward)

    def slack(self) -> tuple[np.ndarray, np.ndarray]:
        """How far above the bound a choice must be that takes a strategy, or a cell of an edge with one consumer.

        Returns:
          [strategies] and [cells], zero for other edges. The seconds of a choice are at least `bound` plus each of its
          slacks.
        """
        wiring, links = self.wiring, self.problem.links
        spare, rest = self._spare(), self._rest()
        slack = spare.copy()
        least, given = np.zeros(wiring.count), np.zeros(wiring.count)
        ends = wiring.node.reshape(2, -1)
        _, pair, times = np.unique(ends.min(0) * links.nodes + ends.max(0), return_inverse=True, return_counts=True)
        share = np.tile(times[pair], 2)  # a neighbour's own slack counts once, however many parts lead to it
        for step in wiring.steps:
            if len(step.entries):
                own = spare[step.strategies][step.entries]
                least[step.messages] = np.minimum.reduceat(own, step.entry_at)
                over = np.repeat(share[step.halves], wiring.high[step.halves])
                given[step.messages] = self._messages[step.messages] - least[step.messages] / over
        for step in wiring.steps:
            if len(step.entries):
                held = np.repeat(rest[step.halves], wiring.high[step.halves])
                above = self._collected(step, given) - self._messages[step.messages] - held
                slack[step.strategies] += summed(
                    step.entries,
                    above[step.entry_message - step.messages.start],
                    step.strategies.stop - step.strategies.start,
                )
        out = np.empty(len(slack))
        out[wiring.strategy] = slack
        return out, self._above(rest, least)

    def _above(self, rest: np.ndarray, least: np.ndarray) -> np.ndarray:
        """[cells] the slack of each cell of an edge with one consumer; zero elsewhere."""
        wiring, links = self.wiring, self.problem.links
        out = np.zeros(len(self.problem.cells))
        parts = len(wiring.part)
        mine = self._messages - least
        alone = np.flatnonzero(links.counts[links.edge[wiring.part]] == 1)
        edge, high, wide = links.edge[wiring.part[alone]], wiring.high[alone], wiring.high[alone + parts]
        width = np.repeat(wide, high)
        row = np.repeat(ranges(wiring.message_at[alone], high), width)
        column = ranges(np.repeat(wiring.message_at[alone + parts], high), width)
        cells = ranges(links.cell[edge], high * wide)
        out[cells] = self.problem.cells[cells] - mine[row] - mine[column] - np.repeat(rest[alone], high * wide)
        return out
