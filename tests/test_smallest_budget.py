"""Refusals for memory: the budget that they print is the given one, and `smallest_budget` works when it is given."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import alpa_lite
from gallery.batches import normal as drawn
from gallery.steps import optimizer_step, sgd, square_layers
from tests.marks import only, slow

GIVEN = 3521
METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sharded": {"method": alpa_lite.Sharded()},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2)},
    "zero": {"method": alpa_lite.Zero(3)},
    "micro-batches": {"num_microbatches": 2},
    "interleaved": {"method": alpa_lite.Pipeline(num_stages=2, schedule="1f1b", remat="layer")},
}


def normal(*shape: int) -> Any:
    return drawn(0, *shape) * 0.3


def scanned(weights: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)


def embedded(weights: Any, batch: Any) -> Any:
    return jnp.mean(jnp.tanh(weights["e"][batch] @ weights["w"]) ** 2)


def rematerialised(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w.T))(x, w)
    return jnp.mean(x**2)


def manual(weights: Any, x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    layer = jax.shard_map(lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    return jnp.mean(layer(weights[1], layer(weights[0], x)) ** 2)


ADAM = optax.adam(1e-3)
ADAM_WEIGHTS = [normal(32, 32)] * 2
STEPS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "weights": (sgd(square_layers), lambda: ([normal(62, 62) for _ in range(2)], normal(24, 62))),
    "activations": (sgd(square_layers), lambda: ([normal(32, 32) for _ in range(4)], normal(512, 32))),
    "indivisible": (sgd(square_layers), lambda: ([normal(30, 50), normal(50, 30)], normal(18, 30))),
    "adam": (optimizer_step(square_layers, ADAM), lambda: (ADAM_WEIGHTS, ADAM.init(ADAM_WEIGHTS), normal(64, 32))),
    "embedding": (sgd(embedded), lambda: ({"e": normal(256, 16), "w": normal(16, 16)}, jnp.arange(64) % 256)),
    "rematerialised": (sgd(rematerialised), lambda: ([normal(32, 32) for _ in range(2)], normal(256, 32))),
    "scanned": (sgd(scanned), lambda: (normal(4, 32, 32), normal(128, 32))),
    "shard_map": (sgd(manual), lambda: ([normal(64, 64) for _ in range(2)], normal(24, 64))),
}


def check(name: str, method: str) -> None:
    step, arguments = STEPS[name]
    with pytest.raises(alpa_lite.InfeasibleError) as caught:
        alpa_lite.parallelize(step, **METHODS[method], memory_per_device=GIVEN).plan(*arguments())
    text, least = str(caught.value), caught.value.smallest_budget
    assert least is not None and least > GIVEN
    printed = re.findall(r"memory_per_device=[^(=]*\(([\d,]+) bytes\)", text)
    assert printed and {int(number.replace(",", "")) for number in printed} == {GIVEN}
    works = re.findall(r"(?:works on one mesh is|stages needs) [\d.]+ \wiB \(([\d,]+) bytes\)", text)
    assert min(int(number.replace(",", "")) for number in works) == least
    assert not re.search(r"[\d.]+ seconds", text)
    plan = alpa_lite.parallelize(step, **METHODS[method], memory_per_device=int(least)).plan(*arguments())
    assert max(stage.memory.total for stage in plan.stages) <= least


@pytest.mark.parametrize(
    ("name", "method"), [("weights", "pipeline"), slow("embedding", "sharded"), slow("shard_map", "auto")]
)
def test_the_smallest_budget_works(name: str, method: str) -> None:
    check(name, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", only(("auto", "pipeline"), METHODS))
@pytest.mark.parametrize("name", [name for name in STEPS if name != "shard_map"])
def test_the_smallest_budget_of_every_step_works(name: str, method: str) -> None:
    check(name, method)


def test_more_micro_batches_are_among_what_was_tried() -> None:
    """One micro-batch needs 82,948 bytes."""
    step, arguments = STEPS["activations"]
    with pytest.raises(alpa_lite.InfeasibleError, match=r"This is with \d+ micro-batches") as caught:
        alpa_lite.parallelize(step, method=alpa_lite.Sharded(), memory_per_device=GIVEN).plan(*arguments())
    assert caught.value.smallest_budget is not None and caught.value.smallest_budget < 50_000
