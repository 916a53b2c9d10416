"""Textbook plans, before anything is searched: `Auto` and `Sharded` are never slower than any of them.

Their operations are fixed (`sharding.textbook`), so that each is one integer program of few choices on the mesh of one
axis, solved in tenths of a second; and they share the analysis of the step with the search that follows. They are
evaluated whatever the time: what they take is a part of what analysing the step takes, and a plan is only known to be
no slower than theirs if theirs are known.

A method chooses its number of micro-batches as it does by itself (`ways.quickest`), but what cannot undercut the best
plan of the methods before it is left out:

- where the state in the blocks of the method exceeds the memory, no plan of it fits;
- T(more micro-batches) >= F(less), the seconds without a budget (`programs.ways`);
- ZeRO-1 is ZeRO-2 where no loop adds up gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.analysed import Analyse, Analysed
from alpa_lite.asked import Asked, Step
from alpa_lite.errors import MicrobatchError, OptionError
from alpa_lite.methods import Auto, DataParallel, Sharded, TensorParallel, Zero
from alpa_lite.passes.programs import ways
from alpa_lite.passes.programs.ways import Outcome, Way
from alpa_lite.passes.sharding import search
from alpa_lite.passes.sharding.lessons import Lessons
from alpa_lite.passes.sharding.textbook import least_state
from alpa_lite.runner import Passes

METHODS: Mapping[str, DataParallel | Zero | TensorParallel] = {
    "Zero(2)": Zero(stage=2),
    "DataParallel": DataParallel(),
    "Zero(1)": Zero(stage=1),
    "Zero(3)": Zero(stage=3),
    "TensorParallel": TensorParallel(),
}
"""The methods by their names among the candidates of a plan, those first that are mostly fast."""

EACH = 8.0
"""Seconds that solving one program of a method may take; they take tenths."""


@dataclass(frozen=True, eq=False)
class TextbookPlans:
    """What was evaluated.

    Attributes:
      plans: those that fit, with the names of their methods, by their ways.
      best: the way of the fastest.
    """

    plans: Mapping[Way, tuple[search.Plain, ...]]
    best: Way


def applies(asked: Asked) -> bool:
    """Whether the method admits all textbook plans, and the user says nothing that they do not heed."""
    said = asked.pins or asked.wishes.leaves or asked.wishes.forbidden or asked.wishes.mesh
    return not said and asked.method in (Auto(), Sharded()) and asked.cluster.num_devices > 1


def evaluated(run: Passes, step: Step, asked: Asked, analyse: Analyse) -> TextbookPlans | None:
    """The plans of all methods; None if none fits, or none can be applied."""
    plans: dict[Way, tuple[search.Plain, ...]] = {}
    best: tuple[float, Way] | None = None
    for number, (name, method) in enumerate(METHODS.items()):
        run.count("textbook methods evaluated", number, len(METHODS))
        floor = least_state(step.traced, method, asked.cluster.num_devices)
        if floor > asked.budget:
            continue
        below = math.inf if best is None else best[0]
        solve = functools.partial(_solved, run, asked, analyse, plans, below, name, method)
        try:
            known = ways.quickest(solve, asked.num_microbatches, floor=floor, budget=asked.budget, below=below)
        except (MicrobatchError, OptionError):  # the batch, or a micro-batch, does not divide
            continue
        if known is not None and known[1].seconds < below:
            best = known[1].seconds, known[0]
    return None if best is None else TextbookPlans(plans, best[1])


def _solved(
    run: Passes, asked: Asked, analyse: Analyse, plans: dict[Way, tuple[search.Plain, ...]], below: float, name: str,
    method: DataParallel | Zero | TensorParallel, way: Way, cutoff: float, lessons: Lessons,
) -> Outcome[search.Found]:  # fmt: skip
    """The best plan of a method in a way, which is added to `plans`. Raises as `ways.Solve`."""
    del lessons  # of one mesh
    about = analyse(way)
    if method == Zero(stage=1) and not _adds_up(about):
        method = Zero(stage=2)
    settled = about.settled(asked.cluster)
    found = run(
        "sharding", search.restricted, about.loop.traced, about.groups, about.rules, asked.cluster, method,
        budget=asked.budget, shared=about.shared, time_limit=min(EACH, asked.options.solver_time_limit), cutoff=cutoff,
        below=below, settled=settled,
    )  # fmt: skip
    plans[way] = (*plans.get(way, ()), (name, found))
    return Outcome(found, settled(found), found.free, 0, found.mesh, found.bounds)


def _adds_up(about: Analysed) -> bool:
    """Whether a loop adds anything up."""
    return any(group.kind == "linear" and group.trips > 1 for group in about.groups.groups)
