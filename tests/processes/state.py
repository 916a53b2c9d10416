"""State across processes: born, evaluated, placed, taken over by another plan. Argument: devices of the two stages."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import worker
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite
from alpa_lite.errors import AlpaLiteError


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(8)(x)


MODEL, OPTIMIZER = Model(), optax.adamw(1e-2)


def create(key):
    params = MODEL.init(key, jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def loss_of(params, apply_fn, batch):
    return ((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), loss


def eval_step(state, batch):
    return loss_of(state.params, state.apply_fn, batch), state.apply_fn({"params": state.params}, batch["x"])


def batch(seed, size=16):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 16)).astype(np.float32), "y": rng.normal(size=(size, 8)).astype(np.float32)}


def main() -> None:
    shapes, others = map(json.loads, worker.start())
    pipeline = alpa_lite.Pipeline(submesh_shapes=shapes)
    step = alpa_lite.parallelize(train_step, method=pipeline, num_microbatches=2)
    key = jax.random.key(0)
    state = step.init(create, key, rest=(batch(0),))
    want = jax.jit(create)(key)
    blocks = worker.compare(state, worker.host(want))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    every = sum(leaf.nbytes for leaf in jax.tree.leaves(want))
    worker.say("born in", blocks, "blocks;", "held" if held < every * jax.local_device_count() else "all held")

    where = step.shardings(state, batch(0))
    same = jax.tree.map(lambda leaf, one: leaf.sharding == one, state, where.arguments[0])
    assert all(jax.tree.leaves(same))
    plain = jax.jit(train_step)
    for seed in range(3):
        state, loss = step(state, step.place(batch(seed)))
        want, expected = plain(want, batch(seed))
        worker.compare((state, loss), worker.host((want, expected)))
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf, one: leaf.sharding == one, state, where.arguments[0])))
    worker.say("trained")

    evaluate = alpa_lite.parallelize(eval_step, state_from=step)
    got = evaluate(state, batch(5))
    worker.compare(got, worker.host(jax.jit(eval_step)(want, batch(5))))
    worker.compare(state, worker.host(want))  # still there
    worker.say("evaluated at", round(float(got[0]), 4))

    short, expected = step(state, batch(6, 8))  # a short last batch
    want, loss = plain(want, batch(6, 8))
    worker.compare((short, expected), worker.host((want, loss)))
    state, _ = step(short, batch(7))
    want, _ = plain(want, batch(7))
    worker.compare(state, worker.host(want))
    worker.say("short batch")

    everywhere = Mesh(np.array(jax.devices()), ("d",))
    spread = jax.tree.map(
        lambda leaf, whole: jax.make_array_from_callback(
            whole.shape, NamedSharding(everywhere, PartitionSpec()), lambda index: np.asarray(whole)[index]
        ),
        state, want,
    )  # fmt: skip
    placed, _ = step.place(spread, batch(8))
    worker.compare(placed, worker.host(want))
    other = alpa_lite.parallelize(train_step, method=alpa_lite.Pipeline(submesh_shapes=others), num_microbatches=2)
    zero = alpa_lite.parallelize(train_step, method=alpa_lite.Zero(3))
    for one in (other, zero, step):  # state that lies under one plan is moved to another
        state, _ = one(state, batch(9))
        want, _ = plain(want, batch(9))
        worker.compare(state, worker.host(want))
    worker.say("moved")
    try:
        step({"no": 1}, batch(0))
    except (AlpaLiteError, AttributeError, TypeError) as error:
        worker.say("refused", type(error).__name__)


if __name__ == "__main__":
    main()
