import dataclasses

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.plan.decisions import Alternative, Decision, Outcome, Solver
from tests.plans import gpt_plan

PATH = "state['params']['h_3']['mlp']['up']['kernel']"


@pytest.mark.parametrize(
    "name",
    [
        PATH, "state/params/h_3/mlp/up/kernel", "params/h_3/mlp/up/kernel", "params['h_3']['mlp']['up']['kernel']",
        "params/h_{0-11}/mlp/up/kernel", "params/h/mlp/up/kernel", "h/mlp/up/kernel",
    ],
)  # fmt: skip
def test_an_argument_is_found_by_its_path_or_its_end(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert printed.startswith("state/params/h_{0-11}/mlp/up/kernel\n")
    assert "12 identical arguments share this decision; figures are totals over all 12" in printed
    assert "9.00 MiB whole, 4.50 MiB per device" in printed
    assert "> [None, model]" in " ".join(printed.split())
    assert "41.9 ms" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_leaf_that_stages_share_is_found_by_its_own_path() -> None:
    plan = gpt_plan()
    part = dataclasses.replace(plan.stages[0].arguments[0], path="state['params']['stack']['w'][0:3]")
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], arguments=(part,)),))
    for name in ("state['params']['stack']['w']", "stack/w", "state/params/stack/w[0:3]"):
        assert plan.explain(name).startswith("state/params/stack/w[0:3]\n")


@pytest.mark.parametrize("name", ["dot_general bsd,df->bsf", "dot_general", "gpt.py:68", "H/MLP/UP"])
def test_an_operation_is_found_by_name_or_place(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert "operation at gpt.py:68" in printed
    assert "no plan found with this choice fits" in " ".join(printed.split())
    assert "the fastest needs 83.8 GiB and is 63.7 ms slower per step" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


def test_operations_without_a_rule_and_without_alternatives() -> None:
    replicated = gpt_plan().explain("top_k")
    assert "no rule describes it; at gpt.py:101" in replicated and max(map(len, replicated.splitlines())) <= 100
    assert "no alternatives: the method fixed this sharding" in gpt_plan().explain("exp")
    assert "no alternatives: the method fixed this sharding" in gpt_plan().explain("wpe/embedding")


def test_of_many_matches_one_is_explained_and_the_others_are_listed() -> None:
    plan = gpt_plan()
    printed = plan.explain("kernel")
    assert max(map(len, printed.splitlines())) <= 100
    first, others = printed.split("Other matches of 'kernel'")
    assert first.startswith("state/params/h_{0-11}/mlp/up/kernel\n")  # the only one with alternatives
    assert "41.9 ms" in first
    listed = [line.strip() for line in others.splitlines() if "kernel" in line]
    attention = [f"h_{{0-11}}/attn/{name}/kernel" for name in ("{query,key,value}", "out")]
    up, down = "h_{0-11}/mlp/up/kernel", "h_{0-11}/mlp/down/kernel"
    assert listed == [
        *(f"state/params/{name}" for name in (*attention, down)),
        *(f"state/opt/0/{{mu,nu}}/{name}" for name in (*attention, up, down)),
    ]
    for name in listed:
        assert plan.explain(name).startswith(name.replace("{query,key,value}", "")[:20])
    first, others = plan.explain("wte/embedding").split("Other matches")
    assert first.startswith("state/params/wte/embedding\n")  # parameters come before their moments
    assert "state/opt/0/{mu,nu}/wte/embedding" in others
    assert "Other matches" not in plan.explain("state/params/h_3/mlp/up/kernel")
    assert "Other matches" not in plan.explain(PATH)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("h_3/mlp/upp/kernel", "h_3/mlp/up/kernel"), ("dot_genral", "dot_general bsd,df->bsf"), ("top_q", "top_k"),
        ("_3/mlp/up/kernel", ""),  # a path ends at a key
        ("h_99/mlp/up/kernel", ""), ("params/h_1/mlp/up/kernel (stage 1)", ""),
        *((nonsense, "") for nonsense in ("", " ", "zzzzzz", "(", "{", "h_{x", "[", "\\")),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_close_matches(name: str, close: str) -> None:
    with pytest.raises(PlanError) as caught:
        gpt_plan().explain(name)
    assert not close or (repr(name) in str(caught.value) and close in str(caught.value))


def test_alternatives_come_with_whole_steps_and_with_their_own_costs() -> None:
    lines = [" ".join(line.split()) for line in gpt_plan().explain(PATH).splitlines()]
    assert "> [None, model] 41.3 ms 29.2 ms 12.1 ms 1.13 GiB 7.45 GiB yes" in lines
    assert "a [data, model] 41.5 ms 29.2 ms 12.3 ms 1.15 GiB 7.36 GiB yes" in lines
    assert "a [data, model] 0 s 100 µs 0 s 330 µs 1.12 MiB" in lines


def made(compute: float, links: float = 0.0, *, latency: float = 0.0, batch: float = 0.0, **more) -> Alternative:
    """A step of `compute` seconds computing, and `links` seconds waiting for links in addition to latency."""
    size, fits = more.pop("size", 100), more.pop("fits", True)
    step = Outcome(compute, links + latency, latency, batch, round(1e6 * links), size, 1)
    bound = more.pop("bound", step.seconds)
    return Alternative((("a",),), "[a]", 1.0, 0.0, 0.0, 10, bound, step, fits, **more)


GIB = 2**30
ROOMY = Outcome(1.0, 0.5, 0.0, 0.0, 0, 300, 1)
NOTHING_ELSE = "memory alone would make it faster"
VERDICTS = {
    "slower, and links": (made(9.0), made(4.0, 6.0), "1.00 s (11 %) slower per step (5.00 s less compute, 6.00 s more"),
    # 4 + 6/x < 9 + 0/x where x > 6/5
    "faster links": (made(9.0), made(4.0, 6.0), "would win with links more than 1.20 times as fast."),
    # 10 + 0/x < 4 + 3/x where x < 3/6
    "slower links": (made(4.0, 3.0), made(10.0), "would win with links less than 0.50 times as fast."),
    # 5 + 6/x < 7 + 0/x where x > 3, of which the 5 are 1 of latency
    "latency": (made(7.0), made(4.0, 6.0, latency=1.0), "would win with links more than 3.00 times as fast."),
    # chosen 1 + 4 b; other 5 + 2 b wins where b > 2; the plan's batch is 64
    "a larger batch": (
        made(5.0, batch=4.0), made(7.0, batch=2.0),
        "would win with a batch more than 2.00 times as large (above 128 examples).",
    ),
    # chosen 4 + 1 b; other 1 + 5 b wins where b < 3/4
    "a smaller batch": (
        made(5.0, batch=1.0), made(6.0, batch=5.0),
        "would win with a batch less than 0.75 times as large (below 48.0 examples).",
    ),
    # 5 + 5000/x < 6 + 0/x where x > 5000; batches likewise
    "out of reach": (made(6.0), made(5.0, 5000.0), "no change of batch size, link speed or " + NOTHING_ELSE),
    "a smaller budget": (
        made(1.0, 1.0), made(1.0, 2.0, size=40), "would win if a device could hold 40 B but not 100 B.",
    ),
    "a budget a little smaller": (
        made(1.0, 1.0, size=15 * GIB + 2**24), made(1.0, 2.0, size=15 * GIB),
        "hold 15.0 GiB (16,106,127,360 bytes) but not 15.0 GiB (16,122,904,576 bytes).",
    ),
    "a larger budget": (made(2.0), made(3.0, roomy=ROOMY), "would win with 300 B per device, by 500 ms per step."),
    "a larger budget for both": (
        made(2.0, roomy=dataclasses.replace(ROOMY, compute_seconds=0.4)), made(3.0, roomy=ROOMY), NOTHING_ELSE,
    ),
    "a larger budget for nothing": (
        made(2.0), made(3.0, roomy=dataclasses.replace(ROOMY, compute_seconds=2.0)), NOTHING_ELSE,
    ),
    "too large and faster": (
        made(2.0), made(1.0, size=GIB, fits=False),
        "the fastest needs 1.00 GiB and is 1.00 s faster per step than the chosen one: with that memory it",
    ),
    "too large and slower": (
        made(2.0), made(3.0, size=GIB, fits=False),
        "is 1.00 s slower per step than the chosen one: more memory would not make it win.",
    ),
    "a bound": (made(2.0), made(3.0, bound=2.4), "at least 400 ms slower in any plan"),
    "no bound": (made(2.0), made(3.0, bound=3.0), None),
    "a bound below the chosen": (made(2.0), made(3.0, bound=1.9), None),
    "a tie": (made(1.0, 1.0), made(2.0), "takes equally long: either choice will do"),
    "better": (made(2.0), made(1.0), "the step takes 1.00 s less: this plan is not the fastest"),
    "better within the gap": (
        made(2.0), made(2.0 - 1e-5), "the step takes 10.0 µs less: within the solver's gap of 100 µs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_conditions_under_which_another_choice_wins(name: str) -> None:
    chosen, other, said = VERDICTS[name]
    other = dataclasses.replace(other, strategy=(("b",),), layout="[b]")
    decision = Decision("k", "matmul", "m.py:1", 1, (8,), chosen.strategy, 1.0, (chosen, other))
    seconds = chosen.step.seconds
    solver = Solver("optimal", seconds, seconds - 1e-4, 1e-4 / seconds, 1000, 10)
    plan = gpt_plan(1)
    stage = dataclasses.replace(plan.stages[0], decisions=(decision,), solver=solver)
    plan = dataclasses.replace(plan, stages=(stage,), step_seconds=seconds, solver=solver)
    printed = " ".join(plan.explain("matmul").split("another choice win")[1].split())
    assert (said in printed) if said else ("in any plan" not in printed)
