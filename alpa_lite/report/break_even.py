"""The cost of another choice, and the changes that would make it win.

For every alternative the plan holds a whole step in which it is forced and the others adapt (`decisions.Outcome`). Of
its T seconds, V are spent waiting for links, G grow with the batch. With links x times as fast, and the batch b times
as large, this step takes

    T(x) = T - V + V / x          T(b) = T - G + b G

and so does the plan with its own T, V and G. Where the two lines cross, the alternative begins to beat the plan:

    x = (V_a - V_c) / ((T_c - V_c) - (T_a - V_a))          b = ((T_a - G_a) - (T_c - G_c)) / (G_c - G_a)

These are predictions to first order: neither step adapts further on the way, and a third may win before.
"""

from __future__ import annotations

from alpa_lite.plan.decisions import Alternative, Outcome
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.plan.records import Stage
from alpa_lite.report import prose

_SAME = 1e-6  # share of the step by which two plans may differ and count as equally fast
_REACH = 1e3  # factors of link speed and batch beyond which nobody can go


def verdict(plan: Plan, stage: Stage, examples: int | None, other: Alternative, chosen: Alternative) -> str:
    """Says in a sentence how much worse `other` is, and under which conditions it would beat the plan.

    Args:
      plan, stage: whose decision it is.
      examples: in the batch, if that is known.
      other, chosen: alternatives of one decision.
    """
    whole, delta = stage.solver.objective, other.step.seconds - chosen.step.seconds
    compute = other.step.compute_seconds - chosen.step.compute_seconds
    causes = [("compute", compute), ("communication", delta - compute)]
    slower, least = delta > _SAME * whole, other.bound_seconds - chosen.step.seconds
    low, high = other.step.bytes_per_device, chosen.step.bytes_per_device
    best = (chosen.roomy or chosen.step).seconds  # with more memory the chosen strategy, too, may be in a faster plan
    less = 0.0 if other.roomy is None else best - other.roomy.seconds
    found = {
        "delta": delta, "share": _share(delta, whole), "equal": abs(delta) <= _SAME * whole, "slower": slower,
        "gap": whole - stage.solver.bound, "compute": compute, "sent": other.step.bytes_sent - chosen.step.bytes_sent,
        "causes": [(name, value) for name, value in causes if abs(value) > 0.01 * delta],
        "least": least if _SAME * whole < least < 0.9 * delta else 0.0,
        "roomy_delta": other.step.seconds - best, "links": _links(other.step, chosen.step) if slower else 0.0,
        "batch": _batch(other.step, chosen.step) if slower else 0.0, "examples": examples,
        "between": (low, high) if low < 0.999 * high else None, "less": less if less > best * _SAME else 0.0,
    }  # fmt: skip
    return prose.sentence("verdict", plan, other, found)


def _share(part: float, whole: float) -> str:
    """Returns a small share of the step in percent, with two digits."""
    share = 100 * part / whole if whole > 0 else 0.0
    return "under 0.01 %" if share < 0.01 else f"{share:.2g} %" if share < 100 else f"{share:,.0f} %"


def _links(other: Outcome, chosen: Outcome) -> float:
    """Returns the link speed from which, or below which, `other` is faster; 0 if that is out of reach."""
    spent = [step.communication_seconds - step.latency_seconds for step in (other, chosen)]
    return _ratio(spent[0] - spent[1], (chosen.seconds - spent[1]) - (other.seconds - spent[0]))


def _batch(other: Outcome, chosen: Outcome) -> float:
    """Returns the batch from which, or below which, `other` is faster; 0 if that is out of reach."""
    fixed = [step.seconds - step.batch_seconds for step in (other, chosen)]
    return _ratio(fixed[0] - fixed[1], chosen.batch_seconds - other.batch_seconds)


def _ratio(above: float, below: float) -> float:
    """Returns above / below if the lines cross within a factor of a thousand of the present value; 0 otherwise."""
    return above / below if below and 1 / _REACH <= above / below <= _REACH else 0.0
