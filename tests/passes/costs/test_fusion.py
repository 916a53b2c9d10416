"""Fusion: values in memory, by hand for programs whose kernels are known."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.passes.costs import fusion, traffic
from alpa_lite.passes.costs.items import item_of
from alpa_lite.passes.tracing import tracing
from gallery.batches import f32, shape

N, M = 64, 256
FULL, ROW = 4 * N * M, 4 * N


def moved(step: Any, *args: Any) -> float:
    graph = tracing.trace(step, args, {}).graph
    return traffic.moved_bytes(graph.block, graph.values)


def shift(x: Any) -> Any:
    """A loop kernel that is read by many."""
    return (x + 1.0) * 2.0 - x * x


@pytest.mark.parametrize(
    ("step", "args", "expected"),
    [
        (lambda x: shift(shift(x)), (f32(N, M),), 2 * FULL),
        (lambda x: shift(x).sum(-1), (f32(N, M),), FULL + ROW),
        # Two readers of one loop compute it twice; both read the same, and are one kernel.
        (lambda x: (shift(x) + 1.0, shift(x) * 3.0), (f32(N, M),), 3 * FULL),
        # A product reads and writes memory, and takes in nothing.
        (lambda x, w: shift(shift(x) @ w), (f32(N, M), f32(M, M)), 4 * (N * M * 6 + M * M)),
        # Adam: four values in, three out.
        (
            lambda p, m, v, g: (p - 0.9 * m / (jnp.sqrt(v) + 1e-8), 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g),
            (f32(N, M),) * 4,
            7 * FULL,
        ),
        # A softmax is one kernel, a normalisation by a mean that is used elsewhere is not.
        (lambda x: jax.nn.softmax(shift(x)), (f32(N, M),), 2 * FULL),
        # No depth: a multiplication. A vector: a multiplication and a sum, which take in what is around.
        (lambda x, h: shift(jnp.einsum("nm,n->nm", shift(x), h)), (f32(N, M), f32(N)), 2 * FULL + ROW),
        (lambda x, h: jnp.einsum("nm,m->n", shift(x), shift(h)), (f32(N, M), f32(M)), FULL + ROW + 4 * M),
        # Slices read what they take, updates write what they put.
        (lambda x: shift(x[:8]), (f32(N, M),), 2 * 4 * 8 * M),
        (lambda x, y: x.at[3].set(shift(y)), (f32(N, M), f32(M)), 3 * 4 * M),
        (lambda x, i: shift(x)[i], (f32(N, M), shape(4)), 2 * 4 * 4 * M),
        # The mean is ready after the first kernel; its subtraction reads the value a second time.
        (lambda x: x - x.mean(), (f32(N, M),), 3 * FULL),
        # The norms of rows, split: what follows a reduction and is not a part of its kernel.
        (lambda x: jnp.array_split(jnp.linalg.norm(x, axis=-1), 4)[0], (f32(N, M),), FULL + 2 * ROW + ROW // 4),
    ],
)
def test_bytes_by_hand(step, args, expected):
    assert moved(step, *args) == pytest.approx(expected, abs=64)


def test_expensive_functions_are_kept_where_that_moves_little():
    """tanh of a bfloat16 that a product and a later kernel read, against a subtraction."""
    half = shape(N, M, dtype=jnp.bfloat16)

    def step(f):
        def run(x, y):
            z = f(x)
            return z.sum(), jnp.cumsum((z * y).sum(-1)) + z.max(-1)

        return run

    assert moved(step(jnp.tanh), half, half) > moved(step(lambda x: x - 1), half, half)


def test_bodies_run_by_their_trips():
    def step(x, w):
        return jax.lax.scan(lambda x, w: (shift(x @ w), None), x, w)[0]

    one, two = (moved(step, f32(N, N), f32(k, N, N)) for k in (1, 2))
    assert two == 2 * one == 2 * 5 * 4 * N * N


def lives(step: Any, *args: Any) -> list[tuple[str, float, float]]:
    """Primitive, first and last item of each stored value, in program order."""
    graph = tracing.trace(step, args, {}).graph
    ops = graph.block.ops
    made = {v: op for op in ops for v in op.results}
    items = [item_of(op, graph.values) for op in ops]
    outputs = [a for a in graph.block.outputs if isinstance(a, int)]
    found = fusion.lifetimes(items, [v.nbytes for v in graph.values], outputs)
    return [(made[v].name, *span) for v, span in sorted(found.items(), key=lambda one: one[1])]


def test_a_sum_is_added_to_as_soon_as_its_part_is_there():
    """Both sums are written at the end of the program, and run right after the product that each needs."""

    def step(a, b, x):
        one, two = x @ x, (x + 1) @ x
        return a - one, b - two

    assert lives(step, *[f32(N, N)] * 3) == [
        ("dot_general", 0, 0.5), ("sub", 0.5, 5), ("add", 1, 2), ("dot_general", 2, 2.5), ("sub", 2.5, 5),
    ]  # fmt: skip


def test_a_product_is_accumulated_in_place():
    """The GEMM with beta = 1 reads the sum and writes it; elsewhere the sum is a kernel, which reads two values."""

    def accumulate(a, x):
        return a + (x @ x).T

    def shared(a, x):
        y = x @ x
        return a + y, y

    def moved_squares(step):
        return moved(step, f32(N, N), f32(N, N)) / (4 * N * N)

    assert lives(accumulate, f32(N, N), f32(N, N)) == [("dot_general", 0, 3)]
    assert moved_squares(accumulate) == 3
    assert moved_squares(lambda a, x: (a + x @ x, a.sum())) > 4
    assert moved_squares(shared) == 5
    assert moved_squares(lambda a, x: a + x @ x + (x * 2) @ x) == 3 + 2 + 4


def test_operands_of_a_chain_live_until_the_chain_ends():
    """The product is read by the last one, since the elementwise operations between them store nothing."""

    def step(x):
        y = x @ x
        z = jnp.tanh(y)
        return (z * 2 + 1) @ x

    assert lives(step, f32(N, N)) == [("dot_general", 0, 3), ("add", 3, 4), ("dot_general", 4, 5)]


def test_parts_of_a_program_are_compiled_apart() -> None:
    """A part reads from memory what an earlier one writes there, although one kernel could do both."""

    def step(x: Any, g: Any) -> tuple[Any, Any]:
        y = jnp.exp(x)
        return y * 2, y * g

    graph = tracing.trace(step, (f32(N, M), f32(N, M)), {}).graph
    exp, twice, product = (next(op for op in graph.block.ops if test(op)) for test in (
        lambda op: op.name == "exp", lambda op: op.name == "mul" and len(op.reads) == 1,
        lambda op: op.name == "mul" and len(op.reads) == 2,
    ))  # fmt: skip
    whole = traffic.memory_traffic(graph.block, graph.values)
    assert sum(moved.bytes for moved in whole.values()) == 4 * FULL  # two arrays are read, and two are written
    parts = {exp.index: {0}, twice.index: {0}, product.index: {1}}
    apart = traffic.memory_traffic(graph.block, graph.values, parts)
    assert sum(moved.bytes for moved in apart.values()) == 6 * FULL and apart[product.index].reads == (FULL, FULL)
    again = traffic.memory_traffic(graph.block, graph.values, {**parts, exp.index: {0, 1}})
    assert sum(again[op.index].bytes for op in (exp, twice)) == 2 * FULL  # each part makes its own
