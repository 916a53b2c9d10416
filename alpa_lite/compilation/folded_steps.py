"""Folded steps: which steps are planned with a few copies of their repeated layers, and the whole step afterwards.

Step ──fold──▶ Step with the folded one ──▶ Plan ──unfold, on the first call──▶ Staged, verified again
"""

from __future__ import annotations

import math
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.compilation import known_division
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes, passes
from alpa_lite.passes import checks
from alpa_lite.passes.ir.folding import add_folded
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import Plan

MIN_OPERATIONS = 1000
"""Operations of the shortest step that is folded: a choice, since shorter ones have few layers to leave out."""


def fold_step(run: Passes, step: Step, request: PlanRequest) -> Step:
    """Returns a step with the folded one that is planned in its place, if it may be.

    That is a long step of which no argument is constrained, where communication does not overlap.
    """
    wishes, options = request.wishes, request.options
    said = request.pins or wishes.leaves or wishes.forbidden or wishes.mesh or request.like is not None
    whole = said or request.cluster.has_overlap or options.plan is not None or options.communication != "explicit"
    if whole or len(step.traced.graph.block.ops) < MIN_OPERATIONS:
        return step
    return replace(step, traced=run("folding", add_folded, step.traced))


def unfold(name: str, step: Step, request: PlanRequest, plan: Plan, staged: Staged) -> Staged:
    """Returns the whole step in the stages of its plan, verified again if it was planned folded.

    Args:
      step: the whole one.
      staged: the step in its stages, as it was planned.

    Raises:
      PlanError: the whole step does not take the seconds and bytes of the folded one.
      VerificationError: the partitioner does not do what the plan says.
    """
    if staged.traced.copies is None:
        return staged
    with _jax.clear_mesh_context(), passes(name, None) as run:
        whole = known_division.rebuild_stages(run, step, request, plan, math.inf)
        if request.options.verify != "off":
            run("checks", checks.verify_partitioning, plan, whole)
        return whole
