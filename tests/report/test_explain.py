from __future__ import annotations

import dataclasses

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.records import Alternative, Decision, Outcome, Solver
from tests.plans import gpt_plan

PATH = "state['params']['h_3']['mlp']['up']['kernel']"


def _verdict(chosen: Alternative, other: Alternative) -> str:
    """What explain says of `other`."""
    decision = Decision("k", "matmul", "m.py:1", 1, (8,), chosen.strategy, 1.0, (chosen, other))
    seconds = chosen.step.seconds
    solver = Solver("optimal", seconds, seconds - 1e-4, 1e-4 / seconds, 1000, 10)
    plan = gpt_plan(1)
    stage = dataclasses.replace(plan.stages[0], decisions=(decision,), solver=solver)
    plan = dataclasses.replace(plan, stages=(stage,), step_seconds=seconds, solver=solver)
    return " ".join(plan.explain("matmul").split("another choice win")[1].split())


def _alternative(axes: str, compute: float, links: float, *, latency: float = 0.0, batch: float = 0.0, **more):
    """A step of so many seconds computing, and so many waiting for links in addition to latency."""
    size, fits = more.pop("size", 100), more.pop("fits", True)
    step = Outcome(compute, links + latency, latency, batch, round(1e6 * links), size, 1)
    bound = more.pop("bound", step.seconds)
    return Alternative(((axes,),), f"[{axes}]", 1.0, 0.0, 0.0, 10, bound, step, fits, **more)


@pytest.mark.parametrize(
    "name",
    [
        PATH,
        "state/params/h_3/mlp/up/kernel",
        "params/h_3/mlp/up/kernel",
        "params['h_3']['mlp']['up']['kernel']",
        "params/h_{0-11}/mlp/up/kernel",
        "params/h/mlp/up/kernel",
        "h/mlp/up/kernel",
    ],
)
def test_an_argument_is_found_by_its_path_or_its_end(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert printed.startswith("state/params/h_{0-11}/mlp/up/kernel\n")
    assert "12 identical arguments share this decision; figures are totals over all 12" in printed
    assert "9.00 MiB whole, 4.50 MiB per device" in printed
    assert "> [None, model]" in " ".join(printed.split())
    assert "41.9 ms" in printed


def test_a_leaf_that_stages_share_is_found_by_its_own_path() -> None:
    plan = gpt_plan()
    first = plan.stages[0].arguments[0]
    part = dataclasses.replace(first, path="state['params']['stack']['w'][0:3]")
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], arguments=(part,)),))
    for name in ("state['params']['stack']['w']", "stack/w", "state/params/stack/w[0:3]"):
        assert plan.explain(name).startswith("state/params/stack/w[0:3]\n")


def test_a_path_ends_at_a_key() -> None:
    with pytest.raises(PlanError):
        gpt_plan().explain("_3/mlp/up/kernel")


@pytest.mark.parametrize("name", ["dot_general bsd,df->bsf", "dot_general", "gpt.py:68", "H/MLP/UP"])
def test_an_operation_is_found_by_name_or_place(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert "operation at gpt.py:68" in printed
    assert "no plan found with this choice fits" in " ".join(printed.split())
    assert "the fastest needs 83.8 GiB and is 63.7 ms slower per step" in " ".join(printed.split())


def test_what_is_not_distributed_says_why() -> None:
    assert "no rule describes it; at gpt.py:101" in gpt_plan().explain("top_k")


def test_without_alternatives_it_says_so() -> None:
    assert "no alternatives: the method fixed this sharding" in gpt_plan().explain("exp")
    assert "no alternatives: the method fixed this sharding" in gpt_plan().explain("wpe/embedding")


def test_of_many_matches_one_is_explained_and_the_others_are_listed() -> None:
    first, others = gpt_plan().explain("kernel").split("Other matches of 'kernel'")
    assert first.startswith("state/params/h_{0-11}/mlp/up/kernel\n")  # the only one with alternatives
    assert "41.9 ms" in first
    listed = [line.strip() for line in others.splitlines() if "kernel" in line]
    assert listed == [
        f"state/{tree}/h_{{0-11}}/{name}/kernel"
        for tree, names in (
            ("params", ("attn/{query,key,value}", "attn/out", "mlp/down")),
            ("opt/0/{mu,nu}", ("attn/{query,key,value}", "attn/out", "mlp/up", "mlp/down")),
        )
        for name in names
    ]


def test_parameters_come_before_their_moments() -> None:
    first, others = gpt_plan().explain("wte/embedding").split("Other matches")
    assert first.startswith("state/params/wte/embedding\n")
    assert "state/opt/0/{mu,nu}/wte/embedding" in others


def test_a_whole_path_is_explained_alone() -> None:
    assert "Other matches" not in gpt_plan().explain("state/params/h_3/mlp/up/kernel")
    assert "Other matches" not in gpt_plan().explain(PATH)


def test_what_is_printed_can_be_asked_for() -> None:
    plan = gpt_plan()
    listed = plan.explain("kernel").split("Other matches of 'kernel'")[1].splitlines()
    for name in (line.strip() for line in listed if "kernel" in line):
        assert plan.explain(name).startswith(name.replace("{query,key,value}", "")[:20])


def test_an_index_that_is_not_in_the_plan_is_unknown() -> None:
    with pytest.raises(PlanError):
        gpt_plan().explain("h_99/mlp/up/kernel")
    with pytest.raises(PlanError):
        gpt_plan().explain("params/h_1/mlp/up/kernel (stage 1)")


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("h_3/mlp/upp/kernel", "h_3/mlp/up/kernel"),
        ("dot_genral", "dot_general bsd,df->bsf"),
        ("top_q", "top_k"),
    ],
)
def test_an_unknown_name_gets_close_matches(name: str, close: str) -> None:
    with pytest.raises(PlanError) as caught:
        gpt_plan().explain(name)
    assert repr(name) in str(caught.value)
    assert close in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "zzzzzz", "(", "{", "h_{x", "[", "\\"])
def test_nonsense_is_refused_by_our_own_error(name: str) -> None:
    with pytest.raises(PlanError):
        gpt_plan().explain(name)


def test_everything_fits_a_hundred_columns() -> None:
    for name in (PATH, "dot_general", "kernel", "top_k"):
        assert max(map(len, gpt_plan().explain(name).splitlines())) <= 100


def test_alternatives_come_with_whole_steps_and_with_their_own_costs() -> None:
    lines = [" ".join(line.split()) for line in gpt_plan().explain(PATH).splitlines()]
    assert "> [None, model] 41.3 ms 29.2 ms 12.1 ms 1.13 GiB 7.45 GiB yes" in lines
    assert "a [data, model] 41.5 ms 29.2 ms 12.3 ms 1.15 GiB 7.36 GiB yes" in lines
    assert "a [data, model] 0 s 100 µs 0 s 330 µs 1.12 MiB" in lines


def test_links_that_would_have_to_be_faster() -> None:
    # 4 + 6/x < 9 + 0/x where x > 6/5
    said = _verdict(_alternative("a", 9.0, 0.0), _alternative("b", 4.0, 6.0))
    assert "1.00 s (11 %) slower per step (5.00 s less compute, 6.00 s more communication)" in said
    assert "would win with links more than 1.20 times as fast." in said


def test_links_that_would_have_to_be_slower() -> None:
    # 10 + 0/x < 4 + 3/x where x < 3/6
    said = _verdict(_alternative("a", 4.0, 3.0), _alternative("b", 10.0, 0.0))
    assert "would win with links less than 0.50 times as fast." in said


def test_faster_links_do_not_shorten_latency() -> None:
    # 5 + 6/x < 7 + 0/x where x > 3, of which the 5 are 1 of latency
    said = _verdict(_alternative("a", 7.0, 0.0), _alternative("b", 4.0, 6.0, latency=1.0))
    assert "would win with links more than 3.00 times as fast." in said


def test_batches_that_would_have_to_be_larger_or_smaller() -> None:
    # chosen 1 + 4 b; other 5 + 2 b wins where b > 2; the plan's batch is 64
    said = _verdict(_alternative("a", 5.0, 0.0, batch=4.0), _alternative("b", 7.0, 0.0, batch=2.0))
    assert "would win with a batch more than 2.00 times as large (above 128 examples)." in said
    # chosen 4 + 1 b; other 1 + 5 b wins where b < 3/4
    said = _verdict(_alternative("a", 5.0, 0.0, batch=1.0), _alternative("b", 6.0, 0.0, batch=5.0))
    assert "would win with a batch less than 0.75 times as large (below 48.0 examples)." in said


def test_what_nobody_can_reach_is_not_offered() -> None:
    # 5 + 5000/x < 6 + 0/x where x > 5000; batches likewise
    said = _verdict(_alternative("a", 6.0, 0.0), _alternative("b", 5.0, 5000.0))
    assert "no change of batch size, link speed or memory alone would make it faster" in said


def test_a_smaller_budget_may_favour_what_takes_less() -> None:
    said = _verdict(_alternative("a", 1.0, 1.0, size=100), _alternative("b", 1.0, 2.0, size=40))
    assert "would win if a device could hold 40 B but not 100 B." in said
    whole = 15 * 2**30
    said = _verdict(_alternative("a", 1.0, 1.0, size=whole + 2**24), _alternative("b", 1.0, 2.0, size=whole))
    assert "hold 15.0 GiB (16,106,127,360 bytes) but not 15.0 GiB (16,122,904,576 bytes)." in said


def test_a_larger_budget_may_favour_what_does_not_fit() -> None:
    roomy = Outcome(1.0, 0.5, 0.0, 0.0, 0, 300, 1)
    said = _verdict(_alternative("a", 2.0, 0.0), _alternative("b", 3.0, 0.0, roomy=roomy))
    assert "would win with 300 B per device, by 500 ms per step." in said
    gains = dataclasses.replace(_alternative("a", 2.0, 0.0), roomy=dataclasses.replace(roomy, compute_seconds=0.4))
    said = _verdict(gains, _alternative("b", 3.0, 0.0, roomy=roomy))
    assert "memory alone would make it faster" in said
    slower = dataclasses.replace(roomy, compute_seconds=2.0)
    said = _verdict(_alternative("a", 2.0, 0.0), _alternative("b", 3.0, 0.0, roomy=slower))
    assert "memory alone would make it faster" in said


def test_what_does_not_fit_says_what_it_needs() -> None:
    chosen = _alternative("a", 2.0, 0.0)
    said = _verdict(chosen, _alternative("b", 1.0, 0.0, size=2**30, fits=False))
    assert "the fastest needs 1.00 GiB and is 1.00 s faster per step than the chosen one: with that memory it" in said
    said = _verdict(chosen, _alternative("b", 3.0, 0.0, size=2**30, fits=False))
    assert "is 1.00 s slower per step than the chosen one: more memory would not make it win." in said


def test_a_bound_below_the_step_that_was_found_is_told() -> None:
    chosen = _alternative("a", 2.0, 0.0)
    assert "at least 400 ms slower in any plan" in _verdict(chosen, _alternative("b", 3.0, 0.0, bound=2.4))
    assert "in any plan" not in _verdict(chosen, _alternative("b", 3.0, 0.0, bound=3.0))
    assert "in any plan" not in _verdict(chosen, _alternative("b", 3.0, 0.0, bound=1.9))


def test_ties_and_better_steps_are_named() -> None:
    assert "takes equally long: either choice will do" in _verdict(
        _alternative("a", 1.0, 1.0), _alternative("b", 2.0, 0.0)
    )
    said = _verdict(_alternative("a", 2.0, 0.0), _alternative("b", 1.0, 0.0))
    assert "the step takes 1.00 s less: this plan is not the fastest" in said
    said = _verdict(_alternative("a", 2.0, 0.0), _alternative("b", 2.0 - 1e-5, 0.0))
    assert "the step takes 10.0 µs less: within the solver's gap of 100 µs" in said
