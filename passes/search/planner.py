"""The plan of a request: the candidates that it begins with, and the program of the best plan that the search finds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.ir import units
from alpa_lite.passes import programs
from alpa_lite.passes.plans.comparing import add_comparison
from alpa_lite.passes.programs.staged import Staged, Verdict, add_notes
from alpa_lite.passes.search import best_first
from alpa_lite.passes.search.best_first import EFFORTS, FoundPlan
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.one_mesh import DecidedMesh, OneMeshSearch
from alpa_lite.passes.search.pipelines import PipelineSearch
from alpa_lite.passes.search.slices import WHOLE
from alpa_lite.passes.sharding import mesh_program
from alpa_lite.passes.stages import planning, stage_graph
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import SearchSummary
from alpa_lite.plan.figures import Comparison


def search_plan(run: Passes, step: Step, request: PlanRequest) -> tuple[Staged, SearchSummary]:
    """The program of the best plan that the request admits and its effort finds; the work and the gap of the search.

    Raises:
      InfeasibleError: nothing fits the memory; names the tensors that bind and the smallest budget that works.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      OptionError: the method asks for something that the cluster or the step does not have.
    """
    one = OneMeshSearch(run, step, request) if request.allows_one_mesh else None
    pipelines = PipelineSearch(run, step, request, one) if request.allows_pipelines else None
    roots = [*(one.roots() if one else ()), *([pipelines.root] if pipelines else ())]
    effort, limit, started = request.options.effort, request.options.planning_time_limit, time.perf_counter()
    found, summary = best_first.search(
        roots, EFFORTS[effort], effort=effort,
        is_over=lambda: limit is not None and time.perf_counter() - started > limit,
        progress=lambda work, allowed: run.count("% of the search budget", min(99, 100 * work // allowed), 100),
    )  # fmt: skip
    chosen = found or _fit_or_explain(one, pipelines)
    staged = _write(run, request, one, chosen) if one and isinstance(chosen.value, DecidedMesh) else chosen.value
    if summary.truncated:
        staged = add_notes(staged, f"truncated by planning_time_limit={limit:g} s")
    if one is not None and pipelines is not None:
        staged = _compare(staged, one, pipelines, chosen)
    if pipelines is not None:
        staged = _explain_slices(staged, chosen, pipelines)
    return staged, replace(summary, bound=min(summary.bound, chosen.seconds))


def _fit_or_explain(one: OneMeshSearch | None, pipelines: PipelineSearch | None) -> FoundPlan:
    """Returns a plan made for memory alone, where the search found none that fits; raises why there is none, else."""
    errors: list[AlpaLiteError] = []
    for search in filter(None, (one, pipelines)):
        try:
            return search.fit_or_explain()
        except AlpaLiteError as error:
            errors.append(error)
    budgets = [e.smallest_budget for e in errors if isinstance(e, InfeasibleError) and e.smallest_budget is not None]
    if len(errors) == 1 or not budgets:
        raise errors[0]
    raise InfeasibleError(f"{errors[0]} No pipeline fits either: {errors[1]}", min(budgets)) from errors[0]


def _write(run: Passes, request: PlanRequest, one: OneMeshSearch, chosen: FoundPlan) -> Staged:
    """Returns the program of a plan of one mesh."""
    decided: DecidedMesh = chosen.value
    step, found, config = decided.step, decided.mesh_solution, decided.step.config
    loop, grouped, costs = step.loop, step.grouped_step, tuple[str, ...]()
    if mesh_program.constraints_of(loop.traced, request.wishes):
        costs = run(
            "constraints", mesh_program.price_constraints, grouped, request.cluster, request.method, found,
            budget=request.budget, pins=request.pins, wishes=request.wishes,
        )  # fmt: skip
    objective, own = found.solution.objective, found.solution.bound
    record = one.records[one.own].get(config)
    least = one.least(record) if record else 0.0
    is_closed = objective - min(least, own, objective) <= mesh_program.CLOSED * objective
    bound, status = (own, "optimal") if is_closed else (min(least, own, objective), "feasible")
    rows = one.rows(chosen)
    found = replace(found, solution=replace(found.solution, bound=bound, status=status), candidates=rows)
    graph = stage_graph.whole_step_stage(loop.traced, loop.scan)
    stage = DecidedStage(graph, grouped.rules, grouped.grouping, found, request.cluster)
    planned = run("lowering", planning.lower_whole_step, stage, request.options.communication)
    verdict = Verdict("step", status, objective, bound, rows)
    staged = run("programs", programs.stage_whole_step, loop, planned, verdict, str(config.remat))
    return add_notes(staged, *costs, *_reasons(one, chosen, config))


def _reasons(one: OneMeshSearch, chosen: FoundPlan, config: ExecutionConfig) -> Iterator[str]:
    """Yields why a configuration with micro-batches or rematerialisation was chosen."""
    memory = f"memory_per_device={units.exact_bytes(one.request.budget)}"
    others = [(plan.value.step.config, plan.seconds) for plan in one.found]
    simpler = [pair for pair in others if pair[0] != config and config.only_adds_to(pair[0])]
    if simpler:
        other, least = min(simpler, key=lambda pair: (pair[0].rank, pair[1]))
        yield f"{config}: {other} would take {least:.4g} s within {memory}, this {chosen.seconds:.4g} s"
    elif one.request.num_microbatches is None and config != ExecutionConfig():
        fewer = "with fewer, the step" if config.microbatches > 1 else str(ExecutionConfig())
        yield f"{config}: {fewer} does not fit into {memory}"


def _compare(staged: Staged, one: OneMeshSearch, pipelines: PipelineSearch, chosen: FoundPlan) -> Staged:
    """Returns the same with the best plan of the other kind next to it, or why there is none."""
    if isinstance(chosen.value, DecidedMesh):
        if pipelines.found:
            other: Staged = min(pipelines.found, key=lambda plan: plan.seconds).value
            note = f"the best pipeline found has {len(other.stages)} stages and takes {other.seconds:.4g} s per step"
            return add_comparison(add_notes(staged, note), "pipeline", other)
        if pipelines.errors:
            why = str(pipelines.errors[0])
            return add_comparison(add_notes(staged, f"no pipeline was compared: {why}"), "pipeline", why.split(";")[0])
        expected = min(pipelines.estimates, default=pipelines.estimate()[1])
        return add_comparison(staged, "pipeline", f"not planned: estimated at {units.seconds(expected)}")
    if one.found:
        best = min(one.found, key=lambda plan: plan.seconds)
        found: mesh_program.MeshSolution = best.value.mesh_solution
        figures = Comparison("one mesh", found.mesh.shape, best.seconds, math.ceil(found.solution.peak))
        return add_comparison(staged, "one mesh", figures)
    least = [record.least / 2**30 for record in one.records[one.own].values() if record.least]
    why = f"does not fit: needs {min(least):,.1f} GiB per device" if least else "nothing fits"
    return add_comparison(staged, "one mesh", why)


def _explain_slices(staged: Staged, chosen: FoundPlan, pipelines: PipelineSearch) -> Staged:
    """Returns the same with the whole sequences next to slices, or with the reason why there are no slices."""
    for search in pipelines.slicings:
        if chosen in search.found_plans:
            return add_comparison(staged, "whole sequences", search.whole_pipeline)
        if chosen.value is search.whole_pipeline:
            why = next(filter(None, search.refusals.values()), "no argument of the batch has a sequence")
            if search.program is not None:
                counts = f"{search.count} micro-batches"
                why = f"no slices were found that take less than {staged.seconds:.4g} s with {counts}"
            return add_notes(staged, f"{WHOLE}: {why}")
    return staged
