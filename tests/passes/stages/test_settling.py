"""Costs of layers that begin as bounds: the best stages are those that all costs worked out would give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages.choosing import Sliced
from alpa_lite.passes.stages.ranges import StageCosts, from_layers
from alpa_lite.passes.stages.settling import NEAR, settled
from alpa_lite.passes.stages.slices import SliceOptions
from alpa_lite.passes.stages.slicing import slice_stages

LAYERS, DEVICES, VARIANTS, BUDGET = 5, (1, 2, 4), 2, 14.0


class Bounded:
    """Stands in for `Priced`: what each layer costs, or bounds on it, on each kind of submesh in each variant."""

    def __init__(self, seed: int, known: frozenset[Any] = frozenset()) -> None:
        self.seed, self.known = seed, known
        rng = np.random.default_rng(seed)
        shape = (LAYERS, len(DEVICES), VARIANTS)
        shares = np.array(DEVICES)[None, :, None] ** rng.uniform(0.5, 0.95)
        self.true = {
            name: rng.uniform(1.0, 6.0, shape) / shares
            for name in ("forward", "backward", "update", "fixed_bytes", "inflight_bytes")
        }
        share = rng.uniform(0.4, 1.0, shape)
        exact = np.array([[[key in known for key in self.keys(n, k)] for k in range(3)] for n in range(LAYERS)])
        self.now = {name: np.where(exact, table, share * table) for name, table in self.true.items()}

    def keys(self, layer: int, kind: int) -> list[tuple[int, int, int]]:
        return [(layer, kind, variant) for variant in range(VARIANTS)]

    def unknown(self, stages: Sequence[Any]) -> tuple[Any, ...]:
        keys = [(layer, s.kind, s.variant) for s in stages for layer in range(s.first, s.stop)]
        return tuple(key for key in dict.fromkeys(keys) if key not in self.known)

    @property
    def certain(self) -> Bounded:
        some = Bounded(self.seed, self.known)
        sure = np.array([[[key in self.known for key in self.keys(n, k)] for k in range(3)] for n in range(LAYERS)])
        some.now["forward"] = np.where(sure, some.now["forward"], np.inf)
        return some

    def worked_out(self, keys: Sequence[Any]) -> Bounded:
        return type(self)(self.seed, self.known | frozenset(keys))

    @property
    def least_seconds(self) -> float:
        return 1e-3

    def costs(self, count: int) -> StageCosts:
        passes: dict[str, Any] = {
            name: self.now[name] / (count if name in ("forward", "backward") else 1) for name in self.now
        }
        crossing = np.full(LAYERS + 1, 0.1)
        return from_layers(
            count, **passes, boundary_seconds=crossing, boundary_bytes=crossing, devices=DEVICES, total_devices=4,
            devices_per_node=4,
        )  # fmt: skip


class Uncertain(Bounded):
    """Of which nothing can be chosen by what is known alone."""

    @property
    def certain(self) -> Bounded:
        raise InfeasibleError("nothing is known")


def choose(priced: Any, rough: bool) -> Sliced:
    schedules = ("1f1b",) if rough else ("1f1b", "eager-1f1b", "gpipe")
    found = slice_stages([priced.costs(4)], SliceOptions(BUDGET, schedules, equal=rough))
    if found.best is None:
        raise InfeasibleError("nothing fits")
    return Sliced(priced, found.best, found.weighed, found.bound)


def settle(seed: int, deadline: Deadline, rounds: float = math.inf, kind: Any = Bounded, **options: Any) -> Sliced:
    """`rounds`: how often costs are worked out before the time is over. `kind`: of the costs."""
    bounds: Any = kind(seed)
    left = [rounds]

    def work_out(costs: Any, keys: Sequence[Any], until: Deadline, must: bool) -> Any:
        left[0] -= 1
        if not must and left[0] < 0:
            raise OutOfTime
        return costs.worked_out(keys)

    return settled(bounds, choose, work_out, BUDGET, deadline, **options)


def test_time_that_ends_while_costs_are_worked_out() -> None:
    """The best stages so far are the answer; without any, there is none unless there must be."""
    with pytest.raises(OutOfTime):
        settle(1, Deadline(60.0), rounds=0, must=False)
    first = settle(1, Deadline(60.0), rounds=0)
    assert not first.priced.unknown(first.slices.stages)
    assert settle(1, Deadline(60.0), rounds=1).seconds == first.seconds >= settle(1, Deadline(60.0)).seconds


def test_bounds_that_are_worked_out_where_they_are_used_give_the_best_stages() -> None:
    """Against the search with all costs; and costs that no good stages use are not worked out."""
    everywhere = least = LAYERS * len(DEVICES) * VARIANTS
    compared = 0
    for seed in range(16):
        everything = Bounded(seed).worked_out(
            [key for n in range(LAYERS) for k in range(3) for key in Bounded(seed).keys(n, k)]
        )
        try:
            best = choose(everything, False)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                settle(seed, Deadline())
            continue
        found = settle(seed, Deadline())
        assert best.seconds * (1 - 1e-9) <= found.seconds <= best.seconds / (1 - NEAR)
        assert 1e-3 < found.bound <= best.seconds * (1 + 1e-9)
        assert not found.priced.unknown(found.slices.stages)
        assert max(found.slices.bytes) <= BUDGET
        known: Any = found.priced
        least = min(least, len(known.known))
        compared += 1
    assert compared > 8
    assert least < 0.7 * everywhere


def test_without_time_the_first_stages_that_fit_are_the_answer_or_none() -> None:
    over = Deadline(0.0)
    found = settle(1, over)
    assert found.unfinished and found.bound == 1e-3
    assert not found.priced.unknown(found.slices.stages)
    assert max(found.slices.bytes) <= BUDGET
    with pytest.raises(OutOfTime):
        settle(1, over, must=False)


def test_without_time_what_is_known_is_chosen_from_before_more_is_worked_out() -> None:
    saved = 0
    for seed in range(16):
        try:
            patient: Any = settle(seed, Deadline(0.0), kind=Uncertain)
        except InfeasibleError:
            continue
        found: Any = settle(seed, Deadline(0.0))
        assert max(found.slices.bytes) <= BUDGET
        assert not found.priced.unknown(found.slices.stages)
        assert found.priced.known <= patient.priced.known
        saved += len(patient.priced.known) - len(found.priced.known)
    assert saved


def test_stages_beyond_a_limit_are_not_worked_out() -> None:
    found = settle(1, Deadline(), limit=0.0)
    known: Any = found.priced
    assert found.seconds > 0.0 and not math.isinf(found.seconds)
    assert not known.known


def test_where_the_time_is_over_stages_whose_transfers_hide_are_compared() -> None:
    """By costs that are worked out, within memory, and never slower than the answer without them."""

    def hiding(priced: Any) -> Sliced:
        found = slice_stages([priced.costs(4)], SliceOptions(BUDGET, ("eager-1f1b",), equal=True))
        if found.best is None:
            raise InfeasibleError("nothing fits")
        return Sliced(priced, found.best, found.weighed, found.bound)

    faster = 0
    for seed in range(16):
        try:
            without = settle(seed, Deadline(0.0))
        except InfeasibleError:
            continue
        found = settle(seed, Deadline(0.0), hiding=hiding)
        assert not found.priced.unknown(found.slices.stages)
        assert max(found.slices.bytes) <= BUDGET
        assert found.seconds <= without.seconds
        faster += found.seconds < without.seconds
        if found.seconds < without.seconds:
            assert found.slices.schedule == "eager-1f1b"
    assert faster


def test_a_rough_search_ends_where_it_is_all_that_is_asked_for() -> None:
    """Its stages are worked out; it says that others were not searched, and is asked with the time that is left."""
    asked: list[tuple[float, float]] = []

    def enough(found: Sliced, left: float) -> bool:
        asked.append((found.seconds, left))
        return True

    for seed in (1, 2, 11):
        found = settle(seed, Deadline(60.0), enough=enough)
        assert found.rough and found.bound == 1e-3 and not found.unfinished
        assert found.slices.schedule == "1f1b" and not found.priced.unknown(found.slices.stages)
        assert asked.pop() == (found.seconds, pytest.approx(60.0, abs=5.0))
        all_of_them = settle(seed, Deadline(60.0), enough=lambda found, left: False)
        assert not all_of_them.rough and all_of_them.seconds <= found.seconds
        limit = 0.9 * found.seconds  # of stages that are not of interest it is not asked
        assert not settle(seed, Deadline(60.0), enough=enough, limit=limit).rough and not asked


def test_a_part_of_the_time_is_for_all_schedules() -> None:
    """Of 10 s, 7 are for a rough search: working out costs takes 4 s each time, and two are enough of it."""
    now, calls = [0.0], []

    def choose_in_time(priced: Any, rough: bool) -> Sliced:
        calls.append(rough)
        return choose(priced, rough)

    def work_out(costs: Any, keys: Sequence[Any], until: Deadline, must: bool) -> Any:
        now[0] += 4.0
        return costs.worked_out(keys)

    bounds: Any = Bounded(5)
    settled(bounds, choose_in_time, work_out, BUDGET, Deadline(1000.0, lambda: now[0]))
    unhurried, calls[:], now[0] = calls.count(True), [], 0.0
    assert unhurried > 2
    settled(bounds, choose_in_time, work_out, BUDGET, Deadline(10.0, lambda: now[0]))
    assert calls == [True, True, False]
