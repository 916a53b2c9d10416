"""The compiler, from a train step written for one device to the program of every device: all passes, in order.

    step ──tracing──▶ graph ──factors──▶ Step ──search──▶ Staged ──plan──▶ Plan ──checks──▶ the plan is true

         of each candidate of one mesh    ──micro-batches──▶ ──layers──▶ ──grouping──▶ ──sharding──▶ ──lowering──▶
         of each candidate of pipelines   ──micro-batches──▶ ──layers──▶ ──costs──▶ ──slicing──▶ stages, each then
                                          ──grouping──▶ ──sharding──▶ ──lowering──▶ ──programs──▶ simulated

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

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.compilation import folded_steps, known_division, plan_cache
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes, passes
from alpa_lite.ir.graph import Traced
from alpa_lite.options import Options
from alpa_lite.passes import checks, factors, plans, tracing
from alpa_lite.passes.layers.residuals import reduce_residuals
from alpa_lite.passes.plans import comparing, weighing
from alpa_lite.passes.programs.staged import Staged, add_notes
from alpa_lite.passes.search.pipelines import exceeds_budget
from alpa_lite.passes.search.planner import search_plan
from alpa_lite.passes.sharding import mesh_program, wishes
from alpa_lite.passes.tracing.manual_regions import check_regions
from alpa_lite.passes.tracing.placements import argument_placements
from alpa_lite.plan.pins import NO_PINS, Pins
from alpa_lite.plan.plan import Plan
from alpa_lite.processes.effects import reduced_gc
from alpa_lite.processes.plan_broadcast import PlanBroadcast
from alpa_lite.report.summary import planned_message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A planned step: the step in planned stages, with its program, and the plan that says so.

    Attributes:
      unfold: returns the step in its stages; of a step that was planned folded, the whole of it.
      source: the step as it was traced, before any pass.
      pins: where its arguments are and stay.
    """

    unfold: Callable[[], Staged]
    plan: Plan
    source: Traced
    pins: Pins = NO_PINS

    @functools.cached_property
    def staged(self) -> Staged:
        """The step in its stages."""
        return self.unfold()

    @property
    def traced(self) -> Traced:
        """The step as it runs."""
        return self.staged.traced


@reduced_gc
def compile_step(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, cluster: Cluster,
    *, pins: Pins = NO_PINS, like: Plan | None = None, why: str = "requested", shared: bool = False,
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
    request = PlanRequest(options, cluster, trace, pins, like)
    others = PlanBroadcast(name, shared)
    with _jax.clear_mesh_context(), others.error_scope(), passes(name, options.dump_dir) as run:
        traced = run("tracing", request.trace)
        check_regions(traced.graph, cluster.num_devices)
        said = [] if options.ignore_annotations else tracing.read_annotations(traced, args, kwargs)
        said = [one for one in said if not (one.array and known_division.is_given(request))]
        placed, on = argument_placements(traced, args, kwargs, options.in_shardings, cluster.num_devices)
        context = None if options.ignore_annotations else context
        wanted = wishes.collect_wishes(
            traced, request.method, cluster.num_devices, said,
            context=context, forbidden=options.forbidden_strategies, placed=placed, placed_on=on,
        )  # fmt: skip
        request = replace(request, wishes=wanted)
        step = Step(traced, run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values))
        if others.count == 1:
            step = folded_steps.fold_step(run, step, request)
        found: list[str] = []
        plan, staged = others.plan(
            step, request, lambda: plan_step(run, step, request, found),
            lambda plan: known_division.rebuild_stages(run, step, request, plan, math.inf),
        )  # fmt: skip
    known_division.check_memory(plan, options)
    why = "; ".join([why, *found])
    if logger.isEnabledFor(logging.INFO):
        logger.info(planned_message(name, plan, why))
    plan = plan.with_deferred(
        comparisons=comparing.compare_with_textbook(step.traced, step.rules, staged, cluster, request.budget)
    )

    unfold = functools.cache(
        functools.partial(folded_steps.unfold, name, Step(traced, step.rules), request, plan, staged)
    )
    return Compiled(unfold, plan, traced, pins)


def plan_step(run: Passes, step: Step, request: PlanRequest, found: list[str]) -> tuple[Plan, Staged]:
    """The plan of the cache or a new one, which is verified; says in `found` where it is from, unless it is new."""
    cache = plan_cache.cache_of(step, request)
    known = None if cache is None else known_division.load_cached_plan(run, step, request, cache)
    plan, staged = known or choose_plan(run, step, request)
    if request.options.verify != "off":
        plan = run("checks", checks.verify_partitioning, replace(plan, verification=()), staged)
    plan = replace(plan, planning_seconds=dict(run.seconds))
    if known is not None:
        found.append("found in the cache")
        return plan, staged
    plan = plan.with_deferred(stages=weighing.add_alternatives(staged, request.budget))
    if cache is not None and not (plan.search and plan.search.truncated):
        cache.save(plan)
    return plan, staged


def choose_plan(run: Passes, step: Step, request: PlanRequest) -> tuple[Plan, Staged]:
    """Returns the plan, and the step in its stages: as a given plan or division says, or as the search finds."""
    summary = None
    if request.plan is not None:
        staged = known_division.replay_plan(run, step, request, request.plan)
    elif known_division.is_given(request):
        staged = known_division.plan_on_existing_placement(run, step, request)
        if staged.needed_bytes > request.budget:
            raise exceeds_budget(staged, request.budget)
        if request.wishes.forbidden:
            staged = add_notes(staged, "allow and forbid do not apply on submeshes, where the state stays in place")
    else:
        staged, summary = search_plan(run, step, request)
    staged = add_notes(staged, *request.wishes.notes, *plans.constraint_notes(staged, request.wishes))
    staged = known_division.add_donation(staged, step, request)
    annotated = bool(mesh_program.constraints_of(step.traced, request.wishes))

    def write() -> Plan:
        described, budget = request.description, request.budget
        record = plans.write(staged, request.cluster, method=described, budget=budget, annotated=annotated)
        return Plan(**{**vars(record), "search": summary})

    return run("plan", write), staged


def tracer(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, pins: Pins, platform: str
) -> Callable[..., Traced]:
    """Returns a tracer of a step, under the mesh of the context; it takes other shapes for some flat arguments."""
    trace = functools.partial(
        tracing.trace, fun, args, kwargs,
        batch_argnums=options.batch_argnums, batch_argnames=options.batch_argnames,
        state_argnums=options.state_argnums, state_argnames=options.state_argnames,
        static_argnums=options.static_argnums, static_argnames=options.static_argnames, known=pins.state,
        platform=platform,
        constrain=dict(options.constrain), out_shardings=options.out_shardings,
        annotations=not options.ignore_annotations,
    )  # fmt: skip
    under_mesh = tracing.trace_under(_jax.context_mesh(), trace)
    return lambda *args, **kwargs: reduce_residuals(under_mesh(*args, **kwargs))


def trace_again(
    compiled: Compiled, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Traced:
    """Returns a planned step traced for other arguments."""
    trace = tracer(fun, args, kwargs, options, compiled.pins, compiled.plan.cluster.platform)
    with reduced_gc, _jax.clear_mesh_context():
        return trace()
