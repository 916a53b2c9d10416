"""The plan of a request: the candidates that it begins with, and the program of the best plan that the search finds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError
from alpa_lite.figures import Comparison
from alpa_lite.passes import programs
from alpa_lite.passes.plans.comparing import beside, does_not_fit
from alpa_lite.passes.programs.staged import Staged, Verdict, noted
from alpa_lite.passes.search import best_first, token_slices
from alpa_lite.passes.search.analysis import Run
from alpa_lite.passes.search.best_first import Candidate, FoundPlan, SearchResult
from alpa_lite.passes.search.budget import EFFORTS
from alpa_lite.passes.search.build_pipeline import StageCache, build_pipeline
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.one_mesh import UNKNOWN_COMMUNICATION, DecidedMesh, OneMeshSearch
from alpa_lite.passes.search.pipelines import Pipelines, PipelineSearch, exceeds_budget
from alpa_lite.passes.sharding import worth
from alpa_lite.passes.sharding.mesh_program import CLOSED
from alpa_lite.passes.stages import planning
from alpa_lite.records import SearchSummary
from alpa_lite.report import units

MAX_COMPUTE_RATIO = 1.5
"""The most by which a step is estimated to compute longer than its roofline in equal parts on all devices."""


@dataclass(frozen=True, eq=False)
class SearchedStep:
    """The best plan of a step.

    Attributes:
      staged: its program. summary: the work and the gap of the search.
    """

    staged: Staged
    summary: SearchSummary


def search_plan(run: Run, step: Step, request: PlanRequest) -> SearchedStep:
    """The best plan that the request admits and its effort finds.

    Raises:
      InfeasibleError: nothing fits the memory; names the tensors that bind and the smallest budget that works.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      OptionError: the method asks for something that the cluster or the step does not have.
    """
    one = OneMeshSearch(run, step, request) if request.one_mesh else None
    pipelines = PipelineSearch(run, step, request, one is not None) if request.pipelines else None
    roots: list[Candidate] = one.roots() if one else []
    if pipelines is not None:
        if one is not None:
            pipelines.computing = lambda: _compute_seconds(one)
        roots.append(Pipelines(pipelines))
    limit, started = request.options.planning_time_limit, time.perf_counter()

    def is_over() -> bool:
        return limit is not None and time.perf_counter() - started > limit

    result = best_first.search(
        roots, EFFORTS[request.options.effort], is_over=is_over,
        progress=lambda work, allowed: run.count("% of the search budget", min(99, 100 * work // allowed), 100),
    )  # fmt: skip
    chosen = result.incumbent or _fit_or_explain(one, pipelines)
    staged = _write(run, request, one, chosen, result)
    staged = _compare(staged, request, one, pipelines, chosen, result)
    if pipelines is not None:
        staged = _explain_slices(staged, chosen, pipelines)
    summary = SearchSummary(
        request.options.effort, result.work, result.allowed, result.expanded, result.pruned,
        min(result.bound, chosen.seconds), result.estimated, result.unreached, result.truncated,
    )  # fmt: skip
    return SearchedStep(staged, summary)


def _compute_seconds(one: OneMeshSearch) -> float:
    """Estimated seconds for which a step computes on all devices, by the plans of one mesh and their rooflines.

    A plan in far too many micro-batches, or that replicates most of it, computes for longer than others would.
    """
    peaks = [record.peak for record in one.records.values() if record.peak]
    if not peaks:
        return UNKNOWN_COMMUNICATION * one.products
    found = min((plan.value.stage.found.compute_seconds for plan in one.found), default=min(peaks))
    return min(found, MAX_COMPUTE_RATIO * min(peaks))


def _fit_or_explain(one: OneMeshSearch | None, pipelines: PipelineSearch | None) -> FoundPlan:
    """A plan made for memory alone, where the search found none that fits; raises why there is none, else."""
    errors: list[AlpaLiteError] = []
    if one is not None:
        try:
            return one.fit_or_explain()
        except (InfeasibleError, MicrobatchError) as error:
            errors.append(error)
    if pipelines is not None:
        found = _least_memory_pipeline(pipelines)
        if isinstance(found, FoundPlan):
            return found
        errors.append(_with_tried_counts(found, pipelines))
    budgets = [e.smallest_budget for e in errors if isinstance(e, InfeasibleError) and e.smallest_budget is not None]
    if len(errors) == 1 or not budgets:
        raise errors[0]
    first, second = errors
    raise InfeasibleError(f"{first} No pipeline fits either: {second}", min(budgets)) from first


def _with_tried_counts(error: AlpaLiteError, pipelines: PipelineSearch) -> AlpaLiteError:
    """The same refusal for memory with the largest number of micro-batches that was tried, where none was given."""
    if not isinstance(error, InfeasibleError) or pipelines.request.num_microbatches is not None:
        return error
    most = max(pipelines.counts)
    return InfeasibleError(
        f"{error}; up to {most} micro-batches were tried, num_microbatches takes others", error.smallest_budget
    )


def _least_memory_pipeline(pipelines: PipelineSearch) -> FoundPlan | AlpaLiteError:
    """The pipeline that needs the fewest bytes by the costs of its layers, planned; or why it does not fit."""
    errors = pipelines.errors
    known = [e.smallest_budget for e in errors if isinstance(e, InfeasibleError) and e.smallest_budget is not None]
    if not known:
        return errors[0] if errors else InfeasibleError("the step has no pipeline")
    best: Staged | None = None
    for count in reversed(pipelines.counts):
        try:
            costs = pipelines.price(pipelines.reference, pipelines.kinds)
            room = math.inf
            try:
                pipelines.choose(costs, count, 1.0)
            except InfeasibleError as error:
                room = (error.smallest_budget or math.inf) * (1 + 1e-9)
            # Built for a budget of nothing, so that the result does not depend on the budget, and works when given.
            request = pipelines.request.with_budget(1)
            chosen = pipelines.choose(costs, count, room)
            staged = build_pipeline(pipelines.run, chosen, request, request.pipeline.lengths, StageCache())
        except AlpaLiteError:
            continue
        if best is None or staged.needed < best.needed:
            best = staged
        if best.needed <= pipelines.request.budget:
            break
    if best is None:
        return errors[0]
    if best.needed > pipelines.request.budget:
        return exceeds_budget(best, pipelines.request.budget)
    return FoundPlan("pipeline", (len(best.stages), best.program.num_microbatches, 0), best.seconds, best)


def _write(
    run: Run, request: PlanRequest, one: OneMeshSearch | None, chosen: FoundPlan, result: SearchResult
) -> Staged:  # fmt: skip
    """The program of a plan."""
    if isinstance(chosen.value, Staged):
        return chosen.value
    assert one is not None
    decided: DecidedMesh = chosen.value
    stage, config, traced = decided.stage, decided.step.config, decided.step.loop.traced
    costs: tuple[str, ...] = ()
    if worth.items(traced, request.wishes):
        costs = run(
            "constraints", worth.worth, traced, stage.grouping, stage.rules, request.cluster, request.method,
            stage.found, budget=request.budget, pins=request.pins, wishes=request.wishes,
        )  # fmt: skip
    found = stage.found
    bound = min([one.bound(config, mesh) for mesh in one.record(config).bounds], default=0.0)
    bound = min(max(bound, 0.0), found.solution.bound, found.solution.objective)
    if found.solution.objective - bound <= CLOSED * found.solution.objective:
        bound = max(bound, found.solution.bound)
    proven = found.solution.objective - bound <= CLOSED * found.solution.objective
    solution = replace(found.solution, bound=bound, status="optimal" if proven else "feasible")
    stage = replace(stage, found=replace(found, solution=solution, candidates=one.rows(chosen)))
    planned = run("lowering", planning.lowered_whole, stage, request.options.communication)
    verdict = Verdict("step", solution.status, solution.objective, solution.bound, stage.found.candidates)
    staged = run("programs", programs.single, decided.step.loop, planned, verdict, str(config.remat))
    return noted(staged, *costs, *_reasons(one, chosen, config, request))


def _reasons(
    one: OneMeshSearch, chosen: FoundPlan, config: ExecutionConfig, request: PlanRequest
) -> Iterator[str]:  # fmt: skip
    """Why a configuration with micro-batches or rematerialisation was chosen."""
    memory = f"memory_per_device={units.exact_bytes(request.budget)}"
    simpler = [p for p in one.found if p.value.step.config != config and config.only_adds_to(p.value.step.config)]
    if simpler:
        other = min(simpler, key=lambda plan: (plan.value.step.config.rank, plan.seconds))
        least = min(p.seconds for p in simpler if p.value.step.config == other.value.step.config)
        name = other.value.step.config
        yield f"{config}: {name} would take {least:.4g} s within {memory}, this {chosen.seconds:.4g} s"
    elif request.num_microbatches is None and config != ExecutionConfig():
        fewer = "with fewer, the step" if config.microbatches > 1 else str(ExecutionConfig())
        yield f"{config}: {fewer} does not fit into {memory}"


def _compare(
    staged: Staged, request: PlanRequest, one: OneMeshSearch | None, pipelines: PipelineSearch | None,
    chosen: FoundPlan, result: SearchResult,
) -> Staged:  # fmt: skip
    """The same with the best plan of the other kind next to it, or why there is none; and with the search's gaps."""
    if result.truncated:
        staged = noted(staged, f"truncated by planning_time_limit={request.options.planning_time_limit:g} s")
    if one is None or pipelines is None:
        return staged
    if isinstance(chosen.value, DecidedMesh):
        if pipelines.best is not None:
            other: Staged = pipelines.best.value
            note = f"the best pipeline found has {len(other.stages)} stages and takes {other.seconds:.4g} s per step"
            return beside(noted(staged, note), "pipeline", other)
        if pipelines.errors:
            error = pipelines.errors[0]
            return beside(noted(staged, f"no pipeline was compared: {error}"), "pipeline", str(error).split(";")[0])
        expected = min(pipelines.estimates.values(), default=Pipelines(pipelines).estimate()[1])
        return beside(staged, "pipeline", f"not planned: estimated at {units.seconds(expected)}")
    best = min(one.found, key=lambda plan: plan.seconds, default=None)
    if best is None:
        return beside(staged, "one mesh", _does_not_fit(one))
    solution: Any = best.value.stage.found
    figures = Comparison("one mesh", solution.mesh.shape, best.seconds, math.ceil(solution.solution.peak))
    return beside(staged, "one mesh", figures)


def _explain_slices(staged: Staged, chosen: FoundPlan, pipelines: PipelineSearch) -> Staged:
    """The same with the whole sequences next to slices, or with the reason why there are no slices."""
    for state in pipelines.slicings:
        if staged.token_slices and chosen in state.found:
            return beside(staged, "whole sequences", state.whole)
        if chosen.value is state.whole:
            count = state.whole.program.num_microbatches
            late = [reason for reason in state.reasons if "waits for" in reason]
            reasons = late or state.reasons or ["no argument of the batch has a sequence"]
            why = f"no slices were found that take less than {staged.seconds:.4g} s with {count} micro-batches"
            return noted(staged, f"{token_slices.WHOLE}: {why if state.program is not None else reasons[0]}")
    return staged


def _does_not_fit(one: OneMeshSearch) -> str:
    """Why no plan of one mesh stands next to a pipeline."""
    least = [record.least for record in one.records.values() if record.least]
    return does_not_fit(InfeasibleError("nothing fits", min(least) if least else None))
