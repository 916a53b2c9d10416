"""Trains models of the zoo over all processes, and compares every step with one device. Arguments: method, names."""

import json

import worker

import alpa_lite
from tests import zoo


def main() -> None:
    method, *names = worker.start()
    for name in names:
        case = zoo.get(name)
        step, args = case.make()
        options = json.loads(method)
        kind = getattr(alpa_lite, options.pop("kind"))
        ours = alpa_lite.parallelize(step, num_microbatches=options.pop("microbatches", "auto"), method=kind(**options))
        blocks = worker.train(ours, step, args, case.style)
        meshes = [stage.mesh_shape for stage in ours.plans[0].stages]
        worker.say(name, "agrees in", blocks, "blocks, meshes", meshes)
        worker.say(name, "slices", list(ours.plans[0].division.token_slices))


if __name__ == "__main__":
    main()
