"""The unit of work of the solver, and the limits of its calls in it.

One unit is one cell of a cost matrix visited by message passing. The other steps are converted by constants. They need
not be accurate: they move the point at which a call ends, and never the order of what is tried. A call tries the same
steps in the same order under every limit, so that more work never gives a worse choice or a weaker bound.
"""

from __future__ import annotations

from alpa_lite.passes.sharding.solver.links import Links

SOLVE_WORK = 4_000_000_000
"""The most work of one call of the solver: some ten seconds, at 0.3 to 0.5 units a nanosecond of a core at 2.5 GHz."""

# Ratios of CPU seconds to those of a cell, in strategy graphs of a transformer of 7 billion parameters, whole and by
# layers: 13 thousand to 1.5 million cells.

DESCENT_ENTRY_WORK = 30
"""Work of coordinate descent, for each strategy of each end of an edge: 20 to 60."""

DECODED_NODE_WORK = 400
"""Work of choosing one node's strategy from the messages, in addition to visiting its cells."""

SIMPLEX_ENTRY_WORK = 1
"""Work of an iteration of the simplex method, for each nonzero of the program."""

BUILT_ENTRY_WORK = 20
"""Work of building a linear program, for each of its variables."""

INTEGER_WORK = 100
"""How many times the work of its first relaxation an integer program takes, its cuts and heuristics: 10 to 1000."""

LARGEST_LINEAR = 30_000
"""Costs beyond which a problem is not solved as a linear program, whose work is not limited: a second or two here."""

LARGEST_INTEGER = 3_000
"""The same for integer programs: some ten seconds, where graphs are random."""

BRANCH_NODES = 500
"""Nodes of a branch and bound."""

NODE_ITERATIONS = 50
"""Iterations of the simplex method that a node counts as."""


class WorkExhausted(Exception):
    """The next step exceeds the work that a call may take."""


def sweep_work(links: Links) -> int:
    """Returns cells visited by a sweep, which visits each part of an edge from both ends, forward and backward."""
    return 4 * int(links.shape.prod(1)[links.edge[links.edges :][~links.own]].sum())


def choice_work(links: Links) -> int:
    """Work of a choice that messages suggest, and of the descent from it."""
    return sweep_work(links) // 2 + DECODED_NODE_WORK * links.nodes + DESCENT_ENTRY_WORK * len(links.classes)
