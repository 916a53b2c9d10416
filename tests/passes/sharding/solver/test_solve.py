"""The sharding solver against brute force."""

import ast
import functools
import itertools
import math
import pathlib
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alpa_lite.ir.strategy import Buffers, StrategyGraph, Transfer
from alpa_lite.passes.sharding.solver import kernels, restrict, solve, work
from alpa_lite.passes.sharding.solver import problem as sharding_problem
from alpa_lite.passes.sharding.solver.memory import MemoryDual
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import problem_from_graph

SEEDS = st.integers(0, 2**32 - 1)


def random_graph(rng, *, memory=False, scale=1.0, forbidden=0.15):
    """A small graph with shared consumers, self-loops, doubled consumers, forbidden entries and many ties."""
    n = int(rng.integers(2, 7))
    sizes = rng.integers(1, 5, n)
    values = np.array([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 7.0]) if rng.random() < 0.5 else rng.random(12) * 5

    def costs(*shape):
        return np.where(rng.random(shape) < forbidden, np.inf, rng.choice(values, shape)) * scale

    node_cost = tuple(costs(s) for s in sizes)
    transfers = []
    for _ in range(rng.integers(0, 2 * n)):
        src, rows, columns = int(rng.integers(n)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
        consumers = []
        for _ in range(rng.integers(1, 4)):
            node = int(rng.integers(n))
            consumers.append((node, rng.integers(0, columns, sizes[node])))
            if rng.random() < 0.2:
                consumers.append(consumers[-1])
        transfers.append(Transfer(src, rng.integers(0, rows, sizes[src]), tuple(consumers), costs(rows, columns)))
    buffers = random_buffers(rng, sizes, transfers) if memory else None
    return StrategyGraph(node_cost, tuple(transfers), buffers)


def random_buffers(rng, sizes, transfers):
    points, count = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    span = np.sort(rng.integers(0, points, (count, 2)), axis=1)
    owner, transfer, copy, size = [], [], [], []
    for _ in range(count):
        if transfers and rng.random() < 0.4:
            t = int(rng.integers(len(transfers)))
            rows, columns = transfers[t].cost.shape
            owner.append(transfers[t].src)
            transfer.append(t)
            copy.append(int(rng.integers(columns)))
            size.append(rng.integers(0, 8, rows).astype(float))
        else:
            node = int(rng.integers(len(sizes)))
            classes = int(rng.integers(1, 4))
            owner.append(node)
            transfer.append(-1)
            copy.append(-1)
            klass = rng.integers(0, classes, sizes[node])
            size.append(rng.integers(0, 8, classes).astype(float)[klass])
    a, b, c = (np.array(values) for values in (owner, transfer, copy))
    return Buffers(points, span[:, 0], span[:, 1], a, b, c, tuple(size))


def price(graph, choice):
    """Seconds and peak bytes, straight from the definitions in `alpa_lite.ir.strategy`."""
    seconds = sum(graph.node_cost[i][s] for i, s in enumerate(choice))
    wanted = []
    for t in graph.transfers:
        wanted.append({int(klass[choice[node]]) for node, klass in t.consumers})
        seconds += sum(t.cost[t.src_class[choice[t.src]], q] for q in wanted[-1])
    b, live = graph.buffers, [0.0]
    for point in range(b.points if b else 0):
        total = 0.0
        for i in range(len(b.size)):
            if b.start[i] <= point <= b.end[i]:
                if b.transfer[i] < 0:
                    total += b.size[i][choice[b.owner[i]]]
                elif b.copy[i] in wanted[b.transfer[i]]:
                    t = graph.transfers[b.transfer[i]]
                    total += b.size[i][t.src_class[choice[t.src]]]
        live.append(total)
    return float(seconds), float(max(live))


def brute_force(graph):
    """[(seconds, peak, choice)] of every allowed choice."""
    choices = itertools.product(*(range(len(cost)) for cost in graph.node_cost))
    return [(s, peak, c) for c in choices if math.isfinite((sp := price(graph, c))[0]) for s, peak in [sp]]


def with_budget(graph, budget):
    return StrategyGraph(graph.node_cost, graph.transfers, graph.buffers, budget)


def consistent(problem):
    """The restriction of a problem; None where no choice is allowed."""
    try:
        return restrict.make_consistent(problem)
    except restrict.Contradiction:
        return None


def assert_solved(graph, solution, fitting):
    """Optimal among the seconds of the choices that fit, or infeasible without any."""
    if fitting:
        assert_optimal(graph, solution, min(fitting))
    else:
        assert (solution.status, solution.choice, solution.bound) == ("infeasible", (), math.inf)


def assert_optimal(graph, solution, best):
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(best, rel=1e-9, abs=0)
    assert solution.bound == pytest.approx(best, rel=1e-9, abs=0)
    seconds, peak = price(graph, solution.choice)
    assert solution.objective == pytest.approx(seconds, rel=1e-12, abs=0)
    assert solution.peak == peak


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(-9, 2))
def test_without_budget_equals_brute_force(seed, exponent):
    graph = random_graph(np.random.default_rng(seed), memory=seed % 2 == 0, scale=10.0**exponent)
    assert_solved(graph, solve.solve(graph, gap=0.0), [seconds for seconds, _, _ in brute_force(graph)])


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(-9, 2))
def test_with_budget_equals_brute_force(seed, exponent):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=True, scale=10.0**exponent, forbidden=0.05)
    every = brute_force(graph)
    peaks = sorted({peak for _, peak, _ in every}) or [0.0]
    budget = float(rng.choice(peaks)) - (0.5 if rng.random() < 0.3 else 0.0)
    graph = with_budget(graph, budget)
    solution = solve.solve(graph, gap=0.0)
    assert_solved(graph, solution, [seconds for seconds, peak, _ in every if peak <= budget])
    assert not solution.choice or solution.peak <= budget


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_minimal_budget_equals_brute_force(seed):
    graph = random_graph(np.random.default_rng(seed), memory=True)
    every = brute_force(graph)
    peak, solution = solve.find_minimal_budget(graph, gap=0.0)
    if not every:
        assert (peak, solution.status) == (math.inf, "infeasible")
        return
    assert peak == min(p for _, p, _ in every)
    assert solution.status == "optimal"
    assert price(graph, solution.choice) == (pytest.approx(solution.objective, rel=1e-12), peak)
    assert solve.solve(with_budget(graph, peak)).status == "optimal"
    if peak > 0:
        assert solve.solve(with_budget(graph, peak - 0.5)).status == "infeasible"


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_what_is_known_without_the_budget_serves_the_search_within_it(seed):
    """A quick bound holds and never falls; a search that begins with it finds the same; a roof keeps bounds true."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=True, forbidden=0.05)
    every = brute_force(graph)
    bound = solve.SolverState(graph)
    if not every:
        return
    fastest = min(seconds for seconds, _, _ in every)
    before = bound.seconds
    for _ in range(3):
        bound.improve()
        assert before <= bound.seconds <= fastest * (1 + 1e-9)
        before = bound.seconds
    budget = float(rng.choice(sorted({peak for _, peak, _ in every})))
    within = min(seconds for seconds, peak, _ in every if peak <= budget)
    solution = solve.solve(with_budget(graph, budget), gap=0.0, free=bound.seconds)
    assert_optimal(with_budget(graph, budget), solution, within)
    for limit in (None, budget, 0.999 * budget):  # what one solve found out is where the next one begins
        again = solve.solve(with_budget(graph, limit), gap=0.0, known=bound, start=solution)
        fitting = [seconds for seconds, peak, _ in every if limit is None or peak <= limit]
        assert_solved(with_budget(graph, limit), again, fitting)
    roofed = solve.solve(with_budget(graph, None), gap=0.0, roof=budget)
    assert roofed.bound <= fastest * (1 + 1e-9) <= roofed.objective * (1 + 2e-9)
    if roofed.peak <= budget:
        assert_optimal(with_budget(graph, None), roofed, fastest)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_what_a_bound_suggests_fits_only_where_something_does(seed):
    """With a budget that all choices keep to it fits, with one that none keeps to it does not."""
    graph = random_graph(np.random.default_rng(seed), memory=True, forbidden=0.0)
    peaks = [peak for _, peak, _ in brute_force(graph)]
    for budget, known in ((max(peaks), True), (min(peaks) - 1.0, False)):
        bound = solve.SolverState(with_budget(graph, budget))
        assert bound.is_within_budget is known
        bound.improve()
        assert bound.is_within_budget is known


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.3, 1.7))
def test_cutoff(seed, factor):
    graph = random_graph(np.random.default_rng(seed), forbidden=0.0)
    best = min(seconds for seconds, _, _ in brute_force(graph))
    cutoff = best * factor + 0.01 * (factor - 1)
    solution = solve.solve(graph, cutoff=cutoff, gap=0.0)
    if cutoff <= best:
        assert (solution.status, solution.choice) == ("cutoff", ())
        assert cutoff <= solution.bound <= best * (1 + 1e-9)
    else:
        assert_optimal(graph, solution, best)


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_a_restriction_keeps_the_optimum(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=seed % 3 > 0, forbidden=0.1)
    peaks = [peak for _, peak, _ in brute_force(graph)] or [0.0]
    budget = float(np.quantile(peaks, rng.random())) if seed % 3 == 1 else None
    problem = problem_from_graph(with_budget(graph, budget))
    if budget is None and seed % 3 == 0:
        problem = sharding_problem.forget_memory(problem)
    before, part = optimum_of(problem), consistent(problem)
    if part is None:
        assert before[0] == math.inf
        return
    after, choice = optimum_of(part.problem)
    assert after == pytest.approx(before[0], rel=1e-9)
    if math.isfinite(after):
        assert choice is not None
        lifted = part.lift(np.array(choice))
        assert problem.seconds(lifted) == pytest.approx(after, rel=1e-9)
        np.testing.assert_array_equal(problem.bytes(lifted), part.problem.bytes(choice))


def optimum_of(problem):
    choices = itertools.product(*(range(size) for size in problem.links.sizes))
    return min(
        ((problem.seconds(c), c) for c in choices if problem.fits(c)), default=(math.inf, None), key=lambda x: x[0]
    )


@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
@example(seed=156495)  # whose last sweep divides cells for the worse
def test_message_passing_gives_bounds_and_slacks_that_hold(seed):
    part = consistent(problem_from_graph(random_graph(np.random.default_rng(seed))))
    if part is None:
        return
    problem = part.problem
    ascent = Ascent(problem)
    best = optimum_of(problem)[0]
    for _ in range(3):
        ascent.sweep(2)
        assert ascent.bound <= best + 1e-9
    for backward in (False, True):
        assert problem.seconds(ascent.choice(backward)) >= best - 1e-9
    slack, cells = ascent.slack()
    links = problem.links
    for choice in itertools.product(*(range(size) for size in problem.links.sizes)):
        seconds = problem.seconds(choice)
        assert (seconds >= ascent.bound + slack[links.first[:-1] + np.array(choice)] - 1e-9).all()
        assert (seconds >= ascent.bound + cells[links.cells_of(np.array(choice))] - 1e-9).all()


def test_message_passing_is_exact_on_a_tree_which_needs_no_linear_program():
    rng = np.random.default_rng(4)
    parents = [int(rng.integers(i)) for i in range(1, 7)]
    transfers = tuple(
        Transfer(parent, np.arange(3), ((i, np.arange(3)),), rng.random((3, 3))) for i, parent in enumerate(parents, 1)
    )
    graph = StrategyGraph(tuple(rng.random(3) for _ in range(7)), transfers)
    best = min(s for s, _, _ in brute_force(graph))
    ascent = Ascent(problem_from_graph(graph))
    ascent.sweep(10)
    assert ascent.bound == pytest.approx(best, rel=1e-9)
    solution = solve.solve(graph, gap=0.0)
    assert solution.variables == 0
    assert_optimal(graph, solution, best)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_prices_of_memory_give_bounds(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=True)
    every = brute_force(graph)
    if not every:
        return
    budget = float(np.quantile([peak for _, peak, _ in every], 0.3))
    problem = restrict.make_consistent(problem_from_graph(with_budget(graph, budget))).problem
    best = min((s for s, peak, _ in every if peak <= budget), default=math.inf)
    least = min(peak for _, peak, _ in every)
    for dual, limit in ((MemoryDual(problem), best), (MemoryDual(replace(problem, budget=None)), least)):
        for _ in range(6):
            dual.step(3)
            assert dual.bound <= limit + 1e-9
            assert (dual.price >= 0).all()


def test_a_tied_layer_that_feeds_itself_and_others_pays_once():
    own, other = np.array([0, 1]), np.array([1, 0])
    cost = np.array([[0.0, 5.0], [4.0, 0.0]])
    transfer = Transfer(0, np.array([0, 1]), ((0, other), (1, own), (2, own)), cost)
    graph = StrategyGraph((np.zeros(2), np.array([9.0, 0.0]), np.array([9.0, 0.0])), (transfer,))
    assert price(graph, (0, 1, 1))[0] == 5.0  # once for three consumers
    assert_optimal(graph, solve.solve(graph, gap=0.0), min(s for s, _, _ in brute_force(graph)))


def test_degenerate_graphs():
    empty = solve.solve(StrategyGraph((), ()))
    assert (empty.status, empty.choice, empty.objective, empty.peak) == ("optimal", (), 0.0, 0.0)
    single = solve.solve(StrategyGraph((np.array([3.0]),), ()))
    assert (single.status, single.choice, single.objective) == ("optimal", (0,), 3.0)
    assert solve.solve(StrategyGraph((np.array([np.inf, np.inf]),), ())).status == "infeasible"
    zero = solve.solve(StrategyGraph((np.zeros(3), np.zeros(2)), ()))
    assert (zero.status, zero.objective, zero.gap) == ("optimal", 0.0, 0.0)
    lonely = StrategyGraph((np.ones(2),), (Transfer(0, np.array([0, 1]), (), np.ones((2, 2))),))
    assert solve.solve(lonely).objective == 1.0


@pytest.mark.parametrize("cost", [np.zeros(0), np.array([1.0, -1.0]), np.array([1.0, np.nan])])
def test_impossible_nodes_are_refused(cost):
    with pytest.raises(AssertionError, match="a node has no strategy"):
        solve.solve(StrategyGraph((cost,), ()))


@pytest.mark.parametrize(("classes", "count", "seconds"), [([0, 2], 2, 1.0), ([0, 1], 2, np.nan), ([0, 1], 3, 1.0)])
def test_impossible_transfers_are_refused(classes, count, seconds):
    transfer = Transfer(0, np.array(classes), ((0, np.zeros(count, int)),), np.full((2, 2), seconds))
    with pytest.raises(AssertionError, match="a transfer"):
        solve.solve(StrategyGraph((np.ones(2),), (transfer,)))


def test_evaluate_prices_any_choice():
    graph = random_graph(np.random.default_rng(3), memory=True, forbidden=0.0)
    for seconds, peak, choice in brute_force(graph)[::7]:
        assert solve.evaluate(graph, choice) == (pytest.approx(seconds, rel=1e-12), peak)


def test_a_budget_trades_seconds_for_bytes_monotonically():
    graph, least = smallest_transformer()
    free = solve.solve(graph)
    assert least < free.peak
    before = free.objective
    for share in (0.9, 0.3, 0.0):
        budget = least + share * (free.peak - least)
        solution = solve.solve(with_budget(graph, budget), gap=1e-2)
        assert solution.status == "optimal"
        assert solution.peak <= budget * (1 + 1e-9)
        assert solution.bound <= solution.objective
        assert solution.objective >= before * (1 - 1e-2)
        before = solution.objective
    assert solve.solve(with_budget(graph, 0.99 * least)).status == "infeasible"


def transformer(rng, layers, strategies):
    """A graph shaped like a training step: each layer's activations and weights feed a forward and a backward chain."""
    specs = 8
    node_cost, transfers, buffers = [], [], []
    depth = 6 * layers
    shape = rng.integers(1, 4, specs)  # how often each layout is divided

    def node(work):
        node_cost.append(work * (1 + rng.random(strategies) * 3))
        return len(node_cost) - 1, rng.integers(0, specs, strategies)

    def send(source, consumers, size):
        move = size * (0.1 + rng.random((specs, specs)) * shape[None, :])
        np.fill_diagonal(move, 0.0)
        t = len(transfers)
        transfers.append(Transfer(source[0], source[1], tuple(consumers), move))
        start, end = source[0], max(consumer for consumer, _ in consumers)
        buffers.append((min(start, end), max(start, end), source[0], -1, -1, (size * 1e6 / 2.0**shape)[source[1]]))
        for q in range(specs):
            copies = np.where(np.arange(specs) == q, 0.0, size * 1e6 / 2.0 ** shape[q])
            buffers.append((end, end, source[0], t, q, copies))

    forward, weights = [node(1.0)], []
    for i in range(depth):
        weights.append(node(0.01))
        forward.append(node(1.0 + i % 3))
    backward = [node(2.0) for _ in range(depth)]
    for i in range(depth):
        grad = backward[depth - 1 - i]
        send(forward[i], [forward[i + 1], grad, *([forward[i + 2]] if i % 3 == 0 and i + 2 <= depth else [])], 1.0)
        send(weights[i], [forward[i + 1], grad], 0.5)
        if i:
            send(backward[i - 1], [backward[i], weights[depth - 1 - i]], 1.0)
    *columns, size = zip(*buffers, strict=True)
    a, b, c, d, e = map(np.array, columns)
    table = Buffers(len(node_cost), a, b, c, d, e, size)
    return StrategyGraph(tuple(node_cost), tuple(transfers), table)


@functools.cache
def smallest_transformer():
    """A transformer of one layer, and the least budget in which it fits."""
    graph = transformer(np.random.default_rng(2), layers=1, strategies=6)
    return graph, solve.find_minimal_budget(graph, gap=1e-2)[0]


def test_a_large_graph_is_solved_to_optimality():
    graph = transformer(np.random.default_rng(0), layers=6, strategies=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve.solve(graph)
    assert solution.status == "optimal"
    assert solution.gap <= 1e-4
    assert price_without_memory(graph, solution.choice) == pytest.approx(solution.objective, rel=1e-12)
    better = solve.solve(graph, cutoff=solution.bound * 0.999)
    assert better.status == "cutoff"


def price_without_memory(graph, choice):
    return price(StrategyGraph(graph.node_cost, graph.transfers), choice)[0]


def permuted(graph, nodes, transfers):
    """The same graph with its nodes and transfers in another order: the new number of each node, and old transfers."""
    place = np.argsort(nodes)
    moved = [graph.transfers[t] for t in transfers]
    sent = tuple(
        Transfer(int(place[t.src]), t.src_class, tuple((int(place[n]), k) for n, k in t.consumers[::-1]), t.cost)
        for t in moved
    )
    b = graph.buffers
    number = np.append(np.argsort(transfers), -1)
    buffers = replace(b, owner=place[b.owner], transfer=number[b.transfer]) if b else None
    return StrategyGraph(tuple(graph.node_cost[i] for i in nodes), sent, buffers, graph.budget)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_order_of_nodes_and_transfers_does_not_change_the_optimum(seed):
    """Costs are whole numbers, so that their sums do not depend on the order either."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=True, forbidden=0.05)
    graph = StrategyGraph(
        tuple(np.round(cost) for cost in graph.node_cost),
        tuple(replace(t, cost=np.round(t.cost)) for t in graph.transfers),
        graph.buffers,
    )
    peaks = [peak for _, peak, _ in brute_force(graph)] or [0.0]
    graph = with_budget(graph, float(np.quantile(peaks, 0.3)))
    other = permuted(graph, rng.permutation(len(graph.node_cost)), rng.permutation(len(graph.transfers)))
    first, second = solve.solve(graph, gap=0.0), solve.solve(other, gap=0.0)
    assert (first.status, first.objective) == (second.status, second.objective)
    if first.choice:
        assert (first.bound, second.bound) == (first.objective, second.objective)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 10**7), min_size=1, max_size=4))
def test_more_work_is_never_worse(seed, limits):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=True, forbidden=0.05)
    peaks = [peak for _, peak, _ in brute_force(graph)] or [0.0]
    assert_monotone(with_budget(graph, float(np.quantile(peaks, rng.random()))), limits)


def assert_monotone(graph, limits):
    """Limits of work give choices and bounds that get better as they grow; returns the last."""
    least, *more = [*sorted(limits), work.SOLVE_WORK]
    before = solve.solve(graph, max_work=least, gap=0.0)
    assert before.bound <= before.objective
    for limit in more:
        solution = solve.solve(graph, max_work=limit, gap=0.0)
        assert solution.bound <= solution.objective
        assert solution.objective <= before.objective
        assert solution.bound >= before.bound
        assert solution.work >= before.work
        before = solution
    return before


def test_work_that_is_exhausted_leaves_an_honest_gap():
    graph, least = smallest_transformer()
    budget = 1.1 * least
    rounds = [10**6, 3 * 10**6, 10**7, 3 * 10**7]
    solutions = [solve.solve(with_budget(graph, budget), max_work=limit) for limit in rounds]
    assert {s.status for s in solutions} - {"optimal"}
    assert all(s.bound <= s.objective and (not s.choice or s.peak <= budget * (1 + 1e-9)) for s in solutions)
    last = assert_monotone(with_budget(graph, budget), rounds)
    assert last.status == "optimal"


def test_results_do_not_depend_on_earlier_calls():
    graphs = [random_graph(np.random.default_rng(seed), memory=True, forbidden=0.0) for seed in range(8)]
    graphs = [with_budget(graph, solve.find_minimal_budget(graph)[0]) for graph in graphs]
    first = [solve.solve(graph) for graph in graphs]
    assert [solve.solve(graph) for graph in reversed(graphs)] == first[::-1]


def test_no_module_of_the_solver_reads_a_clock():
    for path in pathlib.Path(solve.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"time", "datetime", "timeit"} & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Constant):
                assert node.value != "time_limit", path


def test_each_loop_is_compiled_once():
    """Arrays of another type or memory layout would compile it again, for seconds."""
    for seed in range(40):
        graph = random_graph(np.random.default_rng(seed), memory=seed % 2 == 0, forbidden=0.1)
        solve.solve(with_budget(graph, 5.0))
    loops = [value for module in (kernels, restrict) for value in vars(module).values() if hasattr(value, "signatures")]
    assert len(loops) > 5
    for loop in loops:
        assert len(loop.signatures) <= 1, loop
