"""The search of a plan: floors, effort, truncation, configurations; plans depend on nothing but their inputs."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alpa_lite
import gallery
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.layers.rematerialisation import Remat
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.search.best_first import MARGIN, Candidate, Expansion, FoundPlan, Kind, cutoff_of, search
from alpa_lite.passes.search.configs import ExecutionConfig, Family, Record, next_feasible_microbatches
from alpa_lite.passes.search.one_mesh import OneMeshSearch
from alpa_lite.passes.search.pipeline_analysis import PipelineAnalyses
from gallery.steps import mlp
from tests.helpers import two_machines

ROOT = Path(__file__).parents[3]
METHODS = (
    alpa_lite.DataParallel(), alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3), alpa_lite.TensorParallel(),
)  # fmt: skip
A100, V5E, LOCAL = Cluster.preset("a100", nodes=1), Cluster.preset("v5e"), Cluster.local()


def planned(name: str, method: Any, cluster: Cluster, **options: Any) -> alpa_lite.Plan:
    step, args = gallery.get("zoo", name).make()
    shapes = jax.eval_shape(lambda: args)
    return alpa_lite.make_plan(step, *shapes, cluster=cluster, method=method, verify="off", **options)


@functools.cache
def floors(name: str, cluster: Cluster) -> dict[str, float]:
    """Seconds of the textbook methods that fit."""
    found = {}
    for method in METHODS:
        try:
            found[method.describe()] = planned(name, method, cluster).step_seconds
        except AlpaLiteError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("linen_gpt", A100),
        ("nnx_gpt", A100),
        ("linen_unet", A100),
        ("linen_unet", LOCAL),
        ("linen_translator", A100),
        ("nnx_resnet", V5E),
        ("linen_moe", LOCAL),
    ],
)
@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_auto_is_no_slower_than_any_textbook_plan(name: str, cluster: Cluster, effort: str) -> None:
    auto = planned(name, alpa_lite.Auto(), cluster, effort=effort)
    others = floors(name, cluster)
    assert len(others) > 2
    assert {method: s for method, s in others.items() if s < auto.step_seconds * (1 - 1e-4)} == {}


@functools.cache
def small(**options: Any) -> alpa_lite.Plan:
    step, args = mlp(256, 512, 3)
    return alpa_lite.make_plan(step, *args, cluster=two_machines(2**30, 1e9), verify="off", **options)


def test_a_plan_says_what_its_search_did() -> None:
    plan = small()
    search = plan.search
    assert search is not None and search.effort == "normal" and 0 < search.work < search.allowed
    assert search.expanded > 0 and not search.truncated
    assert 0 < search.bound <= plan.step_seconds
    assert alpa_lite.Plan.from_json(plan.to_json()).search == search


def test_planned_pipelines_take_no_less_than_the_bound_which_counts_more_than_products(monkeypatch) -> None:
    found: list[tuple[float, float, float]] = []

    def build(self: PipelineAnalyses, *args: Any, **more: Any) -> Staged:
        staged = whole(self, *args, **more)
        found.append((self.products, self.bound, staged.seconds))
        return staged

    whole = PipelineAnalyses.build
    monkeypatch.setattr(PipelineAnalyses, "build", build)
    for width, examples, bandwidth in ((2048, 2048, 1e9), (4096, 8192, 1e9), (8192, 8192, 1e10)):
        step, args = mlp(width, examples, 8)
        alpa_lite.make_plan(step, *args, cluster=two_machines(2**34, bandwidth), verify="off")
    assert len(found) > 2
    assert all(products < bound <= seconds for products, bound, seconds in found)


def test_the_same_stages_are_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline that is built again, only its simulation is charged."""
    costs: list[tuple[int, int]] = []

    def build(self: PipelineAnalyses, *args: Any, **more: Any) -> Staged:
        start = self.work
        whole(self, *args, **more)
        between = self.work
        staged = whole(self, *args, **more)
        costs.append((between - start, self.work - between))
        return staged

    whole = PipelineAnalyses.build
    monkeypatch.setattr(PipelineAnalyses, "build", build)
    step, args = mlp(2048, 2048, 8)
    alpa_lite.make_plan(step, *args, cluster=two_machines(2**34, 1e9), verify="off")
    assert costs and all(0 < again < first / 2 for first, again in costs)


def test_more_effort_is_never_slower() -> None:
    assert small(effort="quick").step_seconds >= small().step_seconds >= small(effort="thorough").step_seconds


def test_a_plan_that_a_limit_of_seconds_cuts_short_says_so_and_is_not_cached(tmp_path: Path) -> None:
    plan = small(planning_time_limit=1e-9, cache_dir=tmp_path)
    assert plan.search is not None and plan.search.truncated and plan.search.unreached
    assert any("planning_time_limit" in note for note in plan.notes)
    assert not list(tmp_path.iterdir())
    small(cache_dir=tmp_path)
    assert list(tmp_path.iterdir())


def text_of(plan: alpa_lite.Plan) -> str:
    return json.dumps(plan.to_json(), sort_keys=True)


@pytest.mark.slow
def test_a_plan_depends_on_nothing_but_its_inputs() -> None:
    """The same file from processes with other hashes, on one core, and after other plans in this process."""
    program = (
        "import json, jax; jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 8);"
        "from tests.passes.search.test_planner import small, text_of; print(text_of(small()))"
    )
    texts = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(done.stdout.strip().splitlines()[-1])
    planned("linen_mlp", alpa_lite.Auto(), A100)
    assert texts[0] == texts[1] == text_of(small())


def test_no_pass_reads_a_clock() -> None:
    """But for the optional limit of the search, which is off by default."""
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "passes").rglob("*.py")
        if re.search(r"perf_counter|monotonic|time\.time\(|process_time", path.read_text())
    }
    assert readers == {"passes/search/planner.py"}


NONE, SELECTIVE, LAYER, FIRST = Remat(), Remat("selective"), Remat("layer"), Remat("layer", (1, 4))


def test_more_micro_batches_and_more_recomputation_only_add() -> None:
    configs = [ExecutionConfig(count, remat) for count in (1, 2) for remat in (NONE, SELECTIVE, LAYER, FIRST)]
    adds = {(str(a), str(b)) for a, b in itertools.product(configs, configs) if a.only_adds_to(b)}
    assert all((str(config), str(config)) in adds for config in configs)
    assert (str(configs[6]), str(configs[1])) in adds  # two micro-batches and layers, to one and selective
    assert (str(configs[1]), str(configs[4])) not in adds
    assert (str(configs[3]), str(configs[1])) not in adds  # some layers save less of these than selective everywhere
    assert {a for a, b in adds if b == str(configs[0])} == {str(config) for config in configs}


@pytest.mark.parametrize(("floor", "state", "activations"), [(0.0, 0.0, 8.0), (1.0, 2.0, 30.0), (3.0, 3.5, 100.0)])
def test_no_number_of_micro_batches_that_fits_is_left_out(floor: float, state: float, activations: float) -> None:
    """Plans that take `state`, of which `floor` is the least, and an equal part of the activations."""

    def needed(count: int) -> float:
        return state + activations / count

    for budget in (state + 0.3, state + 1.0, state + 7.0):
        count = 1
        while needed(count) > budget:
            more = next_feasible_microbatches(count, needed(count), floor, budget)
            assert all(needed(count << i) > budget for i in range((more // count).bit_length() - 1))
            count = more


def test_estimates_scale_communication_with_fewer_micro_batches_and_computing_with_rematerialisation() -> None:
    many = ExecutionConfig(4)
    assert ExecutionConfig(1).scale(many, 6.0, 8.0) == pytest.approx(6.5)
    assert ExecutionConfig(4, LAYER).scale(many, 6.0, 8.0) == pytest.approx(10.0)
    assert many.scale(many, 6.0, 8.0) == 8.0 < ExecutionConfig(8).scale(many, 6.0, 8.0)


@dataclass(frozen=True, eq=False)
class Tree:
    """A set of plans: those of its branches, and one of its own. Its estimate may be wrong, its bound is not."""

    key: tuple[int, ...]
    own: float
    branches: tuple["Tree", ...]
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


@settings(max_examples=120, deadline=None)
@given(trees())
def test_estimates_from_below_lead_to_the_best_plan(tree: Tree) -> None:
    incumbent, found = search([tree.candidate], 10**9)
    assert incumbent is not None and incumbent.seconds == tree.least
    assert found.bound <= tree.least and not found.unreached
    assert found.expanded + found.pruned + len(found.estimated) <= tree.size()


@settings(max_examples=120, deadline=None)
@given(trees(), st.integers(0, 20), st.integers(0, 20))
def test_a_larger_budget_is_never_worse_and_every_budget_finds_a_plan(tree: Tree, less: int, more: int) -> None:
    (worse, low), (better, high) = (search([tree.candidate], budget) for budget in sorted((less, less + more)))
    assert worse is not None and better is not None
    assert better.seconds <= worse.seconds
    assert low.bound <= high.bound <= tree.least
    assert high.expanded >= low.expanded
    assert bool(low.unreached) or worse.seconds == tree.least


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4).flatmap(lambda number: st.tuples(*(trees(key=(n,)) for n in range(number)))), st.randoms())
def test_the_order_of_the_roots_does_not_matter(some: tuple[Tree, ...], random) -> None:
    roots = [Tree((-1, n), math.inf, (tree,)).candidate for n, tree in enumerate(some)]
    mixed = roots[:]
    random.shuffle(mixed)
    (one, found), (other, again) = search(roots, 7), search(mixed, 7)
    assert (one and one.value, found.bound, found.work) == (other and other.value, again.bound, again.work)


def test_keys_order_candidates_whose_estimates_differ_by_rounding() -> None:
    """Sums in another order differ in the last digits, and equal plans are to be the simpler ones."""
    simple, other = Tree((0,), 1.0 + 1e-12, ()), Tree((1,), 1.0, ())
    for roots in ([simple.candidate, other.candidate], [other.candidate, simple.candidate]):
        incumbent, _ = search(roots, 10**9)
        assert incumbent is not None and incumbent.value == (0,)


def test_estimates_prune_only_what_their_slack_leaves_above_the_cutoff() -> None:
    known, high = Tree((0,), 10.0, ()), Tree((1,), 9.0, ())
    for slack, best in ((1.0, 10.0), (0.8, 9.0)):
        late = replace(high.candidate, estimate=lambda: (8.0, 11.0), slack=slack)
        incumbent, found = search([known.candidate, late], 10**9)
        assert incumbent is not None and incumbent.seconds == best
        assert found.bound == 8.0 if slack == 1.0 else found.bound <= 9.0


def test_a_configuration_is_bounded_by_meshes_of_which_nothing_is_known() -> None:
    one = object.__new__(OneMeshSearch)
    one.own = family = Family("one mesh", 0.0)
    one.products, one.speedup, one.records = 1.0, 1.0, defaultdict(dict)
    record = one.records[family][ExecutionConfig()] = Record(family, ExecutionConfig(), None, meshes=2, peak=2.0)
    record.bounds[LogicalMesh((8,), ("x",))] = 5.0
    assert one.least(record) == 2.0
    record.bounds[LogicalMesh((4, 2), ("x", "y"))] = 3.0
    assert one.least(record) == 3.0


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
