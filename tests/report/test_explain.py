from __future__ import annotations

import dataclasses

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.plan import Alternative, Decision
from tests.plans import gpt_plan

PATH = "state['params']['h_3']['mlp']['up']['kernel']"


def _verdict(chosen: Alternative, other: Alternative) -> str:
    """What explain says of `other`."""
    decision = Decision("k", "matmul", "m.py:1", 1, (8,), chosen.strategy, 1.0, (chosen, other))
    plan = dataclasses.replace(gpt_plan(1), decisions=(decision,))
    return " ".join(plan.explain("matmul").split("another to win")[1].split())


def _alternative(axes: str, compute: float, communication: float, **more) -> Alternative:
    return Alternative(((axes,),), f"[{axes}]", compute, communication, 0.0, more.pop("size", 100), **more)


@pytest.mark.parametrize(
    "name", [PATH, "params/h_3/mlp/up/kernel", "params['h_3']['mlp']['up']['kernel']", "params/h_{0-11}/mlp/up/kernel"]
)
def test_an_argument_is_found_by_its_path_or_its_end(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert printed.startswith("state['params']['h_{0-11}']['mlp']['up']['kernel']")
    assert "decided once for 12 alike ones" in printed
    assert "9.00 MiB whole, 4.50 MiB per device" in printed
    assert "> [None, model]" in " ".join(printed.split())
    assert "41.9 ms" in printed


def test_a_path_ends_at_a_key() -> None:
    with pytest.raises(PlanError):
        gpt_plan().explain("_3/mlp/up/kernel")


@pytest.mark.parametrize("name", ["dot_general bsd,df->bsf", "dot_general", "gpt.py:68", "H/MLP/UP"])
def test_an_operation_is_found_by_name_or_place(name: str) -> None:
    printed = gpt_plan().explain(name)
    assert "operation at gpt.py:68" in printed
    assert "does not fit" in printed
    assert "needs at least 7.88 GiB more" in " ".join(printed.split())


def test_what_is_not_distributed_says_why() -> None:
    assert "no rule describes it; at gpt.py:101" in gpt_plan().explain("top_k")


def test_without_alternatives_it_says_so() -> None:
    assert "no alternatives are known" in gpt_plan().explain("exp")
    assert "no alternatives are known" in gpt_plan().explain("wpe/embedding")


def test_many_matches_are_listed() -> None:
    printed = gpt_plan().explain("kernel")
    assert "match 'kernel'" in printed
    assert "['attn']['out']['kernel']" in printed


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("h_3/mlp/upp/kernel", "['h_3']['mlp']['up']['kernel']"),
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


def test_links_that_would_have_to_be_faster() -> None:
    # 4 + 6/x < 9 + 0/x where x > 6/5
    said = _verdict(_alternative("a", 9.0, 0.0), _alternative("b", 4.0, 6.0))
    assert "costs 1.00 s more by itself; wins with links more than 1.20 times as fast" in said


def test_links_that_would_have_to_be_slower() -> None:
    # 10 + 0/x < 4 + 3/x where x < 3/6
    said = _verdict(_alternative("a", 4.0, 3.0), _alternative("b", 10.0, 0.0))
    assert "wins with links less than 0.50 times as fast" in said


def test_batches_that_would_have_to_be_larger_or_smaller() -> None:
    # chosen 1 + 4 b; other 5 + 2 b wins where b > 2
    said = _verdict(_alternative("a", 5.0, 0.0, batch_seconds=4.0), _alternative("b", 7.0, 0.0, batch_seconds=2.0))
    assert "wins with a batch more than 2.00 times as large" in said
    # chosen 4 + 1 b; other 1 + 5 b wins where b < 3/4
    said = _verdict(_alternative("a", 5.0, 0.0, batch_seconds=1.0), _alternative("b", 6.0, 0.0, batch_seconds=5.0))
    assert "wins with a batch less than 0.75 times as large" in said


def test_whole_step_costs_win_over_local_ones() -> None:
    chosen = _alternative("a", 1.0, 1.0, total_seconds=10.0, total_communication_seconds=4.0)
    other = _alternative("b", 1.0, 0.5, total_seconds=11.0, total_communication_seconds=6.0)
    # 5 + 6/x < 6 + 4/x where x > 2
    assert "costs 1.00 s more per step; wins with links more than 2.00 times as fast" in _verdict(chosen, other)


def test_what_is_worse_in_everything_never_wins() -> None:
    said = _verdict(_alternative("a", 1.0, 1.0), _alternative("b", 1.0, 2.0, size=40))
    assert "no link speed and no batch size alone changes that; takes 60 B less per device" in said


def test_ties_and_local_gains_are_named() -> None:
    assert "costs the same by itself" in _verdict(_alternative("a", 1.0, 1.0), _alternative("b", 2.0, 0.0))
    assert "the whole plan is what counts" in _verdict(_alternative("a", 1.0, 1.0), _alternative("b", 1.0, 0.0))
