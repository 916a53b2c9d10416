"""Plans in hardly any time, which say what was not searched; and small steps, which are planned in little time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

import alpa_lite
from alpa_lite import compiler, pipelining
from alpa_lite.asked import Asked
from alpa_lite.cluster import Cluster
from alpa_lite.options import Options
from alpa_lite.passes import stages
from alpa_lite.passes.programs import ways
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime, worthwhile
from alpa_lite.passes.stages import promise, submeshes
from alpa_lite.passes.stages.slices import StageChoice
from tests.mlps import mlp, two_machines

LAYERS, WIDTH = 4, 512
MACHINES = two_machines(2**30, 1e9)


def planned(method: Any, cluster: Cluster = MACHINES, **options: Any) -> alpa_lite.Plan:
    step, args = mlp(WIDTH, 4096, LAYERS)
    return alpa_lite.make_plan(step, *args, cluster=cluster, method=method, verify="off", **options)


@pytest.fixture(scope="module")
def textbook() -> float:
    """Seconds of the best textbook plan."""
    methods = alpa_lite.DataParallel(), alpa_lite.Zero(stage=3), alpa_lite.TensorParallel()
    return min(planned(method).step_seconds for method in methods)


@pytest.mark.parametrize("method", [alpa_lite.Auto(), alpa_lite.Sharded()], ids=["auto", "sharded"])
def test_in_hardly_any_time_there_is_a_plan_that_says_what_was_not_searched(method, textbook) -> None:
    plan = planned(method, search_time_limit=1e-3)
    assert any("search_time_limit=0.001 s" in note and "not searched" in note for note in plan.notes)
    assert not [note for note in plan.notes if note.rstrip().endswith(":")]  # each says what
    assert "not searched" in {candidate.status for candidate in plan.candidates}
    assert plan.step_seconds <= 1.02 * textbook
    assert plan.solver.bound <= plan.solver.objective


def test_memory_is_met_in_hardly_any_time() -> None:
    """One micro-batch takes more than this: the plan has as many as it takes, though the time is over before."""
    whole = planned(alpa_lite.Zero(stage=3)).stages[0].memory.total
    plan = planned(alpa_lite.Sharded(), search_time_limit=1e-3, memory_per_device=int(0.7 * whole))
    assert plan.stages[0].memory.total <= 0.7 * whole and plan.num_microbatches > 1


def test_on_one_node_one_mesh_is_searched_until_something_fits(monkeypatch) -> None:
    """A pipeline of one stage was planned in place of it, which took longer and more time than there was."""

    def priced(*given: Any, **named: Any) -> Any:
        raise AssertionError("layers are priced though there is no time")

    node = replace(MACHINES, nodes=1, devices_per_node=8, network_link=None)
    budget = int(0.7 * planned(alpa_lite.Zero(stage=3), node).stages[0].memory.total)
    monkeypatch.setattr(compiler, "worth_a_pipeline", lambda *_: True)
    monkeypatch.setattr(stages, "priced", priced)
    plan = planned(alpa_lite.Auto(), node, search_time_limit=1e-3, memory_per_device=budget)
    assert not plan.pipelined and plan.stages[0].memory.total <= budget


def test_a_small_step_is_planned_without_layers(monkeypatch) -> None:
    def priced(*given: Any, **named: Any) -> Any:
        raise AssertionError("layers of a step that no pipeline can repay are priced")

    monkeypatch.setattr(stages, "priced", priced)
    step, args = mlp(128, 256, LAYERS)
    plan = alpa_lite.make_plan(step, *args, cluster=Cluster.local(), verify="off")
    assert len(plan.stages) == 1
    assert not any("no pipeline was compared" in note for note in plan.notes)


STAGES = (StageChoice(0, 2, 0, 0, 0), StageChoice(2, 5, 0, 0, 1))
"""Two stages of two and of three layers, each on a submesh of its own."""


def slices_of(*sizes: float, microbatches: int = 8) -> Any:
    """Those stages with so many estimated bytes on each submesh."""
    return SimpleNamespace(stages=STAGES, bytes=sizes, devices=(4, 4), num_microbatches=microbatches)


def staged_of(*sizes: float, seconds: float = 1.0) -> Any:
    """Those stages planned, with so many bytes on each submesh."""
    return SimpleNamespace(needed=max(sizes), stages=STAGES, bytes=[(size, 0.0) for size in sizes], seconds=seconds)


def asked_of(left: float) -> Any:
    """What is asked of a search with a budget of 1 byte and so many seconds left."""
    asked: Any = SimpleNamespace(
        budget=1.0, deadline=Deadline(left), options=Options(method=alpa_lite.Auto()), within=lambda *given: asked,
        pipeline=alpa_lite.Pipeline(), repaying=lambda seconds: asked,
    )  # fmt: skip
    return asked


RUN: Any = SimpleNamespace(seconds={"tracing": 1.0})


@dataclass(frozen=True)
class Costs:
    """Stands in for `Priced`."""

    beyond: Any = None


@pytest.mark.parametrize("must", [False, True])
def test_stages_that_exceed_the_budget_are_not_chosen_again_without_time(monkeypatch, must: bool) -> None:
    tried: list[int] = []

    def realised(*given: Any) -> Any:
        tried.append(len(given))
        return staged_of(1.0, 2.0)

    def sliced(run: Any, costs: Any, asked: Any, counts: Any, room: float, *more: Any, must: bool) -> Any:
        beyond.append(costs.beyond)
        extra = [max(costs.beyond.get((layer, 4), 0.0) for layer in range(s.first, s.stop)) for s in STAGES]
        return SimpleNamespace(unfinished=False, slices=slices_of(0.9 + extra[0], 0.8 + extra[1]))

    beyond: list[Any] = []
    monkeypatch.setattr(pipelining, "realised", realised)
    monkeypatch.setattr(pipelining, "sliced", sliced)
    monkeypatch.setattr(stages, "best", lambda layers, choose, *more: choose(Costs(), layers.counts, 1.0, True))
    layers = pipelining.Layered((1,), (1,), lambda count: None, lambda count, kinds: None)  # type: ignore[arg-type]
    if must:
        pipelining.of_whole_sequences(RUN, asked_of(0.0), layers, below=1.0, must=True)
        assert len(tried) == len(beyond) == pipelining.SLICINGS
        assert not beyond[0] and beyond[1].keys() == {(layer, 4) for layer in range(5)}
        assert 0.8 + beyond[1][2, 4] > 1.0  # the second stage is larger than the room from now on
        assert beyond[1][0, 4] == pytest.approx(0.1)  # the first needs as much more as it was found to
    else:
        with pytest.raises(OutOfTime, match="the pipeline of 2 stages exceeds the budget"):
            pipelining.of_whole_sequences(RUN, asked_of(0.0), layers, below=1.0, must=False)
        assert len(tried) == 1


def test_stages_are_taken_to_need_what_those_with_their_layers_did() -> None:
    """0.4 bytes are missing of a stage that was estimated to need 0.9 of 1.2, since nothing fits in less."""
    chosen: Any = SimpleNamespace(slices=slices_of(0.9, 1.2))
    asked = asked_of(60.0)
    found = pipelining.learned({(0, 4): 0.5, (7, 2): 3.0}, chosen, staged_of(1.4, 0.7), 1.2, asked)
    assert found[0, 4] == pytest.approx(0.5 + 0.3 + 1.05 * 0.4) and found[1, 4] == pytest.approx(0.3 + 1.05 * 0.4)
    assert found[2, 4] == found[4, 4] == 0.0 and found[7, 2] == 3.0


@pytest.mark.parametrize(
    ("left", "estimated", "seconds", "taken"),
    [(60.0, 0.8, 0.85, True), (60.0, 0.8, 1.1, False), (60.0, 0.99, 0.5, False), (1e-9, 0.8, 0.85, False)],
)
def test_the_second_best_number_of_micro_batches_is_planned_where_it_may_be_faster(
    monkeypatch, left: float, estimated: float, seconds: float, taken: bool
) -> None:
    """16 micro-batches are estimated to take less than 8 really do; not where that is by 1 %, nor without time."""
    counted: list[Any] = []

    def best(layers: Any, choose: Any, deadline: Any, below: float, *more: Any) -> Any:
        counted.append(tuple(layers.counts))
        number = 8 if 8 in layers.counts else 16
        weighed = [
            SimpleNamespace(num_microbatches=16, bound=estimated),
            SimpleNamespace(num_microbatches=8, bound=0.1),
        ]
        return SimpleNamespace(unfinished=False, slices=slices_of(0.5, 0.5, microbatches=number), weighed=weighed)

    def realised(run: Any, chosen: Any, *given: Any) -> Any:
        return staged_of(0.5, 0.5, seconds=1.0 if chosen.slices.num_microbatches == 8 else seconds)

    monkeypatch.setattr(pipelining, "realised", realised)
    monkeypatch.setattr(stages, "best", best)
    layers = pipelining.Layered((8, 16), (1,), lambda count: None, lambda count, kinds: None)  # type: ignore[arg-type]
    staged, chosen, _ = pipelining.of_whole_sequences(RUN, asked_of(left), layers, below=math.inf, must=False)
    looked = left > 1.0 and estimated < 0.98
    assert counted == [(8, 16)] + [(16,)] * looked
    assert (staged.seconds, chosen.slices.num_microbatches) == ((seconds, 16) if taken else (1.0, 8))


@dataclass(frozen=True)
class Bounded(Costs):
    """Costs of stages that take half a second at least."""

    least_seconds: float = 0.5


@pytest.mark.parametrize(
    ("left", "size", "estimated", "needed", "looked", "taken"),
    [
        (60.0, 0.99, 0.8, 0.9, True, True),
        (60.0, 0.99, 0.8, 1.1, True, False),
        (60.0, 0.99, 0.99, 0.9, True, False),
        (60.0, 0.7, 0.8, 0.9, False, False),
        (1e-9, 0.99, 0.8, 0.9, False, False),
    ],
)
def test_stages_that_exceed_the_budget_by_estimates_alone_are_planned_where_they_are_faster(
    monkeypatch, left: float, size: float, estimated: float, needed: float, looked: bool, taken: bool
) -> None:
    """Not those that turn out to exceed it, are faster by 1 %, or where memory is not short; nor without time."""
    rooms: list[float] = []
    chosen: Any = SimpleNamespace(unfinished=False, slices=slices_of(0.5, size), seconds=1.0, priced=Bounded())
    other: Any = SimpleNamespace(unfinished=False, slices=slices_of(0.5, 1.01), seconds=estimated, weighed=())

    def sliced(run: Any, costs: Any, asked: Any, counts: Any, room: float, below: float, *, must: bool) -> Any:
        assert costs.beyond == {} and counts == [8] and not must and below == pytest.approx(0.98)
        rooms.append(room)
        return other

    def realised(run: Any, some: Any, *given: Any) -> Any:
        return staged_of(0.5, 0.9, seconds=1.0) if some is chosen else staged_of(0.5, needed, seconds=0.7)

    monkeypatch.setattr(pipelining, "realised", realised)
    monkeypatch.setattr(pipelining, "sliced", sliced)
    monkeypatch.setattr(pipelining, "runner_up", lambda *given: None)
    monkeypatch.setattr(stages, "best", lambda *given: chosen)
    layers = pipelining.Layered((8, 16), (1,), lambda count: None, lambda count, kinds: None)  # type: ignore[arg-type]
    staged, at, _ = pipelining.of_whole_sequences(RUN, asked_of(left), layers, below=math.inf, must=False)
    assert rooms == [pytest.approx(1.02)] * looked
    assert (at is other, staged.seconds) == ((True, 0.7) if taken else (False, 1.0))


@pytest.mark.parametrize(("schedule", "share"), [("auto", 1.2), ("1f1b", 1.0)])
def test_what_is_searched_after_the_end_of_choosing_is_part_of_its_time(
    monkeypatch, schedule: str, share: float
) -> None:
    """Of 60 s, a fifth of 50 s follows them where schedules are compared; where one is given, nothing does."""
    seen: list[tuple[float, bool]] = []

    def settled(costs: Any, choose: Any, work_out: Any, room: float, deadline: Any, *more: Any, **named: Any) -> Any:
        seen.append((deadline.left, named["hiding"] is not None))

    monkeypatch.setattr(stages, "settled", settled)
    asked = asked_of(60.0)
    asked.pipeline = alpa_lite.Pipeline(schedule=schedule)
    pipelining.sliced(RUN, Costs(), asked, (8,), 1.0)  # type: ignore[arg-type]
    ((left, last),) = seen
    assert left == pytest.approx(60.0 / share, rel=1e-2) and last == (schedule == "auto")


@pytest.mark.parametrize(
    ("computing", "left", "tracing", "must"),
    [(0.4, 20, 4, True), (0.6, 20, 4, False), (0.4, 2, 10, False), (0.4, 4.9, 4, True), (0.05, 0, 10, True)],
)  # fmt: skip
def test_what_is_hoped_for_exceeds_the_limit_by_a_fifth_at_most(monkeypatch, computing, left, tracing, must) -> None:
    """Planning the stages takes 2.7 times as long as tracing, and of 30 s it may exceed 6: else only where one mesh is
    ten times slower than what it computes."""
    seen: list[bool] = []
    monkeypatch.setattr(promise, "least_seconds", lambda whole: 0.0)
    monkeypatch.setattr(pipelining, "pipeline", lambda *given, below, must: seen.append(must))
    asked: Any = SimpleNamespace(
        deadline=Deadline(left), options=Options(method=alpa_lite.Auto()), repaying=lambda seconds: asked
    )
    whole = SimpleNamespace(found=SimpleNamespace(compute_seconds=computing))
    mesh: Any = SimpleNamespace(whole=whole, seconds=1.0)
    run: Any = SimpleNamespace(seconds={"tracing": tracing})
    assert asked.options.search_time_limit == 30.0
    compiler.pipeline(run, SimpleNamespace(), asked, mesh)  # type: ignore[arg-type]
    assert seen == [must]


@pytest.mark.parametrize(
    ("gain", "left", "why"),
    [(0.01, 20.0, "it would take longer than 100 steps could win back"), (9.0, 2.0, "search_time_limit=30 s")],
)  # fmt: skip
def test_a_pipeline_that_is_not_searched_says_whether_it_is_for_want_of_time(monkeypatch, gain, left, why) -> None:
    """Choosing stages and planning them takes 10.8 s at least, 2.7 times as long as tracing."""
    options = Options(method=alpa_lite.Auto())
    asked = Asked(options, MACHINES, lambda *given: None, deadline=Deadline(left, lambda: 0.0))
    monkeypatch.setattr(compiler, "repaid", lambda whole, seconds: worthwhile(gain))
    monkeypatch.setattr(promise, "is_hoped_for", lambda *given: False)
    run, mesh = SimpleNamespace(seconds={"tracing": 4.0}), SimpleNamespace(whole=SimpleNamespace(), seconds=1.0)
    with pytest.raises(OutOfTime, match=f"^{why}: pipelines were not searched$") as late:
        compiler.pipeline(run, SimpleNamespace(), asked, mesh)  # type: ignore[arg-type]
    assert late.value.little == (gain < 1.0)


@pytest.mark.parametrize(("left", "hoped", "again"), [(60.0, True, 5.0), (11.0, False, 5.0), (11.0, True, 11.0)])
@pytest.mark.parametrize("seconds", [0.5, 2.0, None])
def test_what_one_mesh_has_after_pipelines(
    monkeypatch, left: float, hoped: bool, again: float, seconds: float | None
) -> None:
    """5 s of what is left; all where it gave way to a pipeline that was hoped for, since the time was less than twelve
    times what tracing took. It takes 1 s a step.

    Its program is made where it is chosen alone: beside a faster pipeline its figures are known.
    """
    given: list[float] = []
    made: list[Any] = []
    beside: list[Any] = []

    def longer(deadline: Deadline, below: float) -> Any:
        assert below == (seconds or math.inf)
        given.append(deadline.left)
        return mesh

    def pipeline(*given: Any) -> Any:
        if seconds is None:
            raise stages.Slower(2.0)
        return SimpleNamespace(seconds=seconds, stages=(1, 2), written=None)

    def finished(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(seconds=1.0)

    mesh: Any = SimpleNamespace(chosen=object(), whole=object(), seconds=1.0, figures="known", longer=longer)

    def searched(*given: Any, **named: Any) -> Any:
        assert named["first"] == (left == 11.0)
        return mesh

    monkeypatch.setattr(compiler.one_mesh, "searched", searched)
    monkeypatch.setattr(compiler.one_mesh, "finished", finished)
    monkeypatch.setattr(compiler, "worth_a_pipeline", lambda *_: True)
    monkeypatch.setattr(compiler, "pipeline", pipeline)
    monkeypatch.setattr(compiler, "noted", lambda staged, *notes: staged)
    monkeypatch.setattr(compiler, "beside", lambda staged, name, other: beside.append((name, other)) or staged)
    monkeypatch.setattr(promise, "is_hoped_for", lambda *_: hoped)
    asked = Asked(Options(method=alpa_lite.Auto()), MACHINES, lambda *given: None, deadline=Deadline(left))  # type: ignore[arg-type]
    found = compiler.best(RUN, SimpleNamespace(), asked)  # type: ignore[arg-type]
    assert given == [pytest.approx(again, abs=1.0)]
    assert found.seconds == min(1.0, seconds or math.inf) and len(made) == (seconds != 0.5)
    ((name, other),) = beside
    assert (name, other) == ("one mesh", "known") if seconds == 0.5 else name == "pipeline"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hoped", [True, False])
def test_one_plan_of_one_mesh_is_enough_where_it_is_to_be_and_a_pipeline_is_hoped_for(
    monkeypatch, first: bool, hoped: bool
) -> None:
    """A pipeline is hoped for where a plan of one mesh computes for less than half of its seconds."""
    asked: list[bool] = []
    original = ways.best

    def best(*given: Any, **named: Any) -> Any:
        seconds = 1e9 if hoped else 1e-9
        assert named["elsewhere"](seconds, 0.0) == hoped
        asked.append(named["first"] and named["elsewhere"](seconds, 0.0))
        return original(*given, **named)

    searched = compiler.one_mesh.searched
    monkeypatch.setattr(ways, "best", best)
    monkeypatch.setattr(
        compiler.one_mesh, "searched", lambda *given, **named: searched(*given, **named | {"first": first})
    )
    step, args = mlp(64, 64, layers=2)
    alpa_lite.make_plan(step, *args, cluster=MACHINES, method=alpa_lite.Auto(), verify="off")
    assert asked == [first and hoped]


@pytest.mark.parametrize(("left", "searched"), [(3.3, False), (3.5, True)])
def test_no_pipeline_is_begun_without_time_to_choose_stages_beside_what_is_kept(monkeypatch, left, searched) -> None:
    """Tracing took 1 s: choosing takes as long at least, and planning the stages has 2.4 times that."""

    def kinds(*given: Any) -> Any:
        raise KeyError("searched")

    monkeypatch.setattr(submeshes, "kinds", kinds)
    asked = Asked(Options(method=alpa_lite.Auto()), MACHINES, lambda *given: None, deadline=Deadline(left, lambda: 0.0))  # type: ignore[arg-type]
    with pytest.raises(KeyError if searched else OutOfTime):
        pipelining.pipeline(RUN, SimpleNamespace(), asked, must=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "shortened", "seconds"),
    [(12.0, True, 6.0), (7.0, True, 2.9), (7.0, False, 3.5), (6.0, True, 2.0), (5.0, True, 2.5)],
)
def test_one_mesh_leaves_pipelines_what_they_take_at_least(left: float, shortened: bool, seconds: float) -> None:
    """Tracing took 1 s: pipelines take 3.4 s, and a tenth is for what searches exceed their time by."""
    time, kept = compiler.for_one_mesh(RUN, left, shortened=shortened)
    assert time == pytest.approx(seconds)
    assert kept == (0.5 * 2.4 if seconds == 0.5 * left else 0.0)


def test_figures_of_one_mesh_are_those_of_its_program() -> None:
    """They stand beside a faster pipeline, for which the program is not made."""
    step, args = mlp(64, 64, layers=2)
    seen: list[Any] = []
    original = compiler.one_mesh.finished

    def finished(run: Any, asked: Any, mesh: Any) -> Any:
        staged = original(run, asked, mesh)
        seen.append((mesh.figures, staged))
        return staged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.one_mesh, "finished", finished)
        patch.setattr(compiler, "worth_a_pipeline", lambda *_: False)
        for overlap in (False, True):
            cluster = replace(MACHINES, overlap=overlap)
            alpa_lite.make_plan(step, *args, cluster=cluster, method=alpa_lite.Auto(), verify="off")
    assert len(seen) == 2
    for figures, staged in seen:
        assert figures.name == "one mesh" and figures.mesh_shape == staged.stages[0].found.mesh.shape
        assert (figures.step_seconds, figures.bytes_per_device) == (pytest.approx(staged.seconds), staged.needed)


@pytest.mark.parametrize(
    ("number", "left", "working", "enough"),
    [
        (16, 0.6, 0.0, True), (16, 0.4, 0.0, False), (8, 60.0, 0.0, False),
        (16, 0.6, 4.0, False), (16, 0.9, 4.0, False), (16, 1.1, 4.0, True),
    ],
)  # fmt: skip
def test_a_number_of_micro_batches_is_priced_at_once_where_there_is_time_and_it_is_another(
    monkeypatch, number: int, left: float, working: float, enough: bool
) -> None:
    """Costs are of 8 micro-batches, and pricing another number takes 1 s, and a quarter of what working out took.

    Comparing with others is never a must.
    """
    musts: list[bool] = []
    said: list[bool] = []
    run: Any = SimpleNamespace(seconds={"tracing": 1.0})

    def sliced(run: Any, costs: Any, asked: Any, counts: Any, room: float, limit: float, **named: Any) -> Any:
        musts.append(named["must"])
        if "enough" in named:
            run.seconds["costs"] = working
            used = SimpleNamespace(part_used=lambda stages, before: 0.25)
            said.append(named["enough"](SimpleNamespace(slices=slices_of(0.5, microbatches=number), priced=used), left))
        return SimpleNamespace()

    def best(layers: Any, choose: Any, deadline: Any, below: float, roughly: Any) -> Any:
        roughly(Counted(), layers.counts, below, 1.0)
        choose(Counted(), layers.counts, below, True)
        choose(Counted(), layers.counts, 0.9, False)
        return SimpleNamespace()

    monkeypatch.setattr(pipelining, "sliced", sliced)
    monkeypatch.setattr(stages, "best", best)
    layers = pipelining.Layered((8, 16), (1,), lambda count: None, lambda count, kinds: None)  # type: ignore[arg-type]
    pipelining.Chooser(run, asked_of(60.0), layers, must=True).best(1.0, {})
    assert musts == [True, True, False] and said == [enough]


@dataclass(frozen=True)
class Counted(Costs):
    """Costs of a number of micro-batches."""

    num_microbatches: int = 8
    known: Any = None


@pytest.mark.parametrize(
    ("little", "status"), [(True, "not searched: it could save too little"), (False, "not searched in time")]
)
def test_the_table_says_why_no_pipeline_was_compared(monkeypatch, little, status) -> None:
    def late(*given: Any) -> Any:
        raise OutOfTime("pipelines were not searched", little)

    monkeypatch.setattr(compiler, "worth_a_pipeline", lambda *_: True)
    monkeypatch.setattr(compiler, "pipeline", late)
    plan = planned(alpa_lite.Auto())
    assert [one.reason for one in plan.weighed().comparisons if one.name == "pipeline"] == [status]
    assert "pipelines were not searched" in plan.notes


def test_one_stage_on_all_devices_is_one_mesh_and_no_pipeline(monkeypatch) -> None:
    """Both methods say one optimum: beside one mesh, pipelines have two stages or more."""
    seen: list[Any] = []
    original = submeshes.kinds
    monkeypatch.setattr(compiler, "worth_a_pipeline", lambda *_: True)
    monkeypatch.setattr(compiler, "repaid", lambda *_: 60.0)

    def priced(*given: Any, **named: Any) -> Any:
        seen.append(given[3])
        return pricing(*given, **named)

    pricing = stages.priced
    monkeypatch.setattr(stages, "priced", priced)
    step, args = mlp(64, 64, layers=2)
    auto, one = (
        alpa_lite.make_plan(step, *args, cluster=MACHINES, method=method, verify="off")
        for method in (alpa_lite.Auto(), alpa_lite.Sharded())
    )
    assert 8 in original(MACHINES, alpa_lite.Pipeline())
    assert seen and all(8 not in kinds for kinds in seen)
    assert len(auto.stages) > 1 or auto.step_seconds == one.step_seconds
