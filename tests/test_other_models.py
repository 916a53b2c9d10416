"""Steps in the style of users elsewhere, through the public interface, one mesh and pipelines: equal to one device.

Each stands for something that was once refused, wrong, or ended in an internal error.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite
from alpa_lite.errors import InfeasibleError, MicrobatchError
from gallery.batches import normal, rows
from gallery.steps import descent
from tests import pipeline_driver
from tests.marks import slow, slow_but

WIDTH, ROWS = 16, 16


def on_batches(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step that takes several batches."""

    def step(state: Any, *batch: Any) -> Any:
        return descent(lambda params, batches: loss_fn(params, *batches))(state, batch)

    return step


def weights(count: int) -> Any:
    return {"params": [normal(10 + i, WIDTH, WIDTH) / 4 for i in range(count)]}


def through(between: Callable[[jax.Array], jax.Array]) -> tuple[Any, Any]:
    """Two layers with something between them that works example by example."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return ((between(jnp.tanh(batch["x"] @ params[0])) @ params[1] - batch["y"]) ** 2).mean()

    return descent(loss_fn), (weights(2), rows(ROWS, WIDTH))


def largest_of_normalised() -> tuple[Any, Any]:
    """A maximum over positions of what compilers compute twice: its gradient compares it with its operand."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        h = jax.nn.swish(batch["x"] @ params["a"])
        h = h - h.mean(1, keepdims=True)
        h = h * lax.rsqrt((h**2).mean(1, keepdims=True) + 1e-5)
        return ((h.max(1) @ params["o"] - batch["y"]) ** 2).mean()

    params = {"a": normal(0, 4, 6) / 2, "o": normal(2, 6, 3) / 2}
    return descent(loss_fn), ({"params": params}, {"x": normal(9, 8, 4, 4), "y": normal(1, 8, 3)})


def padding_mask() -> tuple[Any, Any]:
    """A mask of the batch that every layer reads."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, mask = batch["x"], (batch["tokens"] != 0)[:, :, None]
        for w in params:
            x = jnp.where(mask, jnp.tanh(x @ w), -1.0)
        return ((x - batch["y"]) ** 2).mean()

    batch = {"x": normal(8, ROWS, 6, WIDTH), "y": normal(9, ROWS, 6, WIDTH)}
    return descent(loss_fn), (weights(4), batch | {"tokens": jnp.asarray(np.arange(96).reshape(ROWS, 6) % 3)})


def rectified() -> tuple[Any, Any]:
    """`jnp.maximum`, whose gradient compares too; its result is what crosses layers."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.maximum(x @ w, 0.0)
        return ((x - batch["y"]) ** 2).mean()

    return descent(loss_fn), (weights(4), rows(ROWS, WIDTH))


def halved_until_small(h: jax.Array) -> jax.Array:
    """A loop of another length for each example."""
    small = jax.vmap(lambda v: lax.while_loop(lambda c: c.max() > 0.1, lambda c: c * 0.5, lax.stop_gradient(v)))(h)
    return h + small


def squares(h: jax.Array) -> jax.Array:
    blocks = h.reshape(-1, 4, 4)
    return blocks @ blocks.swapaxes(1, 2) + 2 * jnp.eye(4)


EXAMPLE_BY_EXAMPLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "vmapped_while": halved_until_small,
    "interp": lambda h: jnp.interp(h, jnp.linspace(-2, 2, 7), jnp.linspace(-2, 2, 7) ** 2),
    "solve": lambda h: jnp.linalg.solve(squares(h), h.reshape(-1, 4, 4)).reshape(-1, WIDTH),
    "slogdet": lambda h: h + jnp.linalg.slogdet(squares(h))[1][:, None],
    "polyval": lambda h: jnp.polyval(jnp.arange(3.0), h),
}


@pytest.mark.parametrize("name", slow_but(("vmapped_while",), EXAMPLE_BY_EXAMPLE))
@pytest.mark.parametrize("method", ["one mesh", "pipeline"])
def test_what_works_example_by_example_is_cut_into_micro_batches(name: str, method: str) -> None:
    step, args = through(EXAMPLE_BY_EXAMPLE[name])
    chosen = alpa_lite.Pipeline(num_stages=2) if method == "pipeline" else alpa_lite.Sharded()
    pipeline_driver.compare_steps(alpa_lite.parallelize(step, method=chosen, num_microbatches=2), step, args)


@pytest.mark.optimised  # without, one device computes a maximum's operand twice, differently, and its gradient is NaN
@pytest.mark.parametrize(
    ("make", "microbatches", "remat"),
    [
        (largest_of_normalised, 2, "none"),
        slow(padding_mask, 2, "layer"),
        slow(largest_of_normalised, 2, "layer"),
        slow(largest_of_normalised, 1, "none"),
        slow(padding_mask, 4, "selective"),
        slow(rectified, 2, "layer"),
        slow(rectified, 4, "selective"),
    ],
)
def test_pipelines_whose_backward_pass_reads_what_was_computed_before(make: Any, microbatches: int, remat: str) -> None:
    step, args = make()
    method = alpa_lite.Pipeline(num_stages=2, schedule="gpipe", remat=remat)
    pipeline_driver.compare_steps(alpa_lite.parallelize(step, method=method, num_microbatches=microbatches), step, args)


def two_batches() -> tuple[Any, Any]:
    """Points within and points on the edge."""

    def field(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2]

    def loss_fn(params: Any, inner: jax.Array, edge: jax.Array) -> jax.Array:
        return (field(params, inner) ** 2).mean() + ((field(params, edge) - 1) ** 2).mean()

    params = [normal(0, 4, WIDTH), normal(1, WIDTH, WIDTH) / 4, normal(2, WIDTH, 1) / 4]
    return on_batches(loss_fn), ({"params": params}, normal(3, 24, 4), normal(4, 8, 4))


@pytest.mark.slow
def test_batches_of_different_sizes_are_cut_each_by_itself() -> None:
    step, args = two_batches()
    found = alpa_lite.parallelize(step).plan(*args)
    assert any("`batch/0`, `batch/1` were taken as the batch (leading dims 24, 8)" in note for note in found.notes)
    method = alpa_lite.Pipeline(num_stages=2)
    run = alpa_lite.parallelize(step, method=method, num_microbatches=4, batch_argnums=(1, 2))
    notes = " ".join(run.plan(*args).notes)
    assert "(6 examples)" in notes and "(2 examples)" in notes
    pipeline_driver.compare_steps(run, step, args)


def test_a_refusal_names_what_was_taken_for_the_batch() -> None:
    """Examples that are compared with each other, and a frozen matrix with as many rows as there are examples."""

    def loss_fn(params: Any, base: jax.Array, batch: jax.Array) -> jax.Array:
        x = batch @ base.T @ params[0]
        return jax.nn.logsumexp(x @ x.T, axis=-1).mean()

    def step(state: Any, base: jax.Array, batch: jax.Array) -> tuple[Any, Any]:
        return on_batches(loss_fn)(state, base, batch)

    args = weights(1), normal(2, 16, 16), normal(3, 16, 16)
    run = alpa_lite.parallelize(step, method=alpa_lite.DataParallel(), num_microbatches=2)
    with pytest.raises(
        MicrobatchError, match=r"The arguments base, batch were taken as the batch; .*batch_argnums=\(i,\)"
    ):
        run.plan(*args)
    run = alpa_lite.parallelize(step, method=alpa_lite.DataParallel(), num_microbatches=2, batch_argnums=2)
    with pytest.raises(MicrobatchError) as said:
        run.plan(*args)
    assert "taken as the batch" not in str(said.value)


@pytest.mark.parametrize(
    ("stages", "schedule", "microbatches", "said"),
    [
        (2, "interleaved-1f1b", 3, "a multiple of their number of micro-batches"),
        (4, "interleaved-1f1b", 4, "layers are too few"),
        (8, "1f1b", 4, r"too few for num_stages=8; give \d at most"),
    ],
)
def test_what_a_schedule_lacks_is_said(stages: int, schedule: str, microbatches: int, said: str) -> None:
    step, (state, batch) = through(jnp.sin)
    batch = {name: jnp.concatenate([x, x, x]) for name, x in batch.items()}
    method = alpa_lite.Pipeline(num_stages=stages, schedule=schedule)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match=said):
        alpa_lite.parallelize(step, method=method, num_microbatches=microbatches).plan(state, batch)


@pytest.mark.slow
def test_zero_bubble_with_fewer_micro_batches_than_stages() -> None:
    step, args = rectified()
    method = alpa_lite.Pipeline(num_stages=4, schedule="zb-h1")
    run = alpa_lite.parallelize(step, method=method, num_microbatches=2)
    assert run.plan(*args).schedule == "zb-h1"
    pipeline_driver.compare_steps(run, step, args)


@pytest.mark.parametrize("make", [two_batches, slow(padding_mask)])
def test_a_stage_spends_no_more_in_collectives_than_it_runs(make: Any) -> None:
    """What starts together is counted once, in the seconds of a stage and in those of its collectives."""
    step, args = make()
    method = alpa_lite.Pipeline(num_stages=2)
    batch = tuple(range(1, len(args)))
    plan = alpa_lite.parallelize(step, method=method, num_microbatches=4, batch_argnums=batch).plan(*args)
    for number, stage in enumerate(plan.stages):
        listed = zip(plan.collectives, plan.collective_seconds, strict=True)
        spent = sum(seconds for c, seconds in listed if c.stage == number and c.kind != "transfer")
        assert spent == pytest.approx(stage.communication_seconds)
        assert stage.compute_seconds > 0
        assert stage.compute_seconds + stage.communication_seconds == pytest.approx(stage.seconds)
