"""Trains an MLP as a pipeline over all processes, and compares every step with one device. Argument: pipelines."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import worker

import alpa_lite


def loss_of(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return ((x - batch["y"]) ** 2).mean()


def step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


def arguments(layers=4, width=32, batch=16):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype(np.float32) / 6 for _ in range(layers)]
    return params, {name: rng.normal(size=(batch, width)).astype(np.float32) for name in "xy"}


def main() -> None:
    (given,) = worker.start()
    args = arguments()
    for options in json.loads(given):
        ours = alpa_lite.parallelize(step, method=alpa_lite.Pipeline(**options), num_microbatches=4)
        blocks = worker.train(ours, step, args)
        with jax.default_matmul_precision("float32"):  # for which dispatch in C++ asks Python again
            _, loss = ours(*args)
        assert np.isclose(float(loss), float(loss_of(*args)), rtol=1e-5)
        plan = ours.plan(*args)
        worker.say("blocks", blocks, plan.schedule, "meshes", [stage.mesh_shape for stage in plan.stages])


if __name__ == "__main__":
    main()
