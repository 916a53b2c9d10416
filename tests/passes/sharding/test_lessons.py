"""What searches tell one another: which meshes are not built, which is first, and how many micro-batches may fit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.layout import LogicalMesh
from alpa_lite.methods import Sharded, Zero
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import computing, grouping, search, strategies, tables
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.lessons import Beaten, Lessons, doublings, ordered
from alpa_lite.passes.sharding.race import Least, Race
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.tracing import tracing

CLUSTER = Cluster.preset("a100", nodes=1)
FLAT = LogicalMesh((8,), ("x",))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture
def built(monkeypatch) -> list[tuple[int, ...]]:
    """The meshes whose programs are built, in order."""
    shapes: list[tuple[int, ...]] = []
    build = search.strategies.build

    def noted(*args: Any, **options: Any) -> Any:
        shapes.append(args[3].mesh.shape)
        return build(*args, **options)

    monkeypatch.setattr(search.strategies, "build", noted)
    return shapes


@dataclass(frozen=True)
class On:
    mesh: LogicalMesh


def grouped(name: str = "mlp", batch: int = 64) -> tuple[Any, Any, Any]:
    fun, args = models.get(name).abstract("tiny", batch)
    traced = tracing.trace(fun, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return traced, grouping.group(traced, rules), rules


def searched(
    budget: float, cutoff: float = math.inf, lessons: Lessons | None = None, deadline: Deadline | None = None
) -> search.Found:
    return search.search(
        *grouped(), CLUSTER, Sharded(), budget=budget, cutoff=cutoff, lessons=lessons, time_limit=2.0,
        deadline=deadline,
    )  # fmt: skip


@pytest.mark.parametrize(("floor", "state", "activations"), [(10.0, 10.0, 80.0), (10.0, 25.0, 600.0), (0.0, 1.0, 7.0)])
def test_no_number_of_micro_batches_that_fits_is_left_out(floor, state, activations):
    """A step takes its state, of at least `floor` bytes, and its activations divided by the number."""
    for budget in (state + activations / share for share in (1.5, 2.0, 3.3, 8.0, 64.0)):
        fits = next(count for count in (1 << i for i in range(20)) if state + activations / count <= budget)
        count = 1
        while count < fits:
            count = doublings(count, state + activations / count, floor, budget)
        assert count == fits
    assert doublings(4, 0.0, floor, floor + 1.0) == 8  # nothing is known


def test_meshes_are_in_the_order_of_their_promise():
    shapes = Cluster.preset("a100", nodes=4).mesh_shapes()
    problems = [On(LogicalMesh(shape, ("x", "y", "z")[: len(shape)])) for shape in shapes]
    found = [one.mesh.shape for one in ordered(problems, nodes=4)]
    assert found[:2] == [(4, 8), (32,)] and sorted(found) == sorted(shapes)
    assert [len(shape) for shape in found[2:]] == sorted(len(shape) for shape in found[2:])
    assert ordered(problems, 4, problems[-1].mesh)[0] == problems[-1]
    assert ordered(problems, 1)[0].mesh.shape == (32,)


def test_a_mesh_that_is_known_to_be_no_better_is_not_built(built):
    free = searched(1e12)
    assert set(built) == set(CLUSTER.mesh_shapes()) == {mesh.shape for mesh in free.bounds}
    assert all(bound <= free.solution.objective for mesh, bound in free.bounds.items() if mesh == free.mesh)
    built.clear()
    known = {mesh: 0.0 if mesh == FLAT else 1.0 for mesh in free.bounds}
    again = searched(1e12, cutoff=1.0, lessons=Lessons(known))
    assert built == [(8,)] and again.mesh == FLAT
    assert {row.mesh_shape for row in again.candidates if row.status == "cutoff"} == {(4, 2), (2, 2, 2)}
    with pytest.raises(Beaten) as caught:
        searched(1e12, cutoff=1.0, lessons=Lessons(dict.fromkeys(free.bounds, 2.0)))
    assert caught.value.free == 2.0


@pytest.mark.slow
def test_what_does_not_fit_says_the_bytes_that_it_needs():
    """A bound of the bytes of the smallest budget that works, which takes integer programs to find: near, and below."""
    with pytest.raises(Beaten) as caught:
        searched(1e3, cutoff=1e30)
    with pytest.raises(search.InfeasibleError) as told:
        searched(1e3)
    assert told.value.smallest_budget is not None
    assert 0.5 * told.value.smallest_budget <= caught.value.least <= told.value.smallest_budget
    assert not caught.value.wider  # all meshes were tried


def test_where_the_first_mesh_does_not_fit_and_another_may_that_is_solved_at_once():
    """No dim divides by 8, but one by 4 and one by 2. There is no time for more than two meshes."""

    def step(state, batch):
        return {"w": state["w"] - jax.grad(lambda w: jnp.tanh(batch * w).sum())(state["w"])}

    traced = tracing.trace(step, [{"w": f32()}, f32(4, 6, 100_003)], {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    whole = 4 * 6 * 100_003 * 4
    search_now = functools.partial(
        search.search, traced, groups, rules, CLUSTER, Sharded(), budget=1.2 * whole, deadline=Deadline(0.0)
    )
    found = search_now(cutoff=1e30, lessons=Lessons(quick=True))
    assert found.mesh.shape == (4, 2) and found.rest is not None
    assert [row.mesh_shape for row in found.candidates if row.status == search.LATE] == [(2, 2, 2)]
    with pytest.raises(Beaten) as caught:
        search_now(budget=0.1 * whole, cutoff=1e30, lessons=Lessons(quick=True))
    assert caught.value.least > 0.1 * whole


def test_a_way_that_does_not_fit_in_equal_parts_costs_one_mesh_however_much_time_there_is(built):
    """All meshes of it were built and solved where two seemed quick: the ways that fit then had no time."""
    with pytest.raises(Beaten) as caught:
        searched(1e3, cutoff=1e30, lessons=Lessons(quick=True))
    assert built == [(8,)] and caught.value.least > 1e3 and not caught.value.wider
    built.clear()
    found = searched(1e12, cutoff=1e30, lessons=Lessons(quick=True))
    assert set(built) == {(8,), (4, 2)} and found.rest is not None
    on_all = found.rest(Deadline())
    assert set(built) == {(8,), (4, 2), (2, 2, 2)} and on_all.rest is None
    assert on_all.solution.objective <= found.solution.objective


def test_a_textbook_method_that_does_not_fit_in_equal_parts_has_no_program_built(built):
    """What it says of seconds is below what it says where it fits."""
    traced, groups, rules = grouped()
    shared = tables.Shared(traced, groups)

    def found(budget: float) -> search.Found:
        return search.Restricted(
            traced, groups, rules, CLUSTER, Zero(stage=3), budget=budget, shared=shared, time_limit=2.0,
            cutoff=math.inf, settled=lambda found: found.solution.objective,
        ).found(math.inf)  # fmt: skip

    with pytest.raises(Beaten) as caught:
        found(0.99 * tables.in_equal_parts(shared, 8))
    assert not built and caught.value.least == tables.in_equal_parts(shared, 8)
    assert 0 < caught.value.bounds[FLAT] <= found(1e12).free and built


def test_meshes_that_could_save_too_little_are_left_out():
    """The first two are solved. The third could save less than a microsecond of a step."""
    now = [0.0]
    for seconds in (60.0, math.inf):
        deadline = Deadline(seconds, lambda: now[0])
        first = searched(1e12, cutoff=1e30, lessons=Lessons(quick=True), deadline=deadline)
        assert first.rest is not None
        now[0] += 10.0
        found = first.rest(deadline)
        statuses = {row.mesh_shape: row.status for row in found.candidates}
        assert (statuses[2, 2, 2] == search.LITTLE) == (seconds == 60.0) and found.rest is None
        assert found.solution.bound <= found.solution.objective <= first.solution.objective


@pytest.mark.parametrize(("repaid", "status"), [(0.0, search.LITTLE), (60.0, search.LATE)])
def test_a_mesh_that_is_left_out_is_said_to_be_too_late_only_for_want_of_time(repaid: float, status: str):
    """60 s are left when the search stops at its first meshes, and it is not worth more, or the time is over."""
    now = [0.0]
    deadline = Deadline(60.0, lambda: now[0])
    first = searched(1e12, cutoff=1e30, lessons=Lessons(quick=True), deadline=deadline)
    assert first.rest is not None
    if status == search.LATE:
        now[0] += 60.0
    found = first.rest(deadline.repaying(repaid))
    assert {row.mesh_shape: row.status for row in found.candidates}[2, 2, 2] == status


@pytest.mark.parametrize(("name", "batch"), [("mlp", 64), pytest.param("gpt", 8, marks=pytest.mark.slow), ("moe", 16)])
def test_no_mesh_undercuts_equal_parts_on_all_devices(name: str, batch: int):
    """Neither in seconds nor in bytes, whatever the layouts; where all divides, some layouts reach them nearly."""
    traced, groups, rules = grouped(name, batch)
    shared = tables.Shared(traced, groups)
    seconds, nbytes, least = [], [], []
    for shape in CLUSTER.mesh_shapes():
        cost = MeshCost(CLUSTER, LogicalMesh(shape, ("x", "y", "z")[: len(shape)]))
        for regather in (False, True):
            space = strategies.build(traced, groups, rules, cost, shared=shared, regather=regather)
            seconds.append(computing.at_peak(shared, cost, space))
            nbytes.append(tables.in_equal_parts(shared, 8))
            fastest = sum(float(node.compute.min()) * len(node.members) for node in space.nodes)
            assert 0 < seconds[-1] <= fastest
            bound, _ = solve.bound_of_peak(space.program)
            least.append(bound)
            assert 0 < nbytes[-1] <= bound * (1 + 1e-9)
    assert max(seconds) == pytest.approx(min(seconds))
    assert max(nbytes) == pytest.approx(min(nbytes))  # state that is gathered again is kept in blocks, too
    if name == "mlp":
        assert min(least) <= 1.2 * max(nbytes)


def test_a_mesh_that_admits_nothing_says_nothing_of_bytes():
    race = Race("Sharded", 1.0, 1.0, [FLAT], Lessons())
    race.least = Least(math.inf, math.inf, FLAT)
    assert race.beaten().least == 0.0
