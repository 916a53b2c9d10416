"""Process 1 does in the middle of training what the others do not. Arguments: what, and the method."""

import os
import sys
import time

import jax
import mlp
import worker

import alpa_lite
from alpa_lite.processes import failure_propagation
from gallery.steps import layers, sgd

armed = False


def look(x) -> None:
    if armed:
        raise ValueError("the last layer is not well")


@sgd
def step(params, batch):
    x = layers(params, batch["x"])
    jax.debug.callback(look, x[0, 0])
    return ((x - batch["y"]) ** 2).mean()


def main() -> None:
    global armed
    what, method = worker.start()
    failure_propagation.POLL_SECONDS, failure_propagation.GRACE_SECONDS = 0.3, 2.0
    args, more = mlp.arguments(layers=2, width=8), mlp.arguments(layers=2, width=8, batch=32)
    methods = {"pipeline": alpa_lite.Pipeline(num_stages=2), "one mesh": alpa_lite.Zero(stage=1)}
    ours = alpa_lite.parallelize(
        step if what == "callback" else mlp.step, method=methods[method], num_microbatches=4, allow_inexact=True
    )
    params, loss = ours(*args)
    try:
        ours(params, args[1]["x"])  # by all processes
    except Exception as error:
        worker.say("caught", type(error).__name__)
    time.sleep(2 * failure_propagation.GRACE_SECONDS)
    params, loss = ours(params, args[1])
    worker.say("goes on", float(loss) > 0)
    if what == "switch":  # all have planned for both
        for batch in (more[1], args[1]):
            params, loss = ours(params, batch)
    wrong = jax.process_index() == 1
    if wrong and what == "loader":
        raise ValueError("the file is not there")
    if wrong and what == "fewer":
        return
    if wrong and what == "gone":  # as a callback that raises, in a process that then dies
        failure_propagation.monitor.report_end(ValueError("the first to fail"))
        os._exit(7)
    armed = what == "callback"
    usual, other = args[1], (more if wrong else args)[1]
    batches = [other if what in ("shapes", "switch") else usual] * (120 if what == "switch" else 20)
    if what == "prefetch":
        batches = ours.prefetch([usual] * 3 + [other] * 17)
    for batch in batches:
        params, loss = ours(params, batch)
        float(loss)
        time.sleep(what == "switch")  # which computes something, of other examples in each process
    worker.say("not ended")
    sys.exit(3)


if __name__ == "__main__":
    main()
