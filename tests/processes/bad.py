"""What processes do wrong together. Arguments: what, and which process does it."""

import sys
import time

import jax
import jax.numpy as jnp
import mlp
import worker

import alpa_lite
from alpa_lite import _jax
from alpa_lite.errors import AlpaLiteError
from gallery.steps import distance, sgd


def main() -> None:
    what, who = sys.argv[5], int(sys.argv[6])
    wrong = int(sys.argv[1]) == who
    worker.start(joined=what != "alone")
    params, batch = mlp.arguments(layers=2, width=8, batch=32 if wrong and what == "shapes" else 16)
    params = jax.device_put(params)  # all processes begin to use their devices together
    constant = batch["y"][0] + (1 if wrong and what == "constants" else 0)

    def loss_of(params, batch):
        if wrong and what == "raises":
            raise ValueError("the data is not there")
        x = batch["x"] + constant
        return distance(params, {**batch, "x": jnp.sin(x) if wrong and what == "code" else x})

    step = alpa_lite.parallelize(sgd(loss_of), method=alpa_lite.Pipeline(num_stages=2), num_microbatches=2)
    start, store = time.monotonic(), _jax.coordination_client()
    if wrong and what == "late":
        store.blocking_key_value_get("given up", 240_000)
    try:
        step(params, batch)
    except (AlpaLiteError, ValueError) as error:
        worker.say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")
        if what == "late":
            store.key_value_set("given up", "", allow_overwrite=True)
    else:
        worker.say("no error")


if __name__ == "__main__":
    main()
