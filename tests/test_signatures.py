"""One signature for `ParallelStep`, tracing and executables: each call runs the plan made for it, in any thread."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import alpa_lite
from alpa_lite import api, planned_calls
from alpa_lite.compilation import existing_placement
from alpa_lite.errors import SignatureError
from alpa_lite.passes.tracing import calls, trace
from alpa_lite.runtime.binding import NewSignature
from gallery.batches import normal
from tests.comparing import compare
from tests.marks import slow

WIDTH, ROWS = 8, 16


@dataclass(frozen=True)
class Config:
    """A hashable object with a value, as users pass it."""

    rate: float
    clip: float | None = None


def square(x: jax.Array) -> jax.Array:
    return x * x


def make(rows: int = ROWS) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    state = {"first": normal(0, WIDTH, WIDTH), "second": normal(1, WIDTH, WIDTH)}
    return state, {"x": normal(rows, rows, WIDTH), "y": normal(rows + 1, rows, WIDTH)}


def step(state: Any, batch: Any, how: Any = 1, *, scale: Any = 1.0) -> Any:
    """What it computes depends on the value and on the type of `how` and `scale`."""
    rate = how.rate if isinstance(how, Config) else 0.1
    turn = how if callable(how) else jnp.tanh

    def loss(s):
        x = turn(batch["x"] @ s["first"]) @ s["second"]
        x = x * {"str": len(how) if isinstance(how, str) else 0, "NoneType": 7.0}.get(type(how).__name__, 1.0)
        for _ in range(how if isinstance(how, int) and not isinstance(how, bool) else 0):
            x = x + 0.5
        error = ((x - batch["y"]) ** 2).mean()
        return error * (3.0 if scale is None else scale)

    value, grads = jax.value_and_grad(loss)(state)
    bound = how.clip if isinstance(how, Config) and how.clip is not None else 1e9
    return jax.tree.map(lambda p, g: p - rate * jnp.clip(g, -bound, bound), state, grads), value


METHODS = {
    "one device": lambda: {"cluster": alpa_lite.Cluster.local(jax.devices()[:1])},
    "eight devices": lambda: {"method": alpa_lite.Zero(stage=3)},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
SLOW_PIPELINE = ["one device", slow("pipeline")]


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """Weak references to what `compile_step` has made, one a planning."""
    made: list[Any] = []
    original = existing_placement.compile_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(existing_placement, "compile_step", counting)
    return made


# -- static arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_each_static_value_has_its_own_results(where):
    parallel = alpa_lite.parallelize(step, static_argnums=2, static_argnames="scale", **METHODS[where]())
    values = [1, 2, "tanh", None, Config(0.1), Config(0.2), square]
    plans = {}
    if where == "pipeline":  # which takes longer to plan
        values = [1, 2, None, Config(0.2)]
    for value in (*values, *reversed(values)):  # the second time from what is kept
        args = (*make(), value)
        compare(parallel(*args), step(*args))
        assert parallel.plan(*args) is plans.setdefault(value, parallel.plan(*args))
    assert len({id(plan) for plan in plans.values()}) == len(values)
    assert parallel.plan(*make(), Config(0.2)) is plans[Config(0.2)]
    cases: list[Any] = [{"scale": 2.0}, {"scale": None}, {"how": 3}, {}, {"scale": 3}, {"how": 0, "scale": 2}]
    for keywords in cases[: 4 if where == "pipeline" else None]:
        compare(parallel(*make(), **keywords), step(*make(), **keywords))


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_equal_values_of_other_types_are_other_signatures(where):
    def typed(state, batch, how):
        new, loss = step(state, batch)
        return new, loss * {"bool": 2, "int": 3, "float": 4}[type(how).__name__]

    parallel = alpa_lite.parallelize(typed, static_argnums=2, **METHODS[where]())
    for value in (1, True, 1.0, 1, True):
        compare(parallel(*make(), value), typed(*make(), value))
    with pytest.raises(SignatureError, match="how is not hashable"):
        parallel(*make(), [2])


# -- one definition ---------------------------------------------------------------------------------------------------


def change(tree: Any, **leaves: Any) -> Any:
    return {**tree, **leaves}


STATE, BATCH = make()
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "planned": ((STATE, BATCH, 2, 0.5), {"mode": "sum"}),
    "another float": ((STATE, BATCH, 2, 0.25), {"mode": "sum"}),
    "NumPy arrays": ((jax.tree.map(np.asarray, STATE), BATCH, 2, 0.5), {"mode": "sum"}),
    "float64, which JAX makes float32": ((STATE, change(BATCH, x=np.ones((ROWS, WIDTH))), 2, 0.5), {"mode": "sum"}),
    "a weak array": ((STATE, BATCH, 2, jnp.asarray(0.5)), {"mode": "sum"}),
    "an integer": ((STATE, BATCH, 2, 1), {"mode": "sum"}),
    "a strong float": ((STATE, BATCH, 2, np.float32(0.5)), {"mode": "sum"}),
    "static value": ((STATE, BATCH, 3, 0.5), {"mode": "sum"}),
    "static type": ((STATE, BATCH, 2.0, 0.5), {"mode": "sum"}),
    "static keyword": ((STATE, BATCH, 2, 0.5), {"mode": "mean"}),
    "keyword left out": ((STATE, BATCH, 2, 0.5), {}),
    "static by keyword": ((STATE, BATCH), {"times": 2, "rate": 0.5, "mode": "sum"}),
    "rate by keyword": ((STATE, BATCH, 2), {"rate": 0.5, "mode": "sum"}),
    "shape": ((STATE, make(2 * ROWS)[1], 2, 0.5), {"mode": "sum"}),
    "dtype": ((STATE, change(BATCH, x=np.ones((ROWS, WIDTH), np.int32)), 2, 0.5), {"mode": "sum"}),
    "structure": ((STATE, change(BATCH, z=np.ones(ROWS)), 2, 0.5), {"mode": "sum"}),
    "no array": ((STATE, change(BATCH, x="text"), 2, 0.5), {"mode": "sum"}),
}


def planned(state: Any, batch: Any, times: Any, rate: Any = 1.0, *, mode: str = "sum") -> Any:
    new, loss = step(state, batch, times)
    return new, loss * rate if mode == "sum" else loss


def signature(fun: Any, args: Any, kwargs: Any, *static: Any) -> calls.Signature:
    return calls.signature(calls.describe_calling(fun, args, kwargs, *static), args, kwargs)


@pytest.fixture(scope="module")
def executables() -> list[Any]:
    args, kwargs = CALLS["planned"]
    options = {"batch_argnums": 1, "static_argnums": 2, "static_argnames": "mode", "donate_argnums": ()}
    steps = [alpa_lite.parallelize(planned, **{**options, **METHODS[where]()}) for where in METHODS]
    for parallel in steps:
        parallel(*args, **kwargs)
    return [parallel._current for parallel in steps]


@pytest.mark.parametrize("case", CALLS)
def test_an_executable_takes_exactly_the_calls_with_its_signature(case, executables):
    args, kwargs = CALLS[case]
    accepted = signature(planned, args, kwargs, 2, "mode") == signature(planned, *CALLS["planned"], 2, "mode")
    for executable in executables:
        if accepted:
            compare(executable(*args, **kwargs), planned(*args, **kwargs))
            executable.place(*args, **kwargs)
            continue
        for call in (executable, executable.place):
            with pytest.raises(NewSignature, match=r"planned for another signature: .+"):
                call(*args, **kwargs)


class Model(nnx.Module):
    def __init__(self, depth: int = 2) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def module_step(model: Model, batch: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda model: ((model(batch["x"]) - batch["y"]) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return value


def test_modules_of_one_structure_have_one_signature(compiled):
    def one(model: Model) -> calls.Signature:
        return signature(module_step, (model, BATCH), {})

    parallel, model = alpa_lite.parallelize(module_step, method=alpa_lite.DataParallel()), Model()
    before = one(model)
    assert before.tree == trace(module_step, (model, BATCH), {}).in_tree
    for _ in range(2):
        parallel(model, BATCH)
    assert one(model) == one(Model()) == one(nnx.eval_shape(Model)) == before != one(Model(3))
    assert parallel.plan(Model(), BATCH) is parallel.plan(model, BATCH)
    assert len(compiled) == 1
    model.layers.append(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(2)))
    parallel(model, BATCH)
    assert len(compiled) == 2


# -- plans that are kept ----------------------------------------------------------------------------------------------


def test_the_least_recently_used_plan_is_dropped(monkeypatch, compiled):
    monkeypatch.setattr(planned_calls, "SIGNATURES", 3)
    parallel = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    for rows in (8, 16, 24, 8, 32):  # drops 16
        parallel.plan(*make(rows))
    gc.collect()
    assert [one() is None for one in compiled] == [False, True, False, False]
    for rows, count in ((8, 4), (24, 4), (16, 5)):
        parallel.plan(*make(rows))
        assert len(compiled) == count


def test_the_running_plan_is_not_dropped(monkeypatch, compiled):
    monkeypatch.setattr(planned_calls, "SIGNATURES", 2)
    parallel = alpa_lite.parallelize(step, method=alpa_lite.Zero(stage=3))
    state, batch = make()
    state, _ = parallel(state, batch)
    for rows in (8, 24, 32):
        parallel.plan(*make(rows))
        state, _ = parallel(state, batch)
    assert len(compiled) == 4  # the one that runs was planned once


def test_the_cluster_is_that_of_the_devices_that_are_here(monkeypatch):
    parallel = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    devices = jax.devices()
    assert parallel.cluster.num_devices == len(devices)
    before = parallel.plan(*make())
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:4])
    assert parallel.cluster.num_devices == 4
    assert parallel.plan(*make()).cluster.num_devices == 4
    monkeypatch.undo()
    assert parallel.plan(*make()) is before


# -- threads ----------------------------------------------------------------------------------------------------------


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Runs functions at the same time, and raises what they raise."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        start.wait(timeout=60)
        function()

    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(run, function) for function in functions]:
            future.result(timeout=500)


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_threads_that_call_one_step(where, compiled):
    parallel = alpa_lite.parallelize(step, static_argnums=2, **METHODS[where]())
    wanted = {(rows, how): step(*make(rows), how) for rows in (16, 32) for how in (1, 2)}

    def loop(rows: int, how: int) -> Callable[[], None]:
        def run() -> None:
            state, batch = make(rows)
            for _ in range(10):
                compare(parallel(state, batch, how), wanted[rows, how])
            for _ in range(3):  # a state that comes back, and is donated
                state, _ = parallel(state, batch, how)

        return run

    in_threads([loop(rows, how) for rows, how in wanted] * 2)
    assert len(compiled) == len(wanted)  # each planned once


class Interrupted(api.ParallelStep):
    """Whenever it makes an executable current, another thread at once makes that of `other` current."""

    other: Any = None

    @property
    def _current(self) -> Any:
        return self.other or self.chosen

    @_current.setter
    def _current(self, chosen: Any) -> None:
        self.chosen = chosen


def test_another_thread_may_change_what_is_current_at_any_time():
    parallel = Interrupted(step, api.make_options({"method": alpa_lite.DataParallel()}))
    compare(parallel(*make()), step(*make()))
    parallel.other = parallel.chosen
    compare(parallel(*make(32)), step(*make(32)))
