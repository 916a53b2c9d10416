"""Plans that need no solving: given ones, those of the cache, and those that another process made.

The step is divided as the plan says, and each stage takes its decisions (`passes.plans.replay`).
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.compilation import plan_cache
from alpa_lite.compilation.division import cut_as_plan, divide_as_plan, replay_decisions, write_program
from alpa_lite.compilation.partition_by_placement import replay_partition
from alpa_lite.compilation.plan_cache import PlanCache
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.options import Options
from alpa_lite.passes import programs
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict, donating
from alpa_lite.passes.search.configs import Analyses, ExecutionConfig
from alpa_lite.passes.stages import planning, stage_graph
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.plan.plan import Plan
from alpa_lite.report import units


def replay_plan(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> Staged:
    """A given plan: the step divided as it says, and each stage with its decisions, without solving.

    Raises:
      PlanError: the plan is for other arguments, devices or another program; says what differs.
    """
    replay.check_devices(plan, request.cluster)
    verdict = Verdict("step", "replayed", plan.step_seconds, plan.step_seconds)
    if not plan.pipelined:
        (remat,) = replay.remat_of(plan)
        loop, _ = Analyses(run, step, request).loop_of(ExecutionConfig(plan.num_microbatches, remat))
        graph, communication = stage_graph.whole(loop.traced, loop.scan), request.options.communication
        decided = run("sharding", replay.replay, graph, request.cluster, plan.stages[0], communication)
        verdict = replace(verdict, candidates=decided.found.candidates)
        planned = run("lowering", planning.lowered_whole, decided, communication)
        return run("programs", programs.single, loop, planned, verdict, str(remat))
    if plan.division.owned:
        return replay_partition(run, step, request, plan)
    division = divide_as_plan(run, *cut_as_plan(run, step, request, plan, plan.num_microbatches), plan)
    return write_program(run, request, division, replay_decisions(run, request, division, plan), verdict)


def load_cached_plan(run: Passes, step: Step, request: PlanRequest, cache: PlanCache) -> tuple[Plan, Staged] | None:
    """A plan of the cache and the step in the stages that it says; None if there is none that can be used."""
    plan = cache.load()
    if plan is None:
        return None
    try:
        return plan, rebuild_stages(run, step, request, plan, request.budget)
    except AlpaLiteError as error:
        cache.refuse(str(error))
        return None


def rebuild_stages(run: Passes, step: Step, request: PlanRequest, plan: Plan, budget: float) -> Staged:
    """The step in the stages that a plan of the same step says, which came from the cache or from another process.

    Raises:
      PlanError: it takes other seconds or bytes than the plan says, or more bytes than `budget`.
    """
    staged = add_donation(replay_plan(run, step, request, plan), step, request)
    plan_cache.check_same(plan, staged, budget)
    return staged


def add_donation(staged: Staged, step: Step, request: PlanRequest) -> Staged:
    """Returns the step with the user's named leaves donated; unchanged where the option is "auto"."""
    named = request.options.donate
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
