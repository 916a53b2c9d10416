"""Textbook plans: `Auto` and `Sharded` are never slower than any of them, to 1 in 10,000 (`search.CLOSED`).

Their operations are fixed (`sharding.textbook`), so that each is one integer program of few choices on the mesh of one
axis, solved in tenths of a second; and they share the analysis of the step with the search that follows. They are
evaluated whatever the time, since a plan is only known to be no slower than theirs if theirs are known, or bounded.

Before anything is searched, methods are evaluated until one fits, with one micro-batch or the given number: there is
something to return, and to undercut. The others are looked at when the search is over, where their bound is below all
that was found by then. So are more micro-batches, which a method chooses as it does by itself (`ways.begun`): they are
another step, whose analysis takes as long again. What cannot undercut the best plan known is left out:

- where the state in the blocks of the method exceeds the memory, no plan of it fits;
- where an equal part of all that lives does, none of any method fits, and no program is built unless more micro-batches
  may fit: its bound is one of theirs, too;
- where the examples of a micro-batch do not divide over the devices, nor do those of more micro-batches: such ways are
  refused by the examples of the whole batch, before the step is cut so;
- T(more micro-batches) >= F(less), the seconds without a budget (`programs.ways`);
- T >= the bound of the program with all choices on the same mesh, where that was searched: it has every plan of most
  methods (`search.is_within`), and is taken to be a little less of others (`TIED`);
- ZeRO-1 is ZeRO-2 where no loop adds up gradients, and is not evaluated again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alpa_lite.analysed import Analyse, Analysed
from alpa_lite.asked import Asked, Step
from alpa_lite.errors import MicrobatchError, OptionError
from alpa_lite.methods import Auto, DataParallel, Sharded, TensorParallel, Zero
from alpa_lite.passes.programs import ways
from alpa_lite.passes.programs.outcomes import Outcome, Way
from alpa_lite.passes.sharding import search
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.lessons import Beaten, Bounds, Lessons
from alpa_lite.passes.sharding.textbook import least_state, may_be_cut
from alpa_lite.runner import Passes

METHODS: Mapping[str, DataParallel | Zero | TensorParallel] = {
    "Zero(2)": Zero(stage=2),
    "DataParallel": DataParallel(),
    "Zero(1)": Zero(stage=1),
    "Zero(3)": Zero(stage=3),
    "TensorParallel": TensorParallel(),
}
"""The methods by their names among the candidates of a plan, those first that are mostly fast."""

TIED = 0.01
"""By what part a method may undercut the bound of the program with all choices, where that has not all of its plans.

That is tensor parallelism, which may leave axes idle, and methods that tell tied groups apart (`search.is_within`);
none did so on six models from outside.
"""

EACH = 8.0
"""Seconds that solving one program of a method may take; they take tenths."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A method that is not evaluated yet.

    Attributes:
      way: its first.
      is_within: whether the program with all choices has its plans; raises OptionError if it cannot be applied.
      begin: evaluates its first way, which is to take less than so many seconds. Raises as `ways.begun`, and
        OptionError.
    """

    way: Way
    is_within: Callable[[], bool]
    begin: Callable[[float], ways.Begun[search.Found]]

    def may_undercut(self, seconds: float, others: Callable[[Way], Bounds]) -> bool:
        """Whether a plan of some way may take less, by what no plan of its mesh undercuts. More only adds seconds."""
        bound = max((bound for mesh, bound in others(self.way).items() if len(mesh.shape) == 1), default=0.0)
        return (1 - TIED) * bound < seconds and (bound < seconds or not self.is_within())


@dataclass(frozen=True, eq=False)
class TextbookPlans:
    """What was evaluated.

    Attributes:
      plans: those that fit, with the names of their methods, by their ways.
      best: the way of the fastest; None if none fits.
      left: the methods of which further ways may be tried.
      waiting: those of which none was tried.
    """

    plans: Mapping[Way, tuple[search.Plain, ...]]
    best: Way | None
    left: tuple[ways.Begun[search.Found], ...]
    waiting: tuple[Waiting, ...] = ()

    def below(self, seconds: float, others: Callable[[Way], Bounds]) -> TextbookPlans | None:
        """All ways that may take less than so many seconds evaluated; None if none takes less.

        Args:
          others: what no plan of a way undercuts, by mesh, with the operations of any method.
        """
        best: Way | None = None
        seconds *= 1 - search.CLOSED
        left = list(self.left)
        for method in self.waiting:
            try:
                if not method.may_undercut(seconds, others):
                    continue
                begun = method.begin(seconds)
            except (MicrobatchError, OptionError):
                continue
            left.append(begun)
            if begun.found is not None and begun.found[1].seconds < seconds:
                best, seconds = begun.found[0], begun.found[1].seconds

        def loosely(way: Way) -> Bounds:
            return {mesh: (1 - TIED) * bound for mesh, bound in others(way).items()}

        for method in sorted(left, key=lambda method: method.free):
            if method.free >= seconds:
                continue
            try:
                found = method.rest(seconds, loosely)
            except OptionError:  # a micro-batch does not divide
                continue
            if found is not None and found[1].seconds < seconds:
                best, seconds = found[0], found[1].seconds
        return None if best is None else TextbookPlans(self.plans, best, ())


def applies(asked: Asked) -> bool:
    """Whether the method admits all textbook plans, and the user says nothing that they do not heed."""
    said = asked.pins or asked.wishes.leaves or asked.wishes.forbidden or asked.wishes.mesh
    return not said and asked.method in (Auto(), Sharded()) and asked.cluster.num_devices > 1


def evaluated(run: Passes, step: Step, asked: Asked, analyse: Analyse) -> TextbookPlans:
    """The plan of the first method that fits in its first way; the others wait.

    Where communication hides behind computing, bounds of a search are none of all plans, and no method waits.
    """
    plans: dict[Way, tuple[search.Plain, ...]] = {}
    known: dict[tuple[Way, Any, float], search.Restricted] = {}
    best: tuple[float, Way] | None = None
    left: list[ways.Begun[search.Found]] = []
    waiting: list[Waiting] = []
    for number, (name, method) in enumerate(METHODS.items()):
        run.count("textbook methods evaluated", number, len(METHODS))
        floor = least_state(step.traced, method, asked.cluster.num_devices)
        if floor > asked.budget:
            continue
        begin = functools.partial(_begun, run, asked, analyse, plans, known, name, method, floor)
        if best is not None and not asked.cluster.overlaps:
            way = Way(asked.num_microbatches or 1)
            waiting.append(Waiting(way, functools.partial(_is_within, asked, analyse, way, method), begin))
            continue
        try:
            begun = begin(math.inf if best is None else best[0])
        except (MicrobatchError, OptionError):  # the batch, or a micro-batch, does not divide
            continue
        left.append(begun)
        if begun.found is not None and (best is None or begun.found[1].seconds < best[0]):
            best = begun.found[1].seconds, begun.found[0]
    return TextbookPlans(plans, None if best is None else best[1], tuple(left), tuple(waiting))


def _begun(
    run: Passes, asked: Asked, analyse: Analyse, plans: dict[Way, tuple[search.Plain, ...]],
    known: dict[tuple[Way, Any, float], search.Restricted], name: str, method: DataParallel | Zero | TensorParallel,
    floor: float, below: float,
) -> ways.Begun[search.Found]:  # fmt: skip
    """The first way of a method, and what is left."""
    solve = functools.partial(_solved, run, asked, analyse, plans, known, below, name, method)
    return ways.begun(solve, asked.num_microbatches, floor=floor, budget=asked.budget)


def _is_within(
    asked: Asked, analyse: Analyse, way: Way, method: DataParallel | Zero | TensorParallel
) -> bool:  # fmt: skip
    """Whether the program with all choices of a way has the plans of a method."""
    about = analyse(way)
    return search.is_within(about.loop.traced, about.groups, asked.cluster, method, about.shared)


def _solved(
    run: Passes, asked: Asked, analyse: Analyse, plans: dict[Way, tuple[search.Plain, ...]],
    known: dict[tuple[Way, Any, float], search.Restricted], below: float, name: str,
    method: DataParallel | Zero | TensorParallel, way: Way, cutoff: float, lessons: Lessons, deadline: Deadline,
) -> Outcome[search.Found]:  # fmt: skip
    """The best plan of a method in a way, which is added to `plans`. Raises as `outcomes.Solve`."""
    del lessons, deadline  # of one mesh, and whatever the time
    if not isinstance(method, TensorParallel) and asked.num_microbatches is None and way.count > 1:
        whole = analyse(Way()).shared.facts
        if not may_be_cut(whole, way.count * asked.cluster.num_devices):
            raise MicrobatchError(f"{way} have too few examples for {asked.cluster.num_devices} devices")
    for (less, same, _), one in known.items():
        if same == method and less.count < way.count and not one.may_undercut(cutoff):
            raise Beaten(one.bounds)
    about, named = analyse(way), method
    if method == Zero(stage=1) and not _adds_up(about):
        method = Zero(stage=2)
    settled, key = about.settled(asked.cluster), (way, method, cutoff)
    if key not in known:
        known[key] = search.Restricted(
            about.loop.traced, about.groups, about.rules, asked.cluster, method, budget=asked.budget,
            shared=about.shared, time_limit=min(EACH, asked.options.solver_time_limit), cutoff=cutoff, settled=settled,
        )  # fmt: skip
    known[way, named, cutoff] = known[key]  # so that it bounds further ways of the method that was named
    found = run("sharding", known[key].found, below)
    plans[way] = (*plans.get(way, ()), (name, found))
    return Outcome(found, settled(found), found.free, 0, found.mesh, found.bounds)


def _adds_up(about: Analysed) -> bool:
    """Whether a loop adds anything up."""
    return any(group.kind == "linear" and group.trips > 1 for group in about.groups.groups)
