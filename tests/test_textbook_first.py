"""Auto is never slower than a textbook plan, be the time ever so short and the machine ever so slow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite import one_mesh, textbook_first
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.programs import ways
from alpa_lite.passes.programs.outcomes import Outcome, Way, unknown
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.lessons import Beaten, Lessons
from tests import zoo

METHODS = (
    alpa_lite.DataParallel(), alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3), alpa_lite.TensorParallel(),
)  # fmt: skip
ROUNDING = 1e-9
A100, V5E, LOCAL = Cluster.preset("a100", nodes=1), Cluster.preset("v5e"), Cluster.local()


def planned(name: str, method: Any, cluster: Cluster, **options: Any) -> alpa_lite.Plan:
    step, args = zoo.get(name).make()
    shapes = jax.eval_shape(lambda: args)
    return alpa_lite.make_plan(step, *shapes, cluster=cluster, method=method, verify="off", **options)


@functools.cache
def textbook(name: str, cluster: Cluster) -> dict[str, float]:
    """Seconds of the methods that fit."""
    found = {}
    for method in METHODS:
        try:
            found[method.describe()] = planned(name, method, cluster).step_seconds
        except AlpaLiteError:
            continue
    return found


def check(name: str, cluster: Cluster, seconds: float) -> None:
    auto = planned(name, alpa_lite.Auto(), cluster, search_time_limit=seconds)
    others = textbook(name, cluster)
    assert len(others) > 2
    assert {method: s for method, s in others.items() if s < auto.step_seconds * (1 - ROUNDING)} == {}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("linen_gpt", "nnx_gpt")])
def test_in_half_a_second_auto_is_no_slower_than_any_textbook_plan(name: str) -> None:
    check(name, A100, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("linen_unet", A100),
        ("linen_unet", LOCAL),
        ("linen_translator", A100),
        ("nnx_resnet", V5E),
        ("linen_moe", LOCAL),
    ],
)
def test_auto_is_no_slower_on_other_models_and_devices(name: str, cluster: Cluster) -> None:
    check(name, cluster, 0.5)


def test_where_the_search_finds_nothing_the_best_textbook_plan_is_returned(monkeypatch) -> None:
    """As on a machine too slow for any free program; the plan says which method it is, and claims no proof."""

    def nothing(*given: Any, **named: Any) -> Any:
        raise Beaten({})

    others = textbook("linen_gpt", A100)
    monkeypatch.setattr(one_mesh.search, "search", nothing)
    plan = planned("linen_gpt", alpa_lite.Sharded(), A100)
    assert plan.step_seconds == min(others.values())
    (chosen,) = [c for c in plan.candidates if c.status == "chosen"]
    assert chosen.method in ("DataParallel", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel")
    assert plan.solver.status == "feasible" and plan.solver.bound < plan.solver.objective


@pytest.fixture
def analysed(monkeypatch) -> Callable[..., list[int]]:
    """The numbers of micro-batches that a method analyses below some multiple of its bound, in 12 MiB a device."""

    def counts_of(method: Any, batch: int, multiple: float = math.inf) -> list[int]:
        counts: list[int] = []
        looped, evaluated = one_mesh.looped, textbook_first.evaluated

        def noted(run: Any, step: Any, asked: Any, way: Any) -> Any:
            counts.append(way.count)
            return looped(run, step, asked, way)

        def alone(*given: Any) -> None:
            with monkeypatch.context() as within:
                within.setattr(one_mesh, "looped", noted)
                found = evaluated(*given)
                found.below(multiple * found.left[0].free, unknown)
            raise RuntimeError("only this phase is of interest")

        with monkeypatch.context() as outer:
            outer.setattr(textbook_first, "METHODS", {"the method": method})
            outer.setattr(textbook_first, "evaluated", alone)
            state = {"a": jax.ShapeDtypeStruct((64, 4096), "float32")}
            x = jax.ShapeDtypeStruct((batch, 512, 64), "float32")
            with pytest.raises(RuntimeError, match="of interest"):
                alpa_lite.make_plan(
                    squared, state, x, cluster=A100, method=alpa_lite.Sharded(), memory_per_device=12 * 2**20
                )
        return counts

    return counts_of


def test_micro_batches_that_do_not_divide_over_the_devices_are_not_analysed(analysed) -> None:
    """Eight examples on eight devices: of two micro-batches, neither can be cut over the devices."""
    first, *others = analysed(alpa_lite.Zero(2), batch=64)  # enough for the number of micro-batches that may fit
    assert first == 1 and others
    assert analysed(alpa_lite.Zero(2), batch=8) == [1]


def test_more_micro_batches_are_not_analysed_where_the_program_of_fewer_shows_that_they_are_slower(analysed) -> None:
    """Tensor parallelism sums activations, which takes far longer than the products that bound what does not fit."""
    method = alpa_lite.TensorParallel()
    assert analysed(method, batch=64, multiple=2.0) == [1]
    assert len(analysed(method, batch=64)) > 1


def test_without_a_loop_that_adds_up_gradients_zero_1_is_not_evaluated_again(monkeypatch) -> None:
    restricted, methods = textbook_first.search.Restricted, []

    def noted(*given: Any, **named: Any) -> Any:
        methods.append(given[4])
        return restricted(*given, **named)

    monkeypatch.setattr(textbook_first.search, "Restricted", noted)
    planned("linen_gpt", alpa_lite.Sharded(), A100)
    assert methods.count(alpa_lite.Zero(2)) == 1 and alpa_lite.Zero(1) not in methods


def test_more_micro_batches_of_a_method_are_analysed_only_where_their_bound_is_below_what_was_found() -> None:
    """DataParallel needs more of them for its activations, and takes 1 s at least with one."""
    tried: list[Way] = []

    def solve(way: Way, cutoff: float, lessons: Lessons, deadline: Deadline) -> Outcome[Any]:
        tried.append(way)
        if way.count < 4:
            raise Beaten({}, least=40.0) if way.count > 1 else Beaten({LogicalMesh((8,), ("x",)): 1.0}, least=40.0)
        return Outcome(None, 1.5, 1.5)

    def evaluated() -> textbook_first.TextbookPlans:
        tried.clear()
        return textbook_first.TextbookPlans({}, None, (ways.begun(solve, None, floor=0.0, budget=10.0),))

    searched = {LogicalMesh((8,), ("x",)): 2.0, LogicalMesh((4, 2), ("x", "y")): 0.5}  # with any operations
    assert evaluated().below(1.9, lambda way: searched) is None and tried == [Way(1)]
    found = evaluated().below(1.995, lambda way: searched)  # fewer groups are tied than where 2 s are the bound
    assert found is not None and found.best == Way(4)
    known = evaluated()
    assert tried == [Way(1)]
    assert known.below(0.99, unknown) is None and tried == [Way(1)]
    found = known.below(2.0, unknown)
    assert found is not None and found.best == Way(4) and tried == [Way(1), Way(4)]
    assert known.below(1.2, unknown) is None


@pytest.mark.parametrize(
    ("bound", "alike", "begun"),
    [(1.0, True, False), (1.0, False, True), (1.02, False, False), (0.9, True, True)],
)
def test_methods_that_wait_are_begun_only_where_the_search_does_not_show_that_they_are_slower(bound, alike, begun):
    """Of programs that tie groups otherwise, the bound is taken to be a little lower."""
    tried: list[float] = []

    def begin(seconds: float) -> ways.Begun[Any]:
        tried.append(seconds)
        return ways.begun(lambda *given: Outcome(None, 0.95, 0.95), 1, floor=0.0, budget=1.0)

    waiting = textbook_first.Waiting(Way(), lambda: alike, begin)
    plans = textbook_first.TextbookPlans({}, None, (), (waiting,))
    found = plans.below(1.0, lambda way: {LogicalMesh((8,), ("x",)): bound, LogicalMesh((4, 2), ("x", "y")): 0.1})
    assert (found is not None, bool(tried)) == (begun, begun)
    assert tried == [] or tried == [1 - textbook_first.search.CLOSED]


def test_one_method_that_fits_is_evaluated_before_the_search(monkeypatch) -> None:
    begun, search_, happened = textbook_first._begun, one_mesh.search.search, []

    def method(*given: Any) -> Any:
        happened.append(given[5])
        return begun(*given)

    def search(*given: Any, **named: Any) -> Any:
        happened.append("search")
        return search_(*given, **named)

    monkeypatch.setattr(textbook_first, "_begun", method)
    monkeypatch.setattr(one_mesh.search, "search", search)
    plan = planned("linen_gpt", alpa_lite.Sharded(), A100)
    assert happened[:2] == ["Zero(2)", "search"]
    assert plan.step_seconds <= min(textbook("linen_gpt", A100).values()) * (1 + ROUNDING)


def squared(state: Any, x: Any) -> Any:
    def loss(state: Any) -> Any:
        return (jax.numpy.tanh(x @ state["a"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), x.mean()
