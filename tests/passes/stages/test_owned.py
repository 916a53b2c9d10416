"""Steps divided by where their arguments lie: every part has what it reads, when it reads it.

Parts keep the value numbers of the step, so nothing need be computed: who has which value is all there is to check.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gallery
from alpa_lite.ir import graph
from alpa_lite.ir.graph import Traced
from alpa_lite.passes.stages import owners
from alpa_lite.passes.stages.owners import ownership
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.passes.stages.staging import stage_graphs
from alpa_lite.passes.tracing import tracing


def divided(traced: Traced, pinned: dict[int, int], count: int = 2) -> tuple[StageGraph, ...]:
    """The parts of a step, checked."""
    parts = stage_graphs(traced, -1, ownership(traced, pinned, count))
    state = {argument: output for output, argument in traced.state}
    for number, part in enumerate(parts):
        graph.check(part.traced.graph)
        own = {port.number for port in part.inputs if port.kind == "argument"}
        results = {port.number for port in part.outputs if port.kind == "argument"}
        assert own & pinned.keys() == {argument for argument, where in pinned.items() if where == number}
        assert all(state[argument] in results for argument in own & state.keys())
    _walk(traced, parts)
    return parts


def moved(parts: Sequence[StageGraph]) -> dict[int, tuple[int, ...]]:
    """Argument -> the parts that get a copy of it in each call."""
    copies = sorted((port.number, n) for n, part in enumerate(parts) for port in part.inputs if port.kind == "copy")
    return {number: tuple(n for argument, n in copies if argument == number) for number, _ in copies}


def _walk(traced: Traced, parts: Sequence[StageGraph]) -> None:
    """Runs the rounds of all parts with sets of values in place of arrays."""
    arrivals = [{p.number: part.late_rounds[p.number] for p in part.inputs if p.kind == "late"} for part in parts]
    held = [set(part.traced.graph.block.inputs) - late.keys() for part, late in zip(parts, arrivals, strict=True)]
    made: set[int] = set()
    last = max([0, *(r for part in parts for r in (*part.rounds.values(), *part.late_rounds.values()))])
    for current in range(last + 1):
        for part, have in zip(parts, held, strict=True):
            for op in part.traced.graph.block.ops:
                if part.rounds[op.index] == current:
                    assert have.issuperset(op.reads)
                    have.update(op.results)
        for part, have in zip(parts, held, strict=True):
            given = {port.number for port in part.outputs if port.kind == "late"}
            made |= {v for v, when in part.late_rounds.items() if when == current and v in have & given}
        for late, have in zip(arrivals, held, strict=True):
            arrived = {v for v, when in late.items() if when == current}
            assert arrived <= made
            have |= arrived
    returned: list[int] = []
    for part, have in zip(parts, held, strict=True):
        for port, atom in zip(part.outputs, part.traced.graph.block.outputs, strict=True):
            if port.kind == "argument":
                assert atom == traced.graph.block.outputs[port.number]
                assert not isinstance(atom, int) or atom in have
                returned.append(port.number)
    assert sorted(returned) == list(range(len(traced.outputs)))


def sent(parts: Sequence[StageGraph]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(from, to, shape) of the values that cross."""
    makers = {port.number: n for n, part in enumerate(parts) for port in part.outputs if port.kind == "late"}
    values = parts[0].traced.graph.values
    return sorted(
        (makers[port.number], n, values[port.number].shape)
        for n, part in enumerate(parts) for port in part.inputs if port.kind == "late"
    )  # fmt: skip


def trace(fun: Any, *args: Any, batch: Sequence[str] = (), state: Sequence[str] = ()) -> Traced:
    return tracing.trace(fun, args, {}, batch_argnums=(), batch_argnames=batch, state_argnames=state)


@pytest.mark.parametrize("name", ["nnx_gpt_tied", "linen_unet"])
def test_state_may_lie_anywhere(name: str) -> None:
    """Whole train steps, their state scattered: some leaves on no submesh yet, parameters apart from their moments."""
    step, args = gallery.get("zoo", name).make()
    traced = tracing.trace(step, args, {})
    state = [i for i, argument in enumerate(traced.arguments) if argument.role == "state"]
    for seed, count in ((0, 2), (1, 4)):
        draw = random.Random(seed)
        divided(traced, {i: draw.randrange(count) for i in state if draw.random() < 0.9}, count)


WIDTH, BATCH = 8, 32
X, ROWS = jnp.ones((BATCH, WIDTH)), (BATCH, WIDTH)


def weights(count: int) -> dict[str, jax.Array]:
    return {f"w{i}": jnp.ones((WIDTH, WIDTH)) for i in range(count)}


def chain(p: Any, x: jax.Array) -> jax.Array:
    for w in p.values():
        x = jnp.tanh(x @ w)
    return x.sum()


def widened(p: Any, x: jax.Array, n: int) -> Any:
    """Between two layers, the cut is where least is sent: before the layer grows wide."""
    h = jnp.tanh(x @ p["a"])
    h = jnp.concatenate([h, h**2, h**3, jnp.sin(h)], -1)
    return (h @ p["b"]).sum(), n + 1


def normalised(p: Any, m: Any, g: Any) -> Any:
    """Only scalars cross, although every leaf is scaled by a number that comes from all of them."""
    norm = jnp.sqrt(sum(jnp.sum(w**2) for w in g.values()))
    m = jax.tree.map(lambda a, b: 0.9 * a + b / norm, m, g)
    return jax.tree.map(jnp.subtract, p, m), m


def tied(p: Any, x: jax.Array, n: int) -> Any:
    """The activation goes back to the submesh that has the embedding; the embedding itself goes nowhere."""
    return (jnp.tanh(p["embed"][x] @ p["w"]) @ p["embed"].T).max(-1), n + 1


WIDE = {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((4 * WIDTH, WIDTH))}
TIED = {"embed": jnp.ones((64, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}


@pytest.mark.parametrize(
    ("fun", "arguments", "batch", "places", "crossing"),
    [
        (chain, (weights(4), X), "x", (0, 0, 1, 1), {(0, 1, ROWS): 1}),
        (chain, (weights(4), X), "x", (0, 1, 0, 1), {(0, 1, ROWS): 2, (1, 0, ROWS): 1}),
        (widened, (WIDE, X, 0), "x", (0, 1), {(0, 1, ROWS): 1}),
        (tied, (TIED, jnp.zeros((4,), jnp.int32), 0), "x", (0, 1), {(0, 1, (4, WIDTH)): 1, (1, 0, (4, WIDTH)): 1}),
        (normalised, (weights(2),) * 3, "g", (0, 1) * 3, {(0, 1, ()): 1, (1, 0, ()): 1}),
    ],
)
def test_the_fewest_bytes_cross_and_no_state(fun: Any, arguments: Any, batch: str, places: Any, crossing: Any) -> None:
    traced = trace(fun, *arguments, batch=batch)
    parts = divided(traced, dict(enumerate(places)))
    assert Counter(sent(parts)) == crossing
    assert moved(parts) == {}


def test_a_loop_over_leaves_of_several_submeshes_pulls_the_fewest_bytes() -> None:
    def fun(p: Any, x: jax.Array, n: int) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["a"] + x * p["b"]), x).sum(), n + 1

    traced = trace(fun, {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((WIDTH,))}, X, 0, batch="x")
    assert moved(divided(traced, {0: 0, 1: 1})) == {1: (0,)}
    assert moved(divided(traced, {0: 1, 1: 0})) == {1: (1,)}


def test_new_state_that_is_made_elsewhere_is_sent_home() -> None:
    """Values that swap places, and one that a single operation makes of leaves of both submeshes."""

    def swap(p: Any) -> Any:
        return {"a": p["b"], "b": p["a"]}

    def sort(p: Any) -> Any:
        a, b = jax.lax.sort_key_val(p["a"], p["b"])
        return {"a": a, "b": b}

    leaves = {"a": jnp.ones(4), "b": jnp.ones(4)}
    traced = trace(swap, leaves, state="p")
    assert moved(divided(traced, {0: 0, 1: 1})) == {0: (1,), 1: (0,)}
    traced = trace(sort, leaves, state="p")
    parts = divided(traced, {0: 0, 1: 1})
    assert len(sent(parts)) == 1 and len(moved(parts)) == 1


def test_expansions_find_what_trying_everything_finds() -> None:
    """Two submeshes: the first cut is the optimum, here against all labellings of a random network."""
    for seed in range(3):
        draw = random.Random(seed)

        def fun(p: Any, n: int, draw: random.Random = draw) -> Any:
            known = [jnp.sum(w, 0)[: 1 + i] for i, w in enumerate(p.values())]
            for _ in range(5):
                a, b = draw.choice(known), draw.choice(known)
                known.append(jnp.concatenate([a, b])[: draw.randrange(1, 9)])
            return known[-3:], n + 1

        traced = trace(fun, weights(4), 0)
        labels = owners._Labels(traced, owners._Anchors(traced, {0: 0, 1: 1, 2: 0, 3: 1}), 2)
        best = min(
            labels.energy({**labels.label, **dict(zip(labels.movable, choice, strict=True))})
            for choice in itertools.product((0, 1), repeat=len(labels.movable))
        )
        assert labels.energy(labels.solve()) == best


def test_scalars_and_keys_bind_nothing() -> None:
    """Dropout with a key, and a counter, that lie on the first submesh: the masks are made where they are read."""

    def fun(p: Any, key: jax.Array, count: jax.Array, x: jax.Array) -> Any:
        for i, w in enumerate(p.values()):
            x = jnp.tanh(x @ w)
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, count), i), 0.9, x.shape)
            x = jnp.where(kept, x, 0.0)
        return x.sum()

    traced = trace(fun, weights(2), jax.random.key(0), jnp.int32(0), X, batch="x")
    assert [shape for _, _, shape in sent(divided(traced, {0: 0, 1: 1, 2: 0, 3: 0})) if len(shape) == 2] == [ROWS]
