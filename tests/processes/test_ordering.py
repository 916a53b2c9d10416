"""The proof that no process waits for ever finds every order that would make one wait."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.processes import ordering
from alpa_lite.program import Send
from tests import pipeline_driver

BOTH, AB, BC, AC = frozenset({0, 1}), frozenset({0, 1}), frozenset({1, 2}), frozenset({0, 2})


def test_one_total_order_is_enough():
    ordering.check_order({0: "adc", 1: "abd", 2: "bdc"}, {"a": AB, "b": BC, "c": AC, "d": frozenset({0, 1, 2})})


@pytest.mark.parametrize("first", list(itertools.permutations("abc")))
def test_a_cycle_of_three_is_found(first):
    """Each pair of three processes meets once; the three orders of two rendezvous each agree, or form a cycle."""
    where = {"a": AB, "b": BC, "c": AC}
    good = {p: [m for m in first if p in where[m]] for p in range(3)}
    ordering.check_order(good, where)
    cycle = {0: ["a", "c"], 1: ["b", "a"], 2: ["c", "b"]}
    with pytest.raises(PlanError, match="3 processes would wait for each other for ever: process 0 at a"):
        ordering.check_order(cycle, where)


def test_a_process_that_leaves_a_rendezvous_out_or_enters_one_twice_is_named():
    where = {"a": BOTH, "b": BOTH}
    for broken in (["a"], ["a", "b", "b"], ["a", "a"]):
        with pytest.raises(PlanError, match="process 1 enters"):
            ordering.check_order({0: ["a", "b"], 1: broken}, where)


def test_two_transfers_of_a_program_in_another_order_are_found():
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return ((x - batch["y"]) ** 2).mean()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    args = [jnp.ones((8, 8))] * 4, {"x": jnp.ones((8, 8)), "y": jnp.zeros((8, 8))}
    program = pipeline_driver.drive(step, args, devices=(2, 4)).pipeline.program
    processes = [0, 0, 1, 1, 2, 2]  # the second submesh spans two of them
    ordering.check_program(program, processes)
    who = ordering.find_rendezvous(program, processes)
    own = ordering.order_by_process(who)
    runs = [task for task in own[1] if not isinstance(program.lists[task[0]][task[1]], Send)]
    sends = [task for task in own[1] if task not in runs]
    assert len(sends) >= 4 and len(runs) >= 4 and own[1] == own[2] and set(own[0]) == set(sends)
    ordering.check_order(own, who)
    for a, b in ((sends[0], sends[1]), (runs[0], sends[-1])):
        swapped = {a: b, b: a}
        broken = {**own, 1: [swapped.get(task, task) for task in own[1]]}
        with pytest.raises(PlanError, match="would wait for each other for ever"):
            ordering.check_order(broken, who)
