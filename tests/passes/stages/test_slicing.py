"""The stage DP against brute force, against simulated schedules, and on pipelines whose answer is known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.ir import schedules
from alpa_lite.passes.stages.dp.paths import least_bytes_together
from alpa_lite.passes.stages.dp.ranges import Hosts, StageCosts, sum_layer_costs
from alpa_lite.passes.stages.dp.slices import VIRTUAL, Infeasibility, SliceOptions, StageChoice, StageSlices
from alpa_lite.passes.stages.dp.slicing import slice_stages
from alpa_lite.passes.stages.dp.tasks import evaluate, place, problem_of, tasks_of
from tests import scheduling

EXACT = ("gpipe", "1f1b", "eager-1f1b", "zb-h1")


def by_kinds(cut, kinds):
    """Seconds of transfers over each cut that do not depend on the kinds of submesh beside it."""
    return np.broadcast_to(cut[:, None, None], (len(cut), kinds, kinds))


def random_costs(rng, counts, layers, devices, total, variants, by_kind=False, hosts=None):
    """Independent random costs for every range, some impossible."""
    shape = (layers, layers + 1, len(devices), variants)
    fixed, inflight = rng.integers(1, 12, shape) * 1.0, rng.integers(0, 6, shape) * 1.0
    cut = by_kinds(rng.integers(0, 3, layers + 1) * 1.0, len(devices))
    if by_kind:
        cut = rng.integers(0, 4, (layers + 1, len(devices), len(devices))) * 1.0
    buffers = rng.integers(0, 3, layers + 1) * 1.0
    out = []
    for count in counts:
        forward = rng.integers(1, 9, shape) / count
        forward[rng.random(shape) < 0.1] = np.inf
        out.append(
            StageCosts(
                count, forward, rng.integers(1, 17, shape) / count, rng.integers(0, 9, shape) * 1.0, fixed,
                inflight, cut / count, buffers, devices, total, total, inflight, cut / count, hosts,
            )
        )  # fmt: skip
    return out


def pipelines(costs, options, fewer):
    """Every pipeline there is for one B, priced by `evaluate`, that fits."""
    layers, variants = costs.num_layers, range(costs.forward.shape[3])
    for name, size in itertools.product(options.schedules, range(1, layers + 1)):
        assert isinstance(name, str) and isinstance(size, int)
        for v in (VIRTUAL,) if name == "interleaved-1f1b" else (1,):
            meshes = size // v
            if size % v or (v > 1 and (meshes < 2 or costs.num_microbatches % meshes)):
                continue
            if name == "zb-h1" and meshes > costs.num_microbatches:
                continue
            if options.num_stages not in (None, meshes):
                continue
            for kinds in itertools.product(range(len(costs.devices)), repeat=meshes):
                used = sum(costs.devices[k] for k in kinds)
                if used > costs.total_devices or (not fewer and used < costs.total_devices):
                    continue
                if options.kinds not in (None, kinds) or (v > 1 and len(set(kinds)) > 1):
                    continue
                for cuts in itertools.combinations(range(1, layers), size - 1):
                    edges = [0, *cuts, layers]
                    for choice in itertools.product(variants, repeat=size):
                        stages = tuple(
                            StageChoice(edges[s], edges[s + 1], kinds[s % meshes], choice[s], s % meshes)
                            for s in range(size)
                        )
                        devices = tuple(costs.devices[k] for k in kinds)
                        slices = StageSlices(stages, costs.num_microbatches, name, v, 0.0, devices, (), ())
                        with np.errstate(invalid="ignore"):
                            seconds, memory = evaluate(costs, slices)
                        if math.isfinite(seconds) and max(memory) <= options.budget:
                            yield seconds


def best_of(costs, options) -> StageSlices:
    found = slice_stages(costs, options).all_devices
    assert found is not None
    return found


def obstacle(costs, options) -> Infeasibility:
    found = slice_stages(costs, options)
    assert found.all_devices is None and found.infeasible is not None
    return found.infeasible


def least(costs, options, fewer):
    return min((s for c in costs for s in pipelines(c, options, fewer)), default=math.inf)


def seconds_of(slices):
    return math.inf if slices is None else slices.seconds


def check_against_brute_force(costs, options):
    found = slice_stages(costs, options)
    exact, anything = least(costs, options, False), least(costs, options, True)
    assert seconds_of(found.all_devices) == pytest.approx(exact, rel=1e-9)
    assert seconds_of(found.best) == pytest.approx(anything, rel=1e-9)
    assert found.bound == pytest.approx(anything, rel=1e-9)
    for slices in (found.all_devices, found.fewer_devices):
        if slices is not None:
            own = next(c for c in costs if c.num_microbatches == slices.num_microbatches)
            assert evaluate(own, slices) == (slices.seconds, slices.bytes)
            assert max(slices.bytes) <= options.budget
    if found.all_devices is None:
        assert found.infeasible is not None
        check_infeasible(costs, options, found.infeasible)
    return found


def check_infeasible(costs, options, infeasible):
    """Where no pipeline uses all devices whatever the memory, the memory is what lacks if none fits on fewer either."""
    unlimited = replace(options, budget=math.inf)
    fewer = math.isinf(least(costs, unlimited, False))
    if fewer and (math.isinf(least(costs, unlimited, True)) or math.isfinite(least(costs, options, True))):
        assert infeasible.constraint in ("devices", "schedule") and infeasible.smallest_budget is None
        return
    assert infeasible.constraint == "memory" and infeasible.smallest_budget > options.budget
    enough = replace(options, budget=infeasible.smallest_budget)
    found = slice_stages(costs, enough)
    assert (found.best if fewer else found.all_devices) is not None
    if "interleaved-1f1b" not in options.schedules:
        assert math.isinf(least(costs, replace(options, budget=infeasible.smallest_budget - 1e-6), fewer))


@st.composite
def instances(draw, names=EXACT):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, total = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4)))
    devices = tuple(n for n in (1, 2, 4) if n <= total)
    devices = tuple(sorted(draw(st.sets(st.sampled_from(devices), min_size=1))))
    counts = sorted(draw(st.sets(st.integers(1, 4), min_size=1, max_size=2)))
    hosts = None
    if draw(st.booleans()):  # starting tasks takes as long as stages do
        stages, transfers = rng.integers(1, 5, len(devices)), 2 * rng.integers(0, 5, len(devices))
        hosts = Hosts(tuple(stages), tuple(transfers), tuple(rng.random(len(devices))))
    costs = random_costs(rng, counts, layers, devices, total, draw(st.integers(1, 2)), draw(st.booleans()), hosts)
    chosen = tuple(draw(st.sets(st.sampled_from(names), min_size=1, max_size=3)))
    return costs, SliceOptions(draw(st.sampled_from((8.0, 12.0, 16.0, 24.0, math.inf))), tuple(sorted(chosen)))


@settings(max_examples=180, deadline=None)
@given(instances(), st.data())
def test_equals_brute_force(instance, data):
    """Whatever is fixed: nothing, the number of stages, or their submeshes."""
    costs, options = instance
    kinds = range(len(costs[0].devices))
    fixed = data.draw(st.sampled_from((None, None, None, "stages", "kinds")))
    if fixed == "stages":
        options = replace(options, num_stages=data.draw(st.integers(1, 4)))
    elif fixed == "kinds":
        options = replace(options, kinds=tuple(data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))))
    check_against_brute_force(costs, options)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(EXACT), st.sampled_from((14.0, 18.0, 22.0, 26.0)))
def test_equals_brute_force_where_early_stages_hold_more(seed, name, budget):
    """Five layers on up to five devices: the position of a stage decides whether it fits."""
    costs = random_costs(np.random.default_rng(seed), (5,), 5, (1,), 5, 2)
    check_against_brute_force(costs, SliceOptions(budget, (name,)))


def enumerated(costs, budget):
    """1F1B by a shortest path for every pair of thresholds, as in Alpa's paper, and an update's threshold besides."""
    layers, count = costs.num_layers, costs.num_microbatches
    kinds, variants = range(len(costs.devices)), range(costs.forward.shape[3])
    period = costs.forward + costs.backward
    period[:, :layers] += 2 * costs.boundary_seconds[None, :layers, 0, :1, None]

    def shortest(most, latest):
        after = [[[math.inf] * (costs.total_devices + 1) for _ in range(layers + 1)]]
        after[0][layers][0] = 0.0
        for left in range(1, layers + 1):
            table = [[math.inf] * (costs.total_devices + 1) for _ in range(layers + 1)]
            for i in range(layers):
                for j, k, v in itertools.product(range(i + 1, layers + 1), kinds, variants):
                    at = i, j, k, v
                    bytes_ = costs.fixed_bytes[at] + min(left, count) * costs.inflight_bytes[at]
                    if period[at] > most or costs.update[at] > latest or bytes_ + costs.buffer_bytes(i, j) > budget:
                        continue
                    for d in range(costs.devices[k], costs.total_devices + 1):
                        table[i][d] = min(table[i][d], period[at] + after[-1][j][d - costs.devices[k]])
            after.append(table)
        return min(table[0][costs.total_devices] for table in after)

    thresholds = np.unique(period[np.isfinite(period)]), np.unique(costs.update)
    return min(shortest(a, b) + (count - 1) * a + b for a, b in itertools.product(*thresholds))


@pytest.mark.parametrize(("seed", "budget"), [(0, 30.0), (1, 16.0), (2, math.inf)])
def test_equals_the_enumeration_of_thresholds(seed, budget):
    """Seven layers on eight devices: too many pipelines to try, few enough thresholds."""
    rng = np.random.default_rng(seed)
    shape = (7, 8, 3, 2)
    forward, update = rng.integers(1, 9, shape) * 1.0, rng.integers(0, 4, shape) * 4.0
    fixed, inflight = rng.integers(1, 12, shape) * 1.0, rng.integers(0, 5, shape) * 1.0
    cut = by_kinds(rng.integers(0, 2, 8) * 1.0, 3)
    costs = StageCosts(
        4, forward, np.zeros(shape), update, fixed, inflight, cut, np.ones(8), (1, 2, 4), 8, 4, inflight, cut
    )  # fmt: skip
    found = slice_stages([costs], SliceOptions(budget, ("1f1b",)))
    assert seconds_of(found.all_devices) == pytest.approx(enumerated(costs, budget))
    near = slice_stages([costs], SliceOptions(budget, ("1f1b",), gap=0.2))
    assert near.best is not None and near.best.seconds <= seconds_of(found.best) / 0.8
    assert near.bound <= seconds_of(found.best) * (1 + 1e-9) and near.bound >= 0.8 * near.best.seconds * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from((10.0, 20.0, 30.0, math.inf)), st.booleans())
@example(4294967293, 30.0, False)  # a later stage on the last submesh holds fewer than the one behind it
def test_interleaved_against_brute_force(seed, budget, by_kind):
    rng = np.random.default_rng(seed)
    costs = random_costs(rng, (2, 4), 5, (1, 2), 2, 2, by_kind)
    options = SliceOptions(budget, ("interleaved-1f1b",))
    found, exact = slice_stages(costs, options), least(costs, options, False)
    assert found.bound <= exact * (1 + 1e-9)
    if found.all_devices is None:
        assert found.infeasible is not None
        return
    slices = found.all_devices
    assert max(slices.bytes) <= budget and slices.seconds >= exact * (1 - 1e-9)
    assert [stage.mesh for stage in slices.stages] == [s % 2 for s in range(4)]
    if math.isinf(budget):
        assert slices.seconds == pytest.approx(exact, rel=1e-9)


def test_equal_submeshes_are_also_tried_with_two_stages_on_each():
    """Of four equal layers, two submeshes are idle for less if each has two stages."""
    ones = np.ones((4, 5, 2, 1))
    ones *= np.maximum(np.arange(5) - np.arange(4)[:, None], 0)[:, :, None, None] / np.array((1.0, 2.0))[:, None]
    costs = StageCosts(
        2, ones, 2 * ones, 0 * ones, 0 * ones, 0 * ones, by_kinds(np.zeros(5), 2), np.zeros(5), (1, 2), 2, 2,
        0 * ones, by_kinds(np.zeros(5), 2), None,
    )  # fmt: skip
    options = SliceOptions(math.inf, ("1f1b", "interleaved-1f1b"), num_stages=2)
    rough, best = (
        slice_stages([costs], replace(options, has_equal_submeshes=True)).best,
        slice_stages([costs], options).best,
    )
    assert rough is not None and best is not None
    assert rough.virtual == VIRTUAL and rough.seconds == best.seconds


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from((12.0, 20.0, math.inf)))
def test_more_devices_are_never_slower(seed, budget):
    (costs,) = random_costs(np.random.default_rng(seed), (4,), 5, (1, 2, 4), 4, 2)
    times = []
    for total in (1, 2, 4, 8, 12):
        part = replace(costs, total_devices=total, devices_per_node=4)
        times.append(seconds_of(slice_stages([part], SliceOptions(budget, EXACT)).best))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("name", "meshes", "count", "virtual"),
    [
        *((name, *size, 1) for name in EXACT for size in ((1, 1), (2, 4), (3, 8), (4, 4), (4, 16))),
        *(("interleaved-1f1b", *size) for size in ((2, 4, 2), (2, 8, 3), (3, 6, 2), (4, 8, 2))),
    ],
)
def test_seconds_are_those_of_the_simulated_schedule(name, meshes, count, virtual):
    """Uniform stages and free transfers: the formula is the schedule."""
    costs = uniform(meshes * virtual, count, devices=(1,), total=meshes)
    tasks = schedules.schedule(name, meshes, count, virtual=virtual)
    timeline = scheduling.simulate(tasks, forward=2.0, backward=2.0, weight=2.0)
    assert evaluate(costs, chain(meshes, count, name, virtual))[0] == pytest.approx(end(timeline))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 8), st.sampled_from(("1f1b", "eager-1f1b")))
def test_seconds_are_not_below_the_simulated_schedule(seed, meshes, count, name):
    """Unequal stages whose backward takes twice the forward, with transfers: the formula is an upper estimate."""
    rng = np.random.default_rng(seed)
    forward, transfer = rng.uniform(1, 3, meshes), rng.uniform(0, 1, max(0, meshes - 1))
    costs = uniform(meshes, count, devices=(1,), total=meshes)
    for s in range(meshes):
        costs.forward[s, s + 1], costs.backward[s, s + 1] = forward[s], 2 * forward[s]
    costs.boundary_seconds[1:meshes, 0, 0] = transfer
    timeline = scheduling.simulate(
        schedules.schedule(name, meshes, count), forward=list(forward), backward=list(2 * forward),
        transfer=list(transfer),
    )  # fmt: skip
    assert end(timeline) <= evaluate(costs, chain(meshes, count, name))[0] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe"])
@pytest.mark.parametrize("network", [0.5, 2.0, 8.0])
def test_stages_that_share_nodes_wait_for_the_cuts_that_cross_the_network(name, network):
    """Two stages a node: every other cut is free. The formula is an upper estimate, and none without the network is."""
    meshes, count = 8, 32
    costs = uniform(
        meshes, count, devices=(1,), total=meshes, node=2, boundary_seconds=np.full((meshes + 1, 1, 1), network / 2),
        slowest_seconds=np.full((meshes + 1, 1, 1), network),
    )  # fmt: skip
    free = uniform(meshes, count, devices=(1,), total=meshes)
    crossing = [network if s % 2 else 0.0 for s in range(meshes - 1)]
    timeline = scheduling.simulate(
        schedules.schedule(name, meshes, count), forward=2.0, backward=4.0, transfer=crossing
    )  # fmt: skip
    estimate, without = (evaluate(c, chain(meshes, count, name))[0] for c in (costs, free))
    assert without < end(timeline) <= estimate * (1 + 1e-9) < 1.6 * end(timeline)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_process_that_starts_short_tasks_is_what_a_step_takes(schedule):
    """Four stages, 16 micro-batches: 2 or 3 runs each and 6 transfers, 0.1 s to start one, where a run takes 1 ms."""
    costs = uniform(4, 16, devices=(1,), total=4, hosts=Hosts((4,), (6,), (0.1,)))
    costs.forward[:], costs.backward[:] = costs.forward / 2000, costs.backward / 2000
    runs = 3 if schedule == "zb-h1" else 2
    assert evaluate(costs, chain(4, 16, schedule))[0] == pytest.approx(16 * (4 * runs + 6) * 0.1, rel=0.01)
    slow = uniform(4, 16, devices=(1,), total=4, hosts=Hosts((4,), (6,), (0.1,)))
    free = uniform(4, 16, devices=(1,), total=4)
    assert evaluate(slow, chain(4, 16, "1f1b"))[0] == evaluate(free, chain(4, 16, "1f1b"))[0]


def end(timeline):
    return max(event.end for event in timeline.events)


def uniform(layers, count, *, devices, total, node=None, **changes):
    """Layers of 2 s forward, 4 s backward on one device, perfectly divided by n devices, no memory, free transfers."""
    size = np.asarray(devices, dtype=float)[None, :, None] * np.ones((layers, 1, 1))
    zero = np.zeros_like(size)
    values = {
        "forward": 2 / size, "backward": 4 / size, "update": zero, "fixed_bytes": zero,
        "inflight_bytes": zero, "temporary_bytes": zero, "boundary_bytes": np.zeros(layers + 1),
        "boundary_seconds": np.zeros((layers + 1, len(devices), len(devices))),
    } | changes  # fmt: skip
    same = {"split_bytes": values["inflight_bytes"], "slowest_seconds": values["boundary_seconds"]}
    return sum_layer_costs(
        count, **(same | values), devices=devices, total_devices=total, devices_per_node=node or total
    )


def chain(meshes, count, name, virtual=1):
    stages = tuple(StageChoice(s, s + 1, 0, 0, s % meshes) for s in range(meshes * virtual))
    return StageSlices(stages, count, name, virtual, 0.0, (1,) * meshes, tuple(range(meshes)), ())


def test_tight_memory_takes_the_variant_that_saves_less():
    """Variant 1 recomputes: the backward is longer, a quarter is saved. Early stages hold more micro-batches."""
    both = np.ones((8, 1, 2))
    save = both * np.asarray([4.0, 1.0])
    costs = uniform(
        8, 8, devices=(1,), total=4, forward=2 * both, backward=both * np.asarray([4.0, 6.0]),
        update=0 * both, fixed_bytes=both, inflight_bytes=save,
    )  # fmt: skip
    variants = {}
    for budget in (100.0, 26.0, 10.0):
        variants[budget] = [stage.variant for stage in best_of([costs], SliceOptions(budget, ("1f1b",))).stages]
    assert variants[100.0] == [0, 0, 0, 0]
    assert variants[26.0][0] == 1 and variants[26.0][-1] == 0
    short = obstacle([costs], SliceOptions(7.0, ("1f1b",)))
    assert short.constraint == "memory" and short.smallest_budget == 8.0


def test_fewer_devices_where_more_do_not_help():
    """A second device costs more in synchronisation than it saves."""
    update = np.broadcast_to(np.asarray([0.0, 50.0])[None, :, None], (1, 2, 1))
    costs = uniform(1, 1, devices=(1, 2), total=2, update=update)
    found = slice_stages([costs], SliceOptions(math.inf))
    assert found.all_devices is not None and found.fewer_devices is not None
    assert found.all_devices.devices_used == 2 and found.all_devices.seconds == pytest.approx(53.0)
    assert found.fewer_devices.devices_used == 1 and found.fewer_devices.seconds == pytest.approx(6.0)
    assert found.best == found.fewer_devices


def test_a_gap_loses_no_pipeline_where_transfers_depend_on_kinds():
    cut = np.full((5, 2, 2), 1e-3)
    costs = uniform(4, 4, devices=(1, 2), total=4, boundary_seconds=cut)
    options = SliceOptions(1e9, ("1f1b",), num_stages=2)
    best, near = best_of([costs], options), best_of([costs], replace(options, gap=0.01))
    assert near.seconds <= 1.01 * best.seconds


def test_weighed_lists_the_schedules():
    costs = [uniform(4, count, devices=(1, 2), total=4) for count in (2, 8)]
    found = slice_stages(costs, SliceOptions(math.inf))
    assert {(w.num_microbatches, w.schedule) for w in found.weighed} == set(itertools.product((2, 8), schedules.NAMES))
    assert [w.status for w in found.weighed].count("chosen") == 1
    assert all(w.bound >= found.bound * (1 - 1e-9) for w in found.weighed)
    assert all(w.seconds is None or w.seconds >= w.bound * (1 - 1e-9) for w in found.weighed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_stages_that_share_submeshes_take_less_than_their_bound(seed):
    costs = random_costs(np.random.default_rng(seed), (4,), 4, (1,), 2, 2)[0]
    options = SliceOptions(math.inf, ("interleaved-1f1b",))
    (task,) = tasks_of(costs, options)
    bound = least_bytes_together(problem_of(task, options, True), task.meshes, task.virtual)
    assert math.isinf(least([costs], replace(options, budget=bound * (1 - 1e-6)), False))


def test_infeasible_for_other_reasons():
    costs = uniform(4, 4, devices=(2,), total=4)
    none = obstacle([costs], SliceOptions(math.inf, ("1f1b",), num_stages=1))
    assert none.constraint == "devices" and none.smallest_budget is None
    none = obstacle([costs], SliceOptions(math.inf, ("1f1b",), num_stages=3))
    assert none.constraint == "schedule"


@given(st.lists(st.sampled_from((1, 2, 4, 8, 16, 24)), min_size=1, max_size=12))
@example([2, 2, 4])
@example([2, 4, 2])
def test_every_choice_can_be_placed_in_the_order_of_stages_where_that_is_aligned(devices):
    starts = place(devices, 8)
    taken = sorted(d for start, n in zip(starts, devices, strict=True) for d in range(start, start + n))
    assert taken == list(range(sum(devices)))
    for start, n in zip(starts, devices, strict=True):
        assert start % min(n, 8) == 0
    assert starts == {(2, 2, 4): (0, 2, 4), (2, 4, 2): (4, 0, 6)}.get(tuple(devices), starts)


def test_bad_costs_are_named():
    with pytest.raises(OptionError, match="devices="):
        uniform(2, 2, devices=(3,), total=8, node=4)
    with pytest.raises(OptionError, match="total_devices"):
        uniform(2, 2, devices=(1,), total=6, node=4)
