"""The choice of micro-batches and of what is computed again, on plans whose seconds and bytes are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.layers.remat import Remat
from alpa_lite.passes.programs.ways import ANY, Outcome, Way, best, quickest
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.sharding.lessons import Beaten, Lessons

LAYERS = 16
MESH = LogicalMesh((8,), ("x",))
COSTS = {"none": 0.0, "selective": 0.05, "layer": 0.3}
SAVED = {"none": 0.0, "selective": 0.5, "layer": 0.9}


def recomputed(remat: Remat) -> float:
    first, total = remat.first or (1, 1)
    return first / total


class Model:
    """A step of 1 s and 0.1 s for each micro-batch, with 10 bytes of state and 80 of activations.

    Within `budget` bytes it is slower by `slower` of its seconds for each byte that is missing, up to `missing` of
    them; with more missing it does not fit.
    """

    def __init__(
        self, budget: float, slower: float = 0.1, missing: float = 20.0, most: int = 64, narrow: int = 0,
    ):  # fmt: skip
        self.budget, self.slower, self.missing, self.most = budget, slower, missing, most
        self.tells, self.narrow = False, narrow
        self.tried: list[Way] = []
        self.now = 0.0

    def seconds(self, way: Way) -> tuple[float, float]:
        """Within the budget, and without one."""
        share = recomputed(way.remat)
        free = 1.0 + 0.1 * (way.count - 1) + COSTS[way.remat.choice] * share
        lacks = 10 + 80 * (1 - SAVED[way.remat.choice] * share) / way.count - self.budget
        return (math.inf if lacks > self.missing else free * (1 + self.slower * max(lacks, 0.0))), free

    def __call__(self, way: Way, cutoff: float, lessons: Lessons) -> Outcome[Way]:
        self.tried.append(way)
        self.lessons = lessons
        self.now += 1.0
        if way.count > self.most:
            raise MicrobatchError("the batch norm is of the whole batch")
        found, free = self.seconds(way)
        if found < cutoff and not (lessons.quick and way.count == self.narrow):
            return Outcome(way, found, free, LAYERS if way.remat.choice != "none" else 0, MESH, {MESH: free})
        if cutoff < math.inf:
            least = 10 + 80 / way.count if self.tells else 0.0
            raise Beaten({MESH: free}, least, wider=way.count == self.narrow and lessons.quick)
        raise InfeasibleError("too small", 10 + 80 / way.count)

    def best(self, remats: Any = ("none",), given: int | None = None, seconds: float = 1e9, **options: Any) -> Any:
        deadline = Deadline(seconds, clock=lambda: self.now)
        return best(self, remats, given, floor=10.0, budget=self.budget, deadline=deadline, **options)


def least(model: Model, ways: list[Way]) -> Way:
    return min(ways, key=lambda way: model.seconds(way)[0])


def test_where_memory_does_not_bind_nothing_else_is_tried() -> None:
    model = Model(budget=100.0)
    chosen = model.best(("none", "selective", "layer"))
    assert (chosen.value, chosen.notes, chosen.late, model.tried) == (Way(), (), (), [Way()])


def test_more_micro_batches_are_taken_where_they_are_faster() -> None:
    """One fits, but its layouts are slow: two and four are faster, eight is not, and cannot be."""
    model = Model(budget=75.0)
    chosen = model.best()
    assert chosen.value == least(model, [Way(2**i) for i in range(6)]) == Way(2)
    assert "1 micro-batch would take 2.5 s" in chosen.notes[0] and model.tried == [Way(1), Way(2)]
    model = Model(budget=20.0, missing=35.0)
    assert model.best().value == least(model, [Way(2**i) for i in range(6)]) == Way(8)
    assert Way(32) not in model.tried


def test_the_least_that_fits_is_found_without_asking_what_would_fit() -> None:
    model = Model(budget=30.0, slower=0.0, missing=0.0)
    chosen = model.best()
    assert chosen.value == Way(4) and model.tried == [Way(1), Way(2), Way(4)]
    assert "4 micro-batches: with fewer, the step does not fit into memory_per_device=30 B" in chosen.notes[0]


def test_what_cannot_fit_by_its_bytes_is_not_tried() -> None:
    """With one micro-batch 90 bytes are needed, with b of them 10 + 80 / b: 4 for 30 bytes, and 16 for 15."""
    for budget, tried in ((30.0, [1, 4]), (29.9, [1, 8]), (15.0, [1, 16])):
        model = Model(budget=budget, slower=0.0, missing=0.0)
        model.tells = True
        assert model.best().value == Way(tried[-1]) and model.tried == [Way(count) for count in tried]


def test_the_first_number_that_may_fit_is_tried_though_time_is_short() -> None:
    """One try takes 1 s: of 1.5 s too little is left after a misfit, and of 2.5 s after two, which end the search."""
    model = Model(budget=30.0, slower=0.0, missing=0.0)
    model.tells = True
    assert model.best(seconds=1.5, must=False).value == Way(4) and model.tried == [Way(1), Way(4)]
    model = Model(budget=30.0, slower=0.0, missing=0.0)  # says nothing of bytes: 1, 2
    with pytest.raises(OutOfTime):
        model.best(seconds=2.5, must=False)
    assert model.tried == [Way(1), Way(2)]
    assert model.best(seconds=2.5).value == Way(4)  # whoever must goes on


def test_what_the_first_meshes_alone_do_not_fit_is_tried_on_all_at_last() -> None:
    """2 micro-batches fit, but for the first meshes: 4 are found, and then 2, which are faster."""
    model = Model(budget=50.0, slower=0.0, missing=0.0, narrow=2)
    assert model.best().value == Way(2) and model.tried == [Way(1), Way(2), Way(4), Way(2)]
    assert not model.lessons.quick
    model = Model(budget=50.0, slower=0.0, missing=0.0, most=2, narrow=2)
    assert model.best().value == Way(2) and model.tried == [Way(1), Way(2), Way(4), Way(2)]  # 4 are refused


def test_bounds_and_the_best_mesh_are_handed_on() -> None:
    model = Model(budget=75.0)
    model.best()
    assert model.tried[-1] == Way(2) and model.lessons.first == MESH
    assert dict(model.lessons.bounds) == {MESH: 1.0}  # of one micro-batch


def test_computing_again_competes_by_seconds() -> None:
    ways = [Way(2**i, Remat(choice)) for i in range(4) for choice in ("none", "selective", "layer")]
    model = Model(budget=50.0, missing=45.0)
    chosen = model.best(("none", "selective", "layer"))
    assert chosen.value == least(model, ways) == Way(1, Remat("selective"))
    model = Model(budget=50.0, slower=0.0, missing=0.0)
    assert model.best(("none", "selective", "layer")).value == least(model, ways)


def test_the_fewest_layers_that_pay_are_computed_again() -> None:
    model = Model(budget=60.0, slower=0.02, missing=0.0)
    assert model.best(("layer",), given=1).value == Way(1, Remat("layer"))  # asked for
    chosen = model.best(("none", "layer"), given=1)
    k, n = chosen.value.remat.first
    assert n == LAYERS and model.seconds(chosen.value)[0] < model.seconds(Way(1, Remat("layer")))[0]
    needs = [10 + 80 * (1 - 0.9 * i / n) <= 60.0 for i in (k, k - 2)]
    assert needs == [True, False]
    assert str(chosen.value) == f"1 micro-batch, rematerialisation 'layer in the first {k} of 16 layers'"


def test_what_the_time_does_not_allow_is_said() -> None:
    model = Model(budget=20.0, missing=35.0)
    chosen = model.best(seconds=2.5)
    assert model.tried == [Way(1), Way(2)]
    assert chosen.late == (Way(4),)


def test_computing_again_begins_with_one_micro_batch() -> None:
    """2 micro-batches fit; one that computes something again is faster, and nothing that computes more can be."""
    model = Model(budget=50.0, missing=5.0)
    assert model.best(("none", "selective", "layer")).value == Way(1, Remat("selective"))
    assert model.tried[:3] == [Way(1), Way(2), Way(1, Remat("selective"))]
    assert all(way.remat.choice != "layer" for way in model.tried)


def test_the_meshes_that_were_not_searched_are_for_the_best_way_alone() -> None:
    model, searched = Model(budget=50.0, missing=0.0), []

    def first_mesh(way: Way, cutoff: float, lessons: Lessons) -> Outcome[Way]:
        found = model(way, cutoff, lessons)

        def rest() -> Outcome[Way]:
            searched.append(way)
            return replace(found, seconds=0.9 * found.seconds, rest=None)

        return replace(found, rest=rest)

    remats = ("none", "selective")
    found = best(first_mesh, remats, None, floor=10.0, budget=50.0, deadline=Deadline(1e9, clock=lambda: model.now))
    assert searched == [Way(1, Remat("selective"))] == [found.value]
    assert "this 0.945 s" in found.notes[0]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Model(budget=15.0, missing=0.0, most=2), "does not fit with 2 of them"),
        (lambda: Model(budget=15.0, missing=0.0, most=1), "Micro-batches do not help: the batch norm"),
        (lambda: Model(budget=9.0, missing=0.0), "^too small$"),  # the state alone fills it
    ],
)
def test_why_micro_batches_do_not_help_is_said(model: Callable[[], Model], said: str) -> None:
    with pytest.raises(InfeasibleError, match=said) as caught:
        model().best()
    assert caught.value.smallest_budget == 90.0


def test_a_given_number_is_kept() -> None:
    model = Model(budget=75.0)
    assert model.best(given=1).value == Way(1) and model.tried == [Way(1)]
    with pytest.raises(MicrobatchError):
        Model(budget=75.0).best(given=128)


def test_any_plan_is_below_the_first_cutoff() -> None:
    assert Model(budget=100.0)(Way(), ANY, Lessons()).seconds == 1.0


def test_what_is_computed_again_is_read_as_it_is_written() -> None:
    for remat in (Remat(), Remat("layer"), Remat("selective", (3, 12))):
        assert Remat.parse(str(remat)) == remat
    assert Remat.parse("layer in the first 3 layers") is None and Remat.parse("all") is None


def known(way: Way, seconds: float) -> tuple[Way, Outcome[Way]]:
    return way, Outcome(way, seconds, 0.5, 0, MESH)


def test_a_plan_that_is_known_is_returned_unless_a_faster_one_is_found() -> None:
    for seconds, expected in ((1.05, Way(4)), (1.35, Way(2))):  # two take 1.1 s, and four 1.3 s
        model = Model(budget=50.0, slower=0.0, missing=0.0)
        chosen = model.best(start=known(Way(4), seconds))
        assert chosen.value == expected
    model = Model(budget=5.0, missing=0.0)  # nothing else fits
    assert model.best(start=known(Way(4), 9.0)).value == Way(4)
    assert Way(64) not in model.tried  # not even with twice, and four times as many


def test_a_plan_that_is_known_is_returned_though_the_time_is_over() -> None:
    model = Model(budget=30.0, slower=0.0, missing=0.0)
    chosen = model.best(seconds=0.0, must=False, start=known(Way(4), 9.0))
    assert chosen.value == Way(4) and len(model.tried) == 1 and Way(2) in chosen.late


def test_what_cannot_undercut_a_method_is_not_tried() -> None:
    """One micro-batch takes 1 s at least, and what more take is no less."""
    model = Model(budget=30.0, slower=0.0, missing=0.0)
    assert quickest(model, None, floor=10.0, budget=30.0, below=1.0) is None and model.tried == [Way(1)]
    found = quickest(Model(budget=30.0, slower=0.0, missing=0.0), None, floor=10.0, budget=30.0, below=math.inf)
    assert found is not None and found[0] == Way(4)
