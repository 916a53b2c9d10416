"""From a train step written for one device to what every device does: the whole compiler, in order.

    step ──tracing──▶ graph ──factors──▶ Step
         ──micro-batches──▶ a loop                                                        for one mesh and for pipelines
         ──layers──▶ ──costs──▶ ──slicing──▶ stages                                       for pipelines (`pipelining`)
         ──grouping──▶ ──sharding──▶ ──lowering──▶ PlannedStage                           for each stage
         ──programs──▶ Staged ──plan──▶ Plan ──checks──▶ the plan is true

A pass is a pure function, run by `runner.Passes`, which times it, shows it, dumps its value and, in tests, checks it.
Nothing here touches a device.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite import _jax, collecting, frames, kept, one_mesh, owned, pipelining, plan_cache, replanning, schedules
from alpa_lite.asked import Asked, Step
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError, OptionError, PlanError
from alpa_lite.graph import Traced
from alpa_lite.one_mesh import OneMesh
from alpa_lite.options import Options
from alpa_lite.passes import checks, factors, microbatches, plans, programs, tracing
from alpa_lite.passes.plans import comparing, replay, weighing
from alpa_lite.passes.plans.comparing import beside, does_not_fit
from alpa_lite.passes.programs.outcomes import Way
from alpa_lite.passes.programs.staged import Staged, Verdict, donating, noted
from alpa_lite.passes.sharding import wishes, worth
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime, worthwhile
from alpa_lite.passes.sharding.race import LITTLE
from alpa_lite.passes.stages import Slower, planning, promise, staging
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.passes.tracing.jit_shardings import placed_arguments
from alpa_lite.passes.tracing.manual_regions import check_regions
from alpa_lite.pins import NO_PINS, Pins
from alpa_lite.plan import Plan
from alpa_lite.plan_cache import PlanCache
from alpa_lite.processes import agreement
from alpa_lite.report import sentences, units
from alpa_lite.runner import Passes, passes

logger = logging.getLogger(__name__)

WORTH = 0.9
"""A pipeline is searched if one mesh computes for less than this fraction of its step."""

LEAST_TASKS = 20
"""A pipeline is searched if one mesh spends more on anything but computation than dispatching so many tasks takes.

Two stages and two micro-batches are as many.
"""

PATIENCE = 1.0
"""Seconds that pricing the layers of even a small step takes: what repays less is not searched."""

ONE_MESH = 0.5
"""The part of the time that one mesh has, where pipelines are searched after it: of the time for searching, without
what planning their stages takes; of all of it, where no pipeline is hoped for beside what it finds."""

SHORTENED = 0.25
"""The least part of the time for searching that one mesh has where pipelines have what they take at least: where even
that is too long, none would be found, and one mesh has `ONE_MESH`."""

LONGER = 1 / 6
"""The part of the time for searching in which one mesh that has a plan is searched on, after pipelines.

What that finds it finds soon: with so much of 30 s, on a machine without other work, two models of 7 and 8 billion
parameters and a GPT that memory binds have steps that are 2, 6 and 11 % faster, as with all the time that is left.
Beside other work the 6 % were not found. CLIP was planned in 22 s in place of 28 s, with the same step.
"""

OVERTIME = 0.2
"""By what part of the limit a pipeline that is hoped for may exceed it."""

AFTER = 1.0
"""What follows the search (writing the plan, verifying it), as a multiple of tracing: 0.5 to 1.0 for 14 models from
elsewhere, and 1.6 for one, an encoder and decoder in two stages."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """A planned step: the step in planned stages, with its program, and the plan that says so.

    Attributes:
      source: the step as it was traced, before any pass.
      pins: where its arguments are and stay.
    """

    staged: Staged
    plan: Plan
    source: Traced
    pins: Pins = NO_PINS

    @property
    def traced(self) -> Traced:
        """The step as it runs."""
        return self.staged.traced


@frames.in_one_piece
def compile_step(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, cluster: Cluster,
    pins: Pins = NO_PINS, like: Plan | None = None, why: str = "asked for", shared: bool = False,
) -> Compiled:  # fmt: skip
    """Traces, plans, lowers and verifies a step. Nothing is executed, and no device is touched.

    Args:
      pins: where flat arguments already are and stay; on submeshes, the step is divided by them.
      like: the plan of the same step for other shapes: if it is a pipeline, its division is kept, with the state where
        it has it.
      why: the reason that is logged.
      shared: whether all processes call this, and take the plan of process 0.

    Raises:
      InfeasibleError: no plan fits the memory.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      OptionError, PlanError: the method or the given plan asks for what the cluster or the step does not have.
      VerificationError: the partitioner does not do what the plan says.
    """
    context, name = _jax.context_mesh(), getattr(fun, "__name__", "step")
    cluster = replace(cluster, overlap=cluster.overlap or options.overlap)
    trace = tracer(fun, args, kwargs, options, pins, cluster.platform)
    asked = Asked(options, cluster, trace, pins, like, deadline=Deadline(options.search_time_limit))
    others = agreement.together(name) if shared else agreement.Alone()
    with collecting.seldom(), _jax.without_mesh(), others.told(), passes(name, options.dump_dir) as run:
        traced = run("tracing", asked.trace)
        check_regions(traced.graph, cluster.num_devices)
        said = [] if options.ignore_annotations else tracing.annotated(traced, args, kwargs)
        said = [one for one in said if not (one.array and kept.is_given(asked))]
        placed, on = placed_arguments(traced, args, kwargs, options.in_shardings, cluster.num_devices)
        context = None if options.ignore_annotations else context
        asked = replace(
            asked,
            wishes=wishes.of(traced, asked.method, cluster.num_devices, said, context, options.forbidden, placed, on),
        )
        step = Step(traced, run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values))
        asked = asked.within(asked.deadline.left - AFTER * asked.deadline.spent)
        found: list[str] = []
        plan, staged = others.plan(
            step, asked, lambda: made(run, step, asked, found), lambda plan: again(run, step, asked, plan, math.inf)
        )
    _check_memory(plan, options)
    why = "; ".join([why, *found])
    if logger.isEnabledFor(logging.INFO):
        logger.info(sentences.planned(name, plan, why))
    plan = plan.comparing(comparing.of(step.traced, step.rules, staged, cluster, asked.budget))
    return Compiled(staged, plan, traced, pins)


def made(run: Passes, step: Step, asked: Asked, found: list[str]) -> tuple[Plan, Staged]:
    """The plan of the cache or a new one, which is verified; says in `found` where it is from, unless it is new."""
    cache = plan_cache.cache_of(step, asked)
    known = None if cache is None else cached(run, step, asked, cache)
    plan, staged = known or chosen(run, step, asked)
    if asked.options.verify != "off":
        plan = run("checks", checks.verified, replace(plan, verification=()), staged)
    plan = replace(plan, planning_seconds=dict(run.seconds))
    if known is not None:
        found.append("found in the cache")
        return plan, staged
    plan = plan.weighing(weighing.of(staged, asked.budget))
    if cache is not None:
        cache.save(plan)
    return plan, staged


def chosen(run: Passes, step: Step, asked: Asked) -> tuple[Plan, Staged]:
    """The plan, and the step in its stages: as a given plan or division says, or as the search finds."""
    if asked.plan is not None:
        staged = replayed(run, step, asked, asked.plan)
    elif kept.is_given(asked):
        staged = pipelining.fitting(kept.divided_as_given(run, step, asked), asked)
        if asked.wishes.forbidden:
            staged = noted(staged, "allow and forbid: not heeded on submeshes, where the state stays where it is")
    else:
        staged = best(run, step, asked)
    staged = noted(staged, *asked.wishes.notes, *plans.heeded(staged, asked.wishes))
    staged = donated(staged, step, asked)
    annotated = bool(worth.items(step.traced, asked.wishes))
    plan = run(
        "plan", plans.write, staged, asked.cluster, method=asked.described, budget=asked.budget, annotated=annotated
    )
    return plan, staged


def cached(run: Passes, step: Step, asked: Asked, cache: PlanCache) -> tuple[Plan, Staged] | None:
    """A plan of the cache and the step in the stages that it says; None if there is none that can be used."""
    plan = cache.load()
    if plan is None:
        return None
    try:
        return plan, again(run, step, asked, plan, asked.budget)
    except AlpaLiteError as error:
        cache.refuse(str(error))
        return None


def again(run: Passes, step: Step, asked: Asked, plan: Plan, budget: float) -> Staged:
    """The step in the stages that a plan of the same step says, which came from the cache or from another process.

    Raises:
      PlanError: it takes other seconds or bytes than the plan says, or more bytes than `budget`.
    """
    staged = donated(replayed(run, step, asked, plan), step, asked)
    plan_cache.check_same(plan, staged, budget)
    return staged


def donated(staged: Staged, step: Step, asked: Asked) -> Staged:
    """The same with what the user named donated."""
    named = asked.options.donate
    return staged if named == "auto" else donating(staged, donated_leaves(step.traced, named))


def tracer(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    pins: Pins,
    platform: str,
) -> Callable[..., Traced]:
    """What traces a step, under the mesh of the context; with other shapes for some flat arguments if given."""
    trace = functools.partial(
        tracing.trace, fun, args, kwargs,
        batch_argnums=options.batch_argnums, batch_argnames=options.batch_argnames,
        state_argnums=options.state_argnums, state_argnames=options.state_argnames,
        static_argnums=options.static_argnums, static_argnames=options.static_argnames, known=pins.state,
        platform=platform,
        constrain=dict(options.constrain), out_shardings=options.out_shardings,
        annotations=not options.ignore_annotations,
    )  # fmt: skip
    return tracing.under(_jax.context_mesh(), trace)


@frames.in_one_piece
def same_program(
    compiled: Compiled, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> bool:
    """Whether tracing the step for other arguments makes the program that was planned."""
    trace = tracer(fun, args, kwargs, options, compiled.pins, compiled.plan.cluster.platform)
    with collecting.seldom(), _jax.without_mesh():
        return replanning.same_program(compiled.source, trace())


def best(run: Passes, step: Step, asked: Asked) -> Staged:
    """One mesh; a pipeline where nothing fits one mesh, or where one communicates too much.

    A pipeline can be faster only by communicating less, since all devices together compute as much either way: where
    what one mesh computes is nearly all that it costs, or the rest is less than it takes to dispatch a pipeline, or too
    little to repay the search, none is searched, and all of the time is for one mesh. Where one is hoped for and the
    time is short (`pipelining.AMPLE`), a plan of one mesh is enough before it. After pipelines some time is for one
    mesh again (`LONGER`), and all that is left where none could be compared, or one mesh gave way to them.

    On one node one mesh is searched until something fits, without time, too. All of its links are fast, so that a
    pipeline wins little; and one on all devices, in a single stage, takes longer to plan than the mesh that it is.
    """
    if not asked.pipelines:
        return one_mesh.best(run, step, asked)
    mesh, reason = None, None
    hurried = not pipelining.is_ample(run, asked.deadline.left)
    if asked.one_mesh:
        try:
            must = asked.cluster.nodes == 1
            time, kept = for_one_mesh(run, asked.deadline.left, shortened=hurried and not must)
            mesh = one_mesh.searched(run, step, asked.within(time), must=must, kept=kept, first=hurried)
        except InfeasibleError as error:
            reason = error
    if mesh is not None and mesh.whole is not None and not worth_a_pipeline(mesh.whole, mesh.seconds):
        staged = one_mesh.finished(run, asked, mesh.longer(asked.deadline))
        return beside(staged, "pipeline", "not searched: one mesh communicates too little for one to pay")
    found, why, note = None, "", ""
    try:
        found = pipeline(run, step, asked, mesh)
    except Slower as slower:
        why = f"none takes less than {slower.seconds:.4g} s, by the costs of its layers"
    except OutOfTime as late:
        why, note = LITTLE if late.little else "not searched in time", str(late)
    except (InfeasibleError, MicrobatchError, OptionError, PlanError) as error:
        if mesh is None:
            if reason is None:
                raise
            raise neither(reason, error) from reason
        why, note = str(error).split(";")[0], f"no pipeline was compared: {error}"
        if mesh.whole is None:
            return _instead(run, asked, mesh, error)
    if mesh is None:
        assert found is not None
        return found if reason is None else beside(found, "one mesh", does_not_fit(reason))
    searched = mesh.whole is not None and not note and not (hurried and promise.is_hoped_for(mesh.whole, mesh.seconds))
    end = asked.within(LONGER * asked.options.search_time_limit).deadline if searched else asked.deadline
    mesh = mesh.longer(end, math.inf if found is None else found.seconds)
    if mesh.chosen is None:
        assert found is not None
        found = noted(found, f"{asked.ran_out}: one mesh was not searched to the end")
        return beside(found, "one mesh", "nothing that fits was found in time")
    if found is not None and found.seconds < mesh.seconds:
        return beside(found, "one mesh", mesh.figures)
    staged = one_mesh.finished(run, asked, mesh)
    if found is None:
        return beside(noted(staged, *filter(None, [note])), "pipeline", why)
    note = f"the best pipeline found has {len(found.stages)} stages and takes {found.seconds:.4g} s per step"
    return beside(noted(staged, note), "pipeline", found)


def for_one_mesh(run: Passes, left: float, *, shortened: bool) -> tuple[float, float]:
    """Seconds of those left that one mesh has before pipelines; of these, those that are theirs if any is hoped for.

    Args:
      shortened: whether to leave pipelines what they take at least, and a tenth of the time, which searches exceed.
    """
    time, kept = ONE_MESH * left, ONE_MESH * pipelining.reserve(run)
    short = 0.9 * left - pipelining.time_for_stages(run)
    return (short, 0.0) if shortened and SHORTENED * left <= short < time else (time, kept)


def pipeline(run: Passes, step: Step, asked: Asked, mesh: OneMesh | None) -> Staged:
    """The best pipeline, searched as long as it can repay; beside one mesh, if there is a plan of one.

    One that is hoped for (`promise.HOPE`) is evaluated after the end of the time, too: where what that takes at least
    exceeds the limit by no more than `OVERTIME`, or whatever it takes where one mesh is very slow (`promise.DIRE`).

    Raises:
      Slower, OutOfTime: with such a plan, as `pipelining.pipeline`, and its other errors. The latter says why.
    """
    if mesh is None or mesh.whole is None:
        return pipelining.pipeline(run, step, asked)
    patience = repaid(mesh.whole, mesh.seconds)
    late = asked.deadline.left + OVERTIME * asked.options.search_time_limit < pipelining.shortest(run)
    must = promise.is_hoped_for(mesh.whole, mesh.seconds, promise.DIRE if late else promise.HOPE)
    asked = asked.repaying(patience)
    try:
        return pipelining.pipeline(run, step, asked, below=mesh.seconds, must=must)
    except OutOfTime as error:
        why = f"{asked.ran_out}: {str(error) or 'pipelines were not searched'}"
        raise OutOfTime(why, asked.deadline.little) from error


def _instead(run: Passes, asked: Asked, mesh: OneMesh, error: Exception) -> Staged:
    """One mesh, searched until something fits, where no pipeline can be had.

    Raises:
      InfeasibleError: nothing fits one mesh, either.
    """
    try:
        return one_mesh.finished(run, asked, mesh.longer(asked.deadline, must=True))
    except (InfeasibleError, MicrobatchError) as reason:
        raise neither(reason, error) from reason


def neither(reason: Exception, error: Exception) -> InfeasibleError:
    """That neither one mesh nor a pipeline fits, with the smaller of the budgets with which one of them does."""
    known = (getattr(one, "smallest_budget", None) for one in (reason, error))
    least = min((budget for budget in known if budget is not None), default=None)
    return InfeasibleError(f"{reason} No pipeline fits either: {error}", least)


def replayed(run: Passes, step: Step, asked: Asked, plan: Plan) -> Staged:
    """A given plan: the step divided as it says, and each stage with its decisions, without solving.

    Raises:
      PlanError: the plan is for other arguments, devices or another program; says what differs.
    """
    replay.check_devices(plan, asked.cluster)
    division, verdict = plan.division, Verdict("step", "replayed", plan.step_seconds, plan.step_seconds)
    if not plan.pipelined:
        (remat,) = replay.remat_of(plan)
        loop, _ = one_mesh.looped(run, step, one_mesh.cuts(run, step, asked), Way(plan.num_microbatches, remat))
        graph = staging.whole(loop.traced, loop.scan)
        communication = asked.options.communication
        decided = run("sharding", replay.replay, graph, asked.cluster, plan.stages[0], communication)
        verdict = replace(verdict, candidates=decided.found.candidates)
        planned = run("lowering", planning.lowered_whole, decided, communication)
        return run("programs", programs.single, loop, planned, verdict, str(remat))
    if division.owned:
        return owned.replayed(run, step, asked, plan)
    count = plan.num_microbatches
    loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **asked.inexact)
    loop, graphs = kept.cut_as(run, loop, plan)
    schedule = schedules.schedule(
        plan.schedule, len(division.first_devices), count, virtual=division.virtual,
        slices=len(division.token_slices) or 1,
    )  # fmt: skip
    planned_stages = []
    for graph, stage in zip(graphs, plan.stages, strict=True):
        decided = run(
            "sharding", replay.replay, graph, asked.cluster.part(stage.num_devices), stage, "explicit",
            split_weights=schedule.splits_backward,
        )  # fmt: skip
        planned_stages.append(run("lowering", planning.lowered, decided, split_weights=schedule.splits_backward))
    return kept.program_as(run, loop, planned_stages, schedule, asked, plan, verdict)


def worth_a_pipeline(whole: DecidedStage, seconds: float) -> bool:
    """Whether a plan of one mesh spends enough on anything but computation for a pipeline to repay being searched."""
    cluster, found = whole.cluster, whole.found
    least = LEAST_TASKS * cluster.dispatch.seconds(cluster.num_devices // cluster.nodes // 2 or 1)
    objective = found.solution.objective
    return found.compute_seconds < min(WORTH * objective, objective - least) and repaid(whole, seconds) >= PATIENCE


def repaid(whole: DecidedStage, seconds: float) -> float:
    """Seconds of search that the fastest pipeline that there can be repays, beside a plan of one mesh."""
    return worthwhile(seconds - promise.least_seconds(whole))


def _check_memory(plan: Plan, options: Options) -> None:
    """Raises InfeasibleError if a given plan needs more than the given memory."""
    needed = max(stage.memory.total for stage in plan.stages)
    if options.plan is not None and options.memory_per_device is not None and needed > options.memory_per_device:
        raise InfeasibleError(
            f"the given plan needs {units.exact_bytes(needed)} per device, more than memory_per_device="
            f"{units.exact_bytes(options.memory_per_device)}; leave that out, or plan again without plan=",
            needed,
        )
