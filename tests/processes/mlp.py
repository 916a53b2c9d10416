"""An MLP: its step and arguments."""

import numpy as np

from gallery.steps import distance, sgd

step = sgd(distance)


def arguments(layers=4, width=32, batch=16):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype(np.float32) / 6 for _ in range(layers)]
    return params, {name: rng.normal(size=(batch, width)).astype(np.float32) for name in "xy"}
