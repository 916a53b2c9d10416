"""Trains without reading a result before the last step. Arguments: the method, the number of steps."""

import json

import jax
import mlp
import numpy as np
import worker

import alpa_lite


def main() -> None:
    given, steps = worker.start()
    options = json.loads(given)
    method = getattr(alpa_lite, options.pop("kind"))(**options)
    microbatches = 4 if isinstance(method, alpa_lite.Pipeline) else "auto"
    ours = alpa_lite.parallelize(mlp.step, method=method, num_microbatches=microbatches)
    single = jax.jit(mlp.step)
    (params, batch), (there, _) = mlp.arguments(), mlp.arguments()
    (params, loss), (there, want) = ours(params, batch), single(there, batch)
    for _ in range(int(steps) - 1):
        params, loss = ours(params, batch)
    for _ in range(int(steps) - 1):
        there, want = single(there, batch)
    assert np.allclose(float(loss), float(want), rtol=1e-5), (float(loss), float(want))
    worker.say("agrees")


if __name__ == "__main__":
    main()
