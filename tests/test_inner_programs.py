"""Steps with loops and calls of their own: they compute what plain `jit` computes, and plans count what is emitted.

A loop of known trip count is counted once an iteration, in plans and in both checks; of unknown trip count, once.
Calls are planned as their bodies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import custom_batching, lax
from jax.experimental.scheduling_groups import xla_metadata_call  # pyright: ignore[reportPrivateImportUsage]

import alpa_lite
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import close_to_jit
from tests.helpers import FREE_LINKS
from tests.marks import only

ROUNDS = 4
METHODS = {
    "data": {"method": alpa_lite.DataParallel()},
    "hlo": {"method": alpa_lite.DataParallel(), "verify": "hlo"},
    "auto": {"method": alpa_lite.Sharded((4, 2)), "cluster": FREE_LINKS, "verify": "hlo"},
    "pipeline": {"method": alpa_lite.Pipeline(submesh_shapes=((4,), (4,))), "num_microbatches": 1, "verify": "hlo"},
}
OFTEN = ("hlo", "pipeline")
State = dict[str, Any]


def step_of(direction: Callable[[Any, Any], Any]) -> Callable[[State, State], tuple[State, Any]]:
    """A train step of a small network that also moves a vector along what `direction` makes of it and the batch."""

    def loss(w: Any, batch: State) -> Any:
        return jnp.mean((jnp.tanh(jnp.tanh(batch["x"] @ w["a"]) @ w["b"]) - batch["y"]) ** 2)

    def step(state: State, batch: State) -> tuple[State, Any]:
        updated, value = sgd(loss)({name: state[name] for name in ("a", "b")}, batch)
        moved = direction(batch["x"], state["v"])
        return {**updated, "v": state["v"] - 0.1 * moved}, value + moved @ moved

    return step


def planned_as_jit(direction: Callable[[Any, Any], Any], **options: Any) -> alpa_lite.Plan:
    """Runs the step of a direction, compares it with plain `jit`, and returns its plan."""
    state = {"a": normal(0, 16, 32) * 0.3, "b": normal(1, 32, 8) * 0.3, "v": normal(2, 16) * 0.3}
    args = state, {"x": normal(3, 32, 16) * 0.3, "y": normal(4, 32, 8) * 0.3}
    return close_to_jit(step_of(direction), *args, rtol=2e-5, atol=2e-6, **options).plan(*args)


def curvature(x: Any, v: Any) -> Any:
    """A product with the batch's second moment: under data parallelism, a sum over all devices."""
    return v - 0.1 * (x.T @ (x @ v))


def loop(start: Any, goes_on: Callable[[Any], Any], following: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """`curvature` while a counter goes on."""

    def direction(x: Any, v: Any) -> Any:
        return lax.while_loop(lambda c: goes_on(c[1]), lambda c: (curvature(x, c[0]), following(c[1])), (v, start))[0]

    return direction


def nested(x: Any, v: Any) -> Any:
    def outer(carry: Any) -> Any:
        return loop(0, lambda i: i <= 1, lambda i: i + 1)(x, carry[0]), carry[1] + 1

    return lax.while_loop(lambda c: c[1] < 2, outer, (v, 0))[0]


def in_a_scan(x: Any, v: Any) -> Any:
    return lax.scan(lambda u, _: (loop(9, lambda i: i > 5, lambda i: i - 2)(x, u), None), v, None, length=2)[0]


def lowered_to_while(x: Any, v: Any) -> Any:
    return lax.fori_loop(0, jnp.minimum(ROUNDS, 9), lambda _, u: curvature(x, u), v)


def with_a_branch(x: Any, v: Any) -> Any:
    def body(carry: Any) -> Any:
        u, i = carry
        return lax.cond(i % 2 == 0, lambda u: curvature(x, u), lambda u: u * 0.9, u), i + 1

    return lax.while_loop(lambda c: c[1] < ROUNDS, body, (v, 0))[0]


def until_small(x: Any, v: Any) -> Any:
    def goes_on(carry: Any) -> Any:
        return (carry[1] < ROUNDS) & (jnp.sum(carry[0]) > -1e3)

    return lax.while_loop(goes_on, lambda c: (curvature(x, c[0]), c[1] + 1), (v, 0))[0]


def condition_of_the_batch(x: Any, v: Any) -> Any:
    def goes_on(carry: Any) -> Any:
        return (carry[1] < ROUNDS) & (jnp.sum(x @ carry[0]) < 1e6)

    return lax.while_loop(goes_on, lambda c: (c[0] * 0.9, c[1] + 1), (v, 0))[0]


LOOPS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "up": (loop(0, lambda i: i < ROUNDS, lambda i: i + 1), ROUNDS),
    "nested": (nested, 4),
    "in a scan": (in_a_scan, 4),
    "fori lowered to while": (lowered_to_while, ROUNDS),
    "branch": (with_a_branch, ROUNDS),
    "until small": (until_small, 1),
    "condition": (condition_of_the_batch, 1),
}
"""Directions, and how often their sum over the batch is counted."""


@pytest.mark.parametrize("name", ["up", "nested", "in a scan", "until small", "condition"])
def test_loops_equal_plain_jit(name: str) -> None:
    direction, count = LOOPS[name]
    plan = planned_as_jit(direction, **METHODS["data"], cluster=FREE_LINKS)
    sums = [c for c in plan.collectives if (c.kind == "all_reduce" and "curvature" in c.where) or "goes_on" in c.where]
    assert sum(c.count for c in sums) == count


@pytest.mark.slow
@pytest.mark.parametrize("method", only(OFTEN, METHODS))
@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_equals_plain_jit(name: str, method: str) -> None:
    plan = planned_as_jit(LOOPS[name][0], **METHODS[method])
    assert not any("not checked" in line for line in plan.verification)


def fixed_point(x: Any, v: Any) -> Any:
    """The root of u + (x.T x u) / 10 = v."""

    def solve(f: Callable[[Any], Any], start: Any) -> Any:
        return lax.fori_loop(0, ROUNDS, lambda _, u: u - f(u), start)

    def tangent(g: Callable[[Any], Any], y: Any) -> Any:
        return lax.fori_loop(0, ROUNDS, lambda _, u: u - (g(u) - y), jnp.zeros_like(y))

    return lax.custom_root(lambda u: u + 0.1 * (x.T @ (x @ u)) - v, v, solve, tangent)


def conjugate_gradients(x: Any, v: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda u: u + 0.1 * (x.T @ (x @ u)), v, maxiter=3)[0]


def linear_call(x: Any, v: Any) -> Any:
    return jax.custom_derivatives.linear_call(
        lambda x, u: u - 0.1 * (x.T @ (x @ u)), lambda x, t: t - 0.1 * (x.T @ (x @ t)), x, v
    )


def own_vmap(x: Any, v: Any) -> Any:
    function = custom_batching.custom_vmap(curvature)
    function.def_vmap(lambda size, batched, x, v: (curvature(x, v), False))
    return function(x, v)


def with_metadata(x: Any, v: Any) -> Any:
    return xla_metadata_call(lambda u: curvature(x, u), group="some")(v)


@jax.custom_vjp
def _own_rule(x: Any, v: Any) -> Any:
    return curvature(x, jnp.tanh(v))


def _own_forward(x: Any, v: Any) -> Any:
    return _own_rule(x, v), (x, v)


def _own_backward(kept: Any, t: Any) -> Any:
    x, v = kept
    return jnp.zeros_like(x), curvature(x, t) * (1 - jnp.tanh(v) ** 2)


_own_rule.defvjp(_own_forward, _own_backward, optimize_remat=True)


def differentiated(direction: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, v: jax.grad(lambda u: jnp.sum(direction(x, u) ** 2))(v)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "custom_root": fixed_point,
    "custom_root differentiated": differentiated(fixed_point),
    "conjugate gradients differentiated": differentiated(conjugate_gradients),
    "conjugate gradients": conjugate_gradients,
    "linear_call differentiated": differentiated(linear_call),
    "custom_vmap": own_vmap,
    "xla_metadata_call differentiated": differentiated(with_metadata),
    "custom_vjp with remat": _own_rule,
    "custom_vjp with remat differentiated": differentiated(_own_rule),
}


@pytest.mark.parametrize("name", ["custom_root", "linear_call differentiated", "custom_vmap", "custom_vjp with remat"])
def test_calls_are_planned_as_their_bodies(name: str) -> None:
    plan = planned_as_jit(CALLS[name], **METHODS["data"], cluster=FREE_LINKS)
    assert not plan.replicated


@pytest.mark.slow
@pytest.mark.parametrize("method", only(OFTEN, METHODS))
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_planned_as_its_body(name: str, method: str) -> None:
    planned_as_jit(CALLS[name], **METHODS[method])
