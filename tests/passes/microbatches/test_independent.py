"""Independent micro-batches: the results of a step that looks across the batch on each of them, averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import alpa_lite
from alpa_lite.errors import MicrobatchError
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.tracing import tracing
from gallery.batches import normal
from gallery.steps import in_place, sgd, updated
from tests.comparing import assert_close
from tests.marks import slow
from tests.passes import numerics
from tests.passes.microbatches import test_loop

BATCH, WIDTH = 16, 8
Loss = Callable[[Any, Any], Any]


def weights() -> Any:
    return {"a": [normal(i, WIDTH, WIDTH) for i in range(3)], "b": [normal(9 + i, WIDTH, WIDTH) for i in range(3)]}


def batch() -> Any:
    mask = jnp.arange(BATCH) % 3 > 0
    return {"x": normal(20, BATCH, WIDTH), "y": normal(21, BATCH, WIDTH), "mask": mask.astype(jnp.float32)}


def towers(params: Any, one: Any) -> jax.Array:
    """Similarities of all pairs: [examples, examples]."""
    x, y = one["x"], one["y"]
    for w in params["a"]:
        x = jnp.tanh(x @ w)
    for w in params["b"]:
        y = jnp.tanh(y @ w)
    return 4.0 * x @ y.T


def by_labels(params: Any, one: Any) -> jax.Array:
    logits = towers(params, one)
    labels = jnp.arange(len(logits))
    rows = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (rows + optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)).mean()


def by_diagonal(params: Any, one: Any) -> jax.Array:
    return -jnp.diagonal(jax.nn.log_softmax(towers(params, one))).mean()


def by_identity(params: Any, one: Any) -> jax.Array:
    scores = jax.nn.log_softmax(towers(params, one))
    return -(scores * jnp.eye(len(scores))).sum(-1).mean()


def of_some(params: Any, one: Any) -> jax.Array:
    rows = -jnp.diagonal(jax.nn.log_softmax(towers(params, one)))
    return (rows * one["mask"]).sum() / one["mask"].sum()


def with_capacity(params: Any, one: Any) -> jax.Array:
    """Two experts, each with room for three quarters of the examples."""
    x = one["x"]
    gates = jax.nn.softmax(x @ params["a"][0][:, :2])
    chosen = jax.nn.one_hot(gates.argmax(-1), 2)
    place = (jnp.cumsum(chosen, 0) - 1) * chosen
    room = 3 * len(x) // 4
    slots = jax.nn.one_hot(place.sum(-1).astype(int), room)
    sent = (chosen * (place < room))[:, :, None] * slots[:, None, :]
    inside = jnp.tanh(jnp.einsum("bec,bd,df->ecf", sent, x, params["a"][1]))
    return ((jnp.einsum("bec,ecf->bf", sent * gates[:, :, None], inside) - one["y"]) ** 2).mean()


LOSSES = {f.__name__: f for f in (by_labels, by_diagonal, by_identity, of_some, with_capacity)}


def accumulated(step: Any, args: Any, parts: int, *, retrace: bool = True) -> Accumulated:
    def again(shapes: Any) -> Any:
        return tracing.trace(step, args, {}, shapes=shapes)

    return test_loop.accumulated(step, args, parts, allow_inexact=True, retrace=again if retrace else None)[1]


def outputs(found: Accumulated, step: Any, args: Any) -> Any:
    """What the step in micro-batches returns."""
    tree = jax.tree.structure(jax.eval_shape(step, *args))
    return jax.tree.unflatten(tree, numerics.outputs(found.traced, args))


def parts_of(one: Any, parts: int, dim: int = 0) -> list[Any]:
    return [jax.tree.map(lambda x: jnp.split(x, parts, dim)[i], one) for i in range(parts)]  # noqa: B023


def mean(results: list[Any]) -> Any:
    return jax.tree.map(lambda *x: sum(x) / len(x), *results)


close = functools.partial(assert_close, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("parts", [slow(2), 4])
@pytest.mark.parametrize("name", LOSSES)
def test_each_micro_batch_is_a_batch_of_its_own(name: str, parts: int) -> None:
    """Descent on the mean of gradients ends in the mean of where each gradient leads."""
    step, args = sgd(LOSSES[name]), (weights(), batch())
    found = accumulated(step, args, parts)
    (scan,) = [op for op in found.traced.graph.block.ops if op.index == found.scan]
    assert scan.params["length"] == parts
    want = mean([step(args[0], one) for one in parts_of(args[1], parts)])
    got = outputs(found, step, args)
    close(got, want)
    assert "inexact: each micro-batch is computed independently, as a whole batch" in found.notes
    (averaged,) = [note for note in found.notes if note.startswith("averaged over micro-batches: ")]
    assert "result/0/a/0, " in averaged and averaged.endswith(", result/1")
    assert any("test_independent.py" in note for note in found.notes)


def test_what_is_added_up_stays_a_sum_and_regularisers_count_once() -> None:
    """Neither dividing examples by their own length nor comparing with a share of the batch makes a mean."""

    def without(params: Any, one: Any) -> jax.Array:
        x = one["x"] / jnp.linalg.norm(one["x"], axis=-1, keepdims=True)
        rows = -jnp.diagonal(jax.nn.log_softmax(towers(params, {**one, "x": x})))
        return jnp.where(jnp.cumsum(rows) < 100.0 * len(x), rows, 0.0).sum()

    def loss(params: Any, one: Any) -> jax.Array:
        return without(params, one) + 0.01 * sum((w**2).sum() for w in jax.tree.leaves(params))

    step, args = sgd(loss), (weights(), batch())
    found = accumulated(step, args, 4)
    grads = [jax.grad(without)(args[0], one) for one in parts_of(args[1], 4)]
    total = jax.tree.map(lambda p, *g: p - 0.1 * (sum(g) + 0.02 * p), args[0], *grads)
    close(outputs(found, step, args)[0], total)
    assert not any("averaged" in note for note in found.notes)


def test_a_regulariser_beside_a_mean_counts_once() -> None:
    def loss(params: Any, one: Any) -> jax.Array:
        return by_labels(params, one) + 0.01 * sum((w**2).sum() for w in jax.tree.leaves(params))

    step, args = sgd(loss), (weights(), batch())
    close(
        outputs(accumulated(step, args, 4), step, args),
        mean([step(args[0], one) for one in parts_of(args[1], 4)]),
    )


def test_draws_are_blocks_of_those_of_the_whole_batch() -> None:
    def loss(params: Any, one: Any, kept: Any) -> jax.Array:
        return by_labels(params, {**one, "x": jnp.where(kept, one["x"], 0.0)})

    def step(params: Any, one: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.7, one["x"].shape)
        value, grads = jax.value_and_grad(loss)(params, one, kept)
        return updated(params, grads), value

    args = weights(), batch(), jax.random.key(3)
    got = outputs(accumulated(step, args, 4), step, args)
    kept = jax.random.bernoulli(args[2], 0.7, (BATCH, WIDTH))

    def alone(one: Any, own: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(args[0], one, own)
        return updated(args[0], grads), value

    close(got, mean([alone(one, own) for one, own in zip(parts_of(args[1], 4), jnp.split(kept, 4), strict=True)]))


def test_results_of_examples_are_put_together_and_counts_added() -> None:
    def step(params: Any, one: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = towers(params, one)
            rows = -jnp.diagonal(jax.nn.log_softmax(logits))
            right = (logits.argmax(-1) == jnp.arange(len(logits))).sum()
            return rows.mean(), {"rows": rows, "right": right}

        (value, more), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return updated(params, grads), value, more

    args = weights(), batch()
    _, value, more = outputs(accumulated(step, args, 4), step, args)
    alone = [step(args[0], one) for one in parts_of(args[1], 4)]
    close(value, mean([v for _, v, _ in alone]))
    close(more["rows"], jnp.concatenate([m["rows"] for *_, m in alone]))
    assert int(more["right"]) == sum(int(m["right"]) for *_, m in alone)
    assert more["rows"].shape == (BATCH,)


def test_the_batch_may_be_another_dim() -> None:
    def loss(params: Any, one: Any) -> jax.Array:
        return by_labels(params, {"x": one["x"].T, "y": one["y"].T})

    def of(one: Any) -> Any:
        return {"x": one["x"].T, "y": one["y"].T}

    step, args = sgd(loss), (weights(), of(batch()))
    want = mean([step(args[0], one) for one in parts_of(args[1], 2, dim=1)])
    got = accumulated(step, args, 2)
    assert "dim 1 of batch/x" in got.notes[0]
    close(outputs(got, step, args), want)


def refused(step: Any, words: str) -> None:
    with pytest.raises(MicrobatchError, match=words):
        accumulated(step, (weights(), batch()), 4)


def test_what_no_micro_batch_can_give_is_refused() -> None:
    def pairs(params: Any, one: Any) -> Any:
        return (*sgd(by_labels)(params, one), towers(params, one))

    def truth(params: Any, one: Any) -> Any:
        return (*sgd(by_labels)(params, one), jnp.isfinite(towers(params, one)).all())

    def other(params: Any, one: Any) -> Any:
        loss = by_labels if len(one["x"]) == BATCH else by_diagonal
        return sgd(loss)(params, one)

    def fixed(params: Any, one: Any) -> Any:
        return sgd(lambda p, b: by_labels(p, {"x": b["x"].reshape(BATCH, WIDTH), "y": b["y"]}))(params, one)

    refused(pairs, r"dot_general at .*computed independently: a result has a value for each pair")
    refused(truth, "a truth value of the whole batch")
    refused(other, "does not do the same operations as on the batch")
    refused(fixed, r"cannot be traced on one micro-batch, in which one/mask has shape \[4\]: .*reshape")


def test_errors_of_the_step_that_have_nothing_to_do_with_shapes_stay_what_they_are() -> None:
    def step(params: Any, one: Any) -> Any:
        if len(one["x"]) < BATCH:
            raise RuntimeError("no file of that name")
        return sgd(by_labels)(params, one)

    with pytest.raises(RuntimeError, match="no file of that name") as caught:
        accumulated(step, (weights(), batch()), 4)
    assert any("traced on one micro-batch of 4" in note for note in caught.value.__notes__)


def test_scopes_of_the_step_may_have_the_name_of_the_loop() -> None:
    inner = sgd(by_diagonal)

    def step(params: Any, one: Any) -> Any:
        with jax.named_scope("micro_batches"):
            new, value = inner(params, one)
            norm, _ = lax.scan(lambda total, w: (total + (w * w).sum(), None), 0.0, jnp.stack(new["a"]))
        return new, value, norm

    args = weights(), batch()
    found = accumulated(step, args, 4)
    (scan,) = [op for op in found.traced.graph.block.ops if op.index == found.scan]
    assert scan.params["length"] == 4 and len(scan.results) > 1
    want, value = mean([inner(args[0], one) for one in parts_of(args[1], 4)])
    close(outputs(found, step, args), (want, value, sum((w * w).sum() for w in want["a"])))


def test_without_consent_the_error_says_what_would_help() -> None:
    step, args = sgd(by_labels), (weights(), batch())
    with pytest.raises(MicrobatchError, match=r"test_independent.py.*allow_inexact=True to compute each"):
        alpa_lite.make_plan(step, *args, cluster=alpa_lite.Cluster.local(), num_microbatches=2)
    with pytest.raises(MicrobatchError, match="use num_microbatches=1"):
        accumulated(step, args, 2, retrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", [alpa_lite.Sharded(), alpa_lite.Pipeline(num_stages=2)], ids=["mesh", "pipeline"])
def test_on_eight_devices(method: Any) -> None:
    step, args = sgd(by_labels), (weights(), {k: v for k, v in batch().items() if k != "mask"})
    want = mean([step(args[0], one) for one in parts_of(args[1], 2)])
    parallel = alpa_lite.parallelize(step, method=method, num_microbatches=2, allow_inexact=True)
    plan = parallel.plan(*args)
    assert plan.num_microbatches == 2
    assert "inexact: each micro-batch is computed independently, as a whole batch" in plan.notes
    close(parallel(*args), want)
    again = alpa_lite.parallelize(step, plan=plan, allow_inexact=True)
    close(again(*args), want)


class Towers(nnx.Module):
    """Two towers."""

    def __init__(self) -> None:
        self.left = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.right = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, one: Any) -> jax.Array:
        return self.left(one["x"]) @ self.right(one["y"]).T


def test_modules_in_place() -> None:
    @in_place
    def step(model: Towers, one: Any) -> jax.Array:
        logits = model(one)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()

    def fresh() -> tuple[Towers, nnx.Optimizer]:
        model = Towers()
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    data = {k: v for k, v in batch().items() if k != "mask"}
    model, optimizer = fresh()
    value = alpa_lite.parallelize(step, method=alpa_lite.Sharded(), num_microbatches=4, allow_inexact=True)(
        model, optimizer, data
    )
    alone = []
    for one in parts_of(data, 4):
        own, own_optimizer = fresh()
        alone.append((step(own, own_optimizer, one), nnx.to_pure_dict(nnx.state(own))))
    close((value, nnx.to_pure_dict(nnx.state(model))), mean(alone))


def test_experts_with_a_share_of_the_micro_batch_as_capacity() -> None:
    """Experts of a capacity that gather their examples by a product: what each expert computes is a sum over all."""
    experts = 4

    def loss(params: Any, one: Any) -> jax.Array:
        x, capacity = one["x"], one["x"].shape[0] // experts
        chosen = jax.nn.one_hot((x @ params["gate"]).argmax(-1), experts)
        place = jnp.cumsum(chosen, 0) * chosen
        slot = jax.nn.one_hot((place.sum(-1) - 1).astype(jnp.int32), capacity)
        sent = (chosen * (place <= capacity))[:, :, None] * slot[:, None, :]
        hidden = jnp.tanh(jnp.einsum("nd,nec->ecd", x, sent) @ params["w"])
        return ((x + jnp.einsum("ecd,nec->nd", hidden, sent) - one["y"]) ** 2).mean()

    params = {"gate": jnp.eye(WIDTH, experts), "w": jnp.eye(WIDTH)}
    data = {k: v for k, v in batch().items() if k != "mask"}
    step = sgd(loss)
    parallel = alpa_lite.parallelize(step, method=alpa_lite.Sharded(), num_microbatches=2, allow_inexact=True)
    close(parallel(params, data), mean([step(params, one) for one in parts_of(data, 2)]))
