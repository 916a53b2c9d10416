"""Trains models over all processes by several methods, and compares every step with one device. Argument: the cases.

A case is [name, options]: a model of this project, one of them with "/nnx" for the step in NNX's own style, one of the
gallery's zoo, or the "mlp" of this folder; and `kind` the method, `microbatches`, and the method's own options. With
`unread` steps, no result is read before the last of them.
"""

import functools
import json
from typing import Any

import jax
import mlp
import numpy as np
import worker

import alpa_lite
from gallery.steps import distance

SMALL = {
    "gpt": {"vocab": 64, "seq": 16, "hidden": 32, "heads": 4, "layers": 2},
    "moe": {"vocab": 64, "seq": 16, "hidden": 16, "heads": 4, "experts": 4, "group": 16},
    "unet": {"image": 8, "channels": 8, "factors": (1,), "groups": 4, "attention": ()},
}
"""What of the "tiny" size is smaller still."""


@functools.cache
def made(name: str) -> tuple[Any, Any, str]:
    """A step, its arguments, and its style; one jitted reference then serves all methods."""
    if name == "mlp":
        return mlp.step, mlp.arguments(), ""
    own, _, style = name.partition("/")
    if own in SMALL:
        from alpa_lite import models

        build = models.get(own).build_nnx if style else models.get(own).build
        step, args = build("tiny", 8, **SMALL[own])
        return step, args, style
    import gallery

    case = gallery.get("zoo", name)
    step, args = case.make()
    return step, args, case.style


def last_loss(step: Any, args: Any, steps: int) -> float:
    params, batch = args
    for _ in range(steps):
        params, loss = step(params, batch)
    return float(loss)


def main() -> None:
    (cases,) = worker.start()
    for name, options in json.loads(cases):
        step, args, style = made(name)
        parts, unread = options.pop("microbatches", "auto"), options.pop("unread", 0)
        method = getattr(alpa_lite, options.pop("kind"))(**options)
        ours = alpa_lite.parallelize(step, num_microbatches=parts, method=method)
        if unread:
            assert np.isclose(last_loss(ours, args, unread), last_loss(jax.jit(step), args, unread), rtol=1e-5)
            worker.say("agrees")
            continue
        blocks = worker.train(ours, step, args, style)
        if name == "mlp":
            with jax.default_matmul_precision("float32"):  # for which dispatch in C++ asks Python again
                assert np.isclose(last_loss(ours, args, 1), float(distance(*args)), rtol=1e-5)
        plan = ours.plans[0]
        meshes = [stage.mesh_shape for stage in plan.stages]
        worker.say(name, type(method).__name__, "agrees in", blocks, "blocks, meshes", meshes, plan.schedule)
        worker.say(name, "slices", list(plan.division.token_slices))


if __name__ == "__main__":
    main()
