"""Plans that need no solving: given ones, those of the cache, and those that another process made.

The step is divided as the plan says, and each stage takes its decisions (`passes.plans.replay`).
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.compilation import kept, owned, plan_cache
from alpa_lite.compilation.asked import PlanRequest, Step
from alpa_lite.compilation.plan_cache import PlanCache
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.options import Options
from alpa_lite.passes import microbatches, programs
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict, donating
from alpa_lite.passes.search.configs import Analyses, ExecutionConfig
from alpa_lite.passes.stages import planning, stage_graph
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.plan.plan import Plan
from alpa_lite.report import units


def replay_plan(run: Passes, step: Step, asked: PlanRequest, plan: Plan) -> Staged:
    """A given plan: the step divided as it says, and each stage with its decisions, without solving.

    Raises:
      PlanError: the plan is for other arguments, devices or another program; says what differs.
    """
    replay.check_devices(plan, asked.cluster)
    verdict = Verdict("step", "replayed", plan.step_seconds, plan.step_seconds)
    if not plan.pipelined:
        (remat,) = replay.remat_of(plan)
        loop, _ = Analyses(run, step, asked).loop_of(ExecutionConfig(plan.num_microbatches, remat))
        graph, communication = stage_graph.whole(loop.traced, loop.scan), asked.options.communication
        decided = run("sharding", replay.replay, graph, asked.cluster, plan.stages[0], communication)
        verdict = replace(verdict, candidates=decided.found.candidates)
        planned = run("lowering", planning.lowered_whole, decided, communication)
        return run("programs", programs.single, loop, planned, verdict, str(remat))
    if plan.division.owned:
        return owned.replayed(run, step, asked, plan)
    count = plan.num_microbatches
    loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **asked.inexact)
    loop, graphs = kept.cut_as(run, loop, plan)
    schedule = kept.schedule_as(plan, count)
    stages = owned.replayed_stages(run, asked, plan, graphs, split_weights=schedule.splits_backward)
    return kept.program_as(run, loop, stages, schedule, asked, plan, verdict)


def load_cached_plan(run: Passes, step: Step, asked: PlanRequest, cache: PlanCache) -> tuple[Plan, Staged] | None:
    """A plan of the cache and the step in the stages that it says; None if there is none that can be used."""
    plan = cache.load()
    if plan is None:
        return None
    try:
        return plan, rebuild_stages(run, step, asked, plan, asked.budget)
    except AlpaLiteError as error:
        cache.refuse(str(error))
        return None


def rebuild_stages(run: Passes, step: Step, asked: PlanRequest, plan: Plan, budget: float) -> Staged:
    """The step in the stages that a plan of the same step says, which came from the cache or from another process.

    Raises:
      PlanError: it takes other seconds or bytes than the plan says, or more bytes than `budget`.
    """
    staged = add_donation(replay_plan(run, step, asked, plan), step, asked)
    plan_cache.check_same(plan, staged, budget)
    return staged


def add_donation(staged: Staged, step: Step, asked: PlanRequest) -> Staged:
    """Returns the step with the user's named leaves donated; unchanged where the option is "auto"."""
    named = asked.options.donate
    return staged if named == "auto" else donating(staged, donated_leaves(step.traced, named))


def check_memory(plan: Plan, options: Options) -> None:
    """Raises InfeasibleError if a given plan needs more than the given memory."""
    needed = max(stage.memory.total for stage in plan.stages)
    if options.plan is not None and options.memory_per_device is not None and needed > options.memory_per_device:
        raise InfeasibleError(
            f"the given plan needs {units.exact_bytes(needed)} per device, more than memory_per_device="
            f"{units.exact_bytes(options.memory_per_device)}; leave that out, or plan again without plan=",
            needed,
        )
