"""The loop of the search, on random trees whose leaves are plans: bounds, optimality, budgets, ties."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.passes.search.best_first import MARGIN, Candidate, Expansion, FoundPlan, Kind, cutoff_of, search


@dataclass(frozen=True, eq=False)
class Tree:
    """A set of plans: those of its branches, and one of its own. Its estimate may be wrong, its bound is not."""

    key: tuple[int, ...]
    own: float
    branches: tuple[Tree, ...]
    error: float = 0.0
    work: int = 1
    kind: Kind = (0, 1, 0)

    @property
    def candidate(self) -> Candidate:
        return Candidate(str(self.key), self.kind, self.key, self.estimate, self.expand)

    @property
    def least(self) -> float:
        return min([self.own, *(branch.least for branch in self.branches)])

    def estimate(self) -> tuple[float, float]:
        return 0.9 * self.least, max(0.9 * self.least, self.least - self.error)

    def expand(self, cutoff: float) -> Expansion:
        plans = [FoundPlan(self.kind, self.own, self.key)] if math.isfinite(self.own) else []
        return Expansion([branch.candidate for branch in self.branches], plans, work=self.work)

    def size(self) -> int:
        return 1 + sum(branch.size() for branch in self.branches)


@st.composite
def trees(draw, depth: int = 3, key: tuple[int, ...] = ()) -> Tree:
    own = draw(st.one_of(st.just(math.inf), st.integers(1, 40).map(float)))
    number = draw(st.integers(0, 3)) if depth else 0
    branches = tuple(draw(trees(depth - 1, (*key, n))) for n in range(number))
    error = draw(st.sampled_from([0.0, 0.5, 3.0]))
    return Tree(key, own if branches else draw(st.integers(1, 40).map(float)), branches, error)


@settings(max_examples=200, deadline=None)
@given(trees())
def test_estimates_from_below_lead_to_the_best_plan(tree: Tree) -> None:
    incumbent, found = search([tree.candidate], 10**9)
    assert incumbent is not None and incumbent.seconds == tree.least
    assert found.bound <= tree.least and not found.unreached
    assert found.expanded + found.pruned + len(found.estimated) <= tree.size()


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(0, 20), st.integers(0, 20))
def test_a_larger_budget_is_never_worse_and_every_budget_finds_a_plan(tree: Tree, less: int, more: int) -> None:
    (worse, low), (better, high) = (search([tree.candidate], budget) for budget in sorted((less, less + more)))
    assert worse is not None and better is not None
    assert better.seconds <= worse.seconds
    assert low.bound <= high.bound <= tree.least
    assert high.expanded >= low.expanded
    assert bool(low.unreached) or worse.seconds == tree.least


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4).flatmap(lambda number: st.tuples(*(trees(key=(n,)) for n in range(number)))), st.randoms())
def test_the_order_of_the_roots_does_not_matter(some: tuple[Tree, ...], random) -> None:
    roots = [Tree((-1, n), math.inf, (tree,)).candidate for n, tree in enumerate(some)]
    mixed = roots[:]
    random.shuffle(mixed)
    (one, found), (other, again) = search(roots, 7), search(mixed, 7)
    assert (one and one.value, found.bound, found.work) == (other and other.value, again.bound, again.work)


def test_a_plan_of_another_kind_must_save_the_gap_of_the_search() -> None:
    incumbent = FoundPlan((0, 1, 0), 100.0, None)
    assert cutoff_of(incumbent, (2, 1, 0)) == 100.0 * (1 - MARGIN)
    assert 99.9 < cutoff_of(incumbent, (0, 1, 0)) < 100.0
    assert cutoff_of(None, (2, 1, 0)) == math.inf


def test_a_limit_of_seconds_ends_the_search_after_the_first_plan_and_says_so() -> None:
    leaves = tuple(Tree((n,), 10.0 - n, ()) for n in range(3))
    incumbent, found = search([Tree((9,), 20.0, leaves).candidate], 10**9, is_over=lambda: True)
    assert found.truncated and incumbent is not None and incumbent.seconds == 20.0
    assert sorted(found.unreached) == ["(0,)", "(1,)", "(2,)"]


@settings(max_examples=60, deadline=None)
@given(trees(key=(0,)), st.integers(0, 9))
def test_no_plan_is_slower_than_a_floor_whatever_the_budget(tree: Tree, budget: int) -> None:
    late = tree.least + 0.5, tree.least + 0.5
    floor = replace(Tree((1,), tree.least + 1.0, ()).candidate, is_floor=True, estimate=lambda: late)
    incumbent, _ = search([tree.candidate, floor], budget)
    assert incumbent is not None and incumbent.seconds <= tree.least + 1.0
