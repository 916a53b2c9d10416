"""`check`, `trace` and callbacks over all processes. Argument: what the pipeline's submeshes are."""

import json

import jax
import jax.numpy as jnp
import mlp
import numpy as np
import worker

import alpa_lite
from alpa_lite.runtime.step import Executable
from gallery.steps import distance, sgd


@sgd
def calling(params, batch):
    """The first layer asks the host."""

    @jax.custom_vjp
    def tanh(x):
        return jax.pure_callback(np.tanh, x, x, vmap_method="sequential")

    tanh.defvjp(lambda x: (tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))

    return distance(params[1:], {**batch, "x": tanh(batch["x"] @ params[0])})


planned = Executable.results


def wrong_here(*given, **named):
    """The results of a planned step, of which those that this process alone has are wrong."""
    return [2 * x if x.is_fully_addressable else x for x in planned(*given, **named)]


def main() -> None:
    (given,) = worker.start()
    method = alpa_lite.Pipeline(submesh_shapes=json.loads(given))
    params, batch = mlp.arguments()
    for one in (method, alpa_lite.Zero(stage=3)):
        step = alpa_lite.parallelize(mlp.step, method=one, num_microbatches=2)
        state, _ = step(params, batch)
        found = alpa_lite.check(step, state, batch)
        assert found.ok, str(found)
        worker.say("equal:", len(found.leaves), "leaves of", type(one).__name__)
        if one is method:
            events = step.profile(None, state, batch).events
            if jax.process_index() == 1:
                Executable.results = wrong_here
            wrong = alpa_lite.check(step, state, batch)
            Executable.results = planned
            worker.say("wrong:", sum(not leaf.ok for leaf in wrong.leaves), "leaves,", wrong.unchecked_reason)
            worker.say("traced", sorted({event.kind for event in events}), "on", sorted({e.mesh for e in events}))
    step = alpa_lite.parallelize(calling, method=method, num_microbatches=2, allow_inexact=True)
    worker.train(step, calling, (params, batch))
    worker.say("called back")


if __name__ == "__main__":
    main()
