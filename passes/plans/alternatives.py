"""Alternatives of each decision, weighed against the choice: the cost of the whole step with another strategy.

For strategy s of node i let best(i, s) be the seconds of the best plan that takes s. Solving again for each would cost
hundreds of integer programs. Two numbers enclose it instead, and where they meet both are best(i, s):

  from below   message passing (`sharding.solver.messages`) gives a bound for all choices, and for each strategy how far
               above the bound a choice must be that takes it (a lower min-marginal);
  from above   a plan that takes s: coordinate descent (`sharding.solver.problem`) from the chosen plan with node i
               fixed at s.

Both are for the tied operations of a node together. A budget that binds is respected through a price of memory
(`sharding.solver.memory`): bounds and descent are those of the priced problem, and a plan counts as fitting only if its
bytes, summed again, do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding.solver.links import split
from alpa_lite.passes.sharding.solver.memory import MemoryDual
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Problem, descend, forget_memory, price_memory
from alpa_lite.passes.sharding.solver.restrict import Contradiction, make_consistent

SWEEPS = 4
"""Message passing sweeps: bounds of whole models are then within about one part in 1e3 of the optimum."""
_STEPS = 6  # prices of memory tried where the budget binds
_BINDING = 1e-3  # share of the objective by which a choice must exceed the bound without memory for a price to be tried
_RAISES = 3  # times that the price of memory is doubled for a plan that does not fit
_VISITS = 300  # of nodes in one descent


@dataclass(frozen=True, eq=False)
class ForcedStrategy:
    """One strategy, forced upon one node.

    Attributes:
      strategy: its number.
      bound: seconds that no choice with it undercuts, within the budget.
      fitting_choice: the best choice found with it that fits the budget; None if none was found.
      fastest_choice: the fastest choice found with it, were memory unlimited.
    """

    strategy: int
    bound: float
    fitting_choice: np.ndarray | None
    fastest_choice: np.ndarray


def weigh(problem: Problem, choice: Sequence[int], kept: Sequence[int]) -> list[tuple[ForcedStrategy, ...]]:
    """Returns the chosen strategy of each node of a problem, and then the best others, by bound.

    Strategies that nothing allows, and those with which descent finds no allowed plan, are left out.

    Args:
      problem: with its budget, if there is one.
      choice: the strategy of each node; allowed, and taken to be good.
      kept: for each node, how many other strategies to weigh.
    """
    chosen = np.array(choice, dtype=np.int64)
    objective, free = problem.seconds(chosen), forget_memory(problem)
    bound, bounds = _bounds(free)
    bounds = [np.maximum(b, 0.0) for b in bounds]
    priced: list[Problem] = []
    if problem.budget is not None and problem.fits(chosen) and objective - bound > _BINDING * objective:
        price = _price(problem, chosen)
        if price.any():
            priced = [price_memory(problem, price * 2.0**k) for k in range(_RAISES + 1)]
            _, others = _bounds(priced[0], float(price @ (problem.base - problem.budget)))
            bounds = [np.maximum(a, b) for a, b in zip(bounds, others, strict=True)]
    out = []
    for i, own in enumerate(chosen.tolist()):
        roomy = _answer(free, chosen, i, own) if priced and kept[i] else None  # what it gains itself from more memory
        row = [ForcedStrategy(own, min(float(bounds[i][own]), objective), chosen, chosen if roomy is None else roomy)]
        for s in map(int, np.argsort(bounds[i], kind="stable")) if len(bounds[i]) > 1 else ():
            if len(row) > kept[i] or not math.isfinite(bounds[i][s]):
                break
            if s == own or (fastest := _answer(free, chosen, i, s)) is None:
                continue
            # The fastest plan, or else one at the lowest price of memory that makes it fit.
            plans = itertools.chain([fastest], (_answer(one, chosen, i, s) for one in priced))
            fits = (plan for plan in plans if plan is not None and problem.fits(plan))
            row.append(ForcedStrategy(s, float(bounds[i][s]), next(fits, None), fastest))
        out.append(tuple(row))
    return out


def _answer(problem: Problem, chosen: np.ndarray, node: int, strategy: int) -> np.ndarray | None:
    """Returns a choice where a node takes a strategy and no other gains by moving; None if its cost is infinite."""
    forced = chosen.copy()
    forced[node] = strategy
    after = descend(problem, forced, problem.links.neighbours(node), _VISITS, fixed=node)
    return after if math.isfinite(problem.seconds(after)) else None


def _bounds(problem: Problem, offset: float = 0.0) -> tuple[float, list[np.ndarray]]:
    """Lower bounds by message passing: of all choices, and for each node of those that take a strategy; `inf` if none.

    offset: added to all of them.
    """
    every = np.full(len(problem.cost), np.inf)
    bound = math.inf
    with suppress(Contradiction):
        part = make_consistent(problem)
        ascent = Ascent(part.problem)
        ascent.sweep(SWEEPS)
        bound = ascent.bound + offset
        every[part.strategies] = bound + ascent.slack()[0]
    return bound, split(every, problem.links.first)


def _price(problem: Problem, chosen: np.ndarray) -> np.ndarray:
    """[points] a good price of memory, in seconds per byte."""
    dual = MemoryDual(make_consistent(problem).problem)
    dual.add(problem.seconds(chosen), problem.bytes(chosen))
    for i in range(_STEPS):
        dual.step(SWEEPS if i == 0 else 2)
        if dual.finished:
            break
    return dual.price
