"""The common shape of the train loops in this folder, and how one is run and compared with plain `jax.jit`.

The other modules have loops as their users write them, with models that `models/` does not have.
`tests/test_loops.py` runs them all.

Two runs of a loop agree if every floating-point leaf of the final state, of every step's metrics and of every
evaluation holds ||a - b|| <= TOLERANCE * max(||b||, 1e-3 * ||all||), where `all` are the floating-point arrays of the
same tree, or its scalars if it has no arrays, and if all other leaves (counters, random keys, flags) are equal. The
loops update by gradient descent with momentum, or by Adam with a large epsilon: Adam proper makes steps of equal length
out of gradients that are rounding errors.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from tests.comparing import leaves, norm

TOLERANCE = 1e-5
"""Of float32: 84 times its unit roundoff, for sums over devices in another order, carried through 20 steps."""

ROWS, LAST, STEPS, EPOCH = 16, 6, 20, 10
"""Examples in a batch and in the last one of an epoch, steps of a run, and steps of an epoch: no device count divides
the last batch, as with most data sets."""

MODULES = {
    "linen_steps": ("LinenTrainState", "MultiSteps", "Ema", "LossScaling", "Gan", "VisionBatchNorm"),
    "library_steps": ("NnxOptimizer", "HaikuState", "EquinoxPartition"),
    "unusual_steps": ("Lora", "ActorCritic", "TwoTowers"),
}
NAMES = tuple(name for names in MODULES.values() for name in names)

Arrays = dict[str, Any]


class Loop:
    """A train loop: what it carries, what it calls, and what it reads."""

    def make_state(self) -> tuple[Any, ...]:
        """What the loop carries from step to step; the same values at every call."""
        raise NotImplementedError

    train_step: Callable[..., Any]
    """The step, written for one device."""
    eval_step: Callable[..., Any]
    """Evaluation, written for one device; returns no new state."""

    def batch(self, seed: int, rows: int) -> Any:
        """A batch of numpy arrays."""
        raise NotImplementedError

    def advance(self, step: Any, carried: tuple[Any, ...], batch: Any) -> tuple[tuple[Any, ...], Any]:
        """What is carried and metrics after a call, whose leading results replace what is carried."""
        *new, metrics = step(*carried, batch)
        return (*new, *carried[len(new) :]), metrics

    def evaluate(self, step: Any, carried: tuple[Any, ...], batch: Any) -> Any:
        """Metrics of an evaluation."""
        return step(*carried, batch)


@dataclass
class Run:
    """What a loop gave: its final state, and the metrics of every step and every evaluation."""

    state: Any
    metrics: list[Any]
    evaluations: list[Any]


def schedule(loop: Loop, steps: int = STEPS, epoch: int = EPOCH) -> Iterator[tuple[Any, bool]]:
    """Each step's batch, and whether an epoch ends with it: its batch is short then, and evaluation follows."""
    for number in range(steps):
        ends = (number + 1) % epoch == 0
        yield loop.batch(number, LAST if ends else ROWS), ends


def run(loop: Loop, train_step: Any, eval_step: Any, steps: int = STEPS, epoch: int = EPOCH, ahead: Any = iter) -> Run:
    """Runs the loop with these two functions in place of its own, and with the batches as `ahead` gives them."""
    carried = loop.make_state()
    metrics, evaluations = [], []
    batches = ahead(batch for batch, _ in schedule(loop, steps, epoch))
    for batch, (_, ends) in zip(batches, schedule(loop, steps, epoch), strict=True):
        carried, found = loop.advance(train_step, carried, batch)
        metrics.append(found)
        if ends:
            evaluations.append(loop.evaluate(eval_step, carried, loop.batch(1000, ROWS)))
    return Run(values(carried), metrics, evaluations)


def plain(loop: Loop) -> tuple[Any, Any]:
    """The loop's two functions under plain `jit`: `nnx.jit` for modules that are updated in place, else `jax.jit`."""
    jit = nnx.jit if any(map(is_module, loop.make_state())) else jax.jit
    return jit(loop.train_step), jit(loop.eval_step)


def values(carried: tuple[Any, ...]) -> Any:
    """What a loop carries, modules as plain trees."""
    return [nnx.to_pure_dict(nnx.state(x)) if is_module(x) else x for x in carried]


def is_module(value: Any) -> bool:
    """Whether a value is an NNX object, which steps update in place."""
    return isinstance(value, nnx.Module | nnx.Optimizer | nnx.Metric)


def errors(got: Run, want: Run) -> dict[str, float]:
    """For each leaf its relative error as the module's docstring defines it; infinity where other leaves differ."""
    found: dict[str, float] = {}
    pairs = [("state", got.state, want.state)]
    for name in ("metrics", "evaluations"):
        both = zip(getattr(got, name), getattr(want, name), strict=True)
        pairs += [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(both)]
    for name, a, b in pairs:
        found |= {name + path: error for path, error in _tree_errors(a, b).items()}
    return found


def _tree_errors(got: Any, want: Any) -> dict[str, float]:
    a, b = leaves(got), leaves(want)
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    floats = {path for path, x in b.items() if np.issubdtype(x.dtype, np.inexact)}
    arrays = {path for path in floats if b[path].ndim} or floats
    total = np.sqrt(sum(norm(b[path]) ** 2 for path in arrays))
    found = {}
    for path, wanted in b.items():
        assert a[path].shape == wanted.shape and a[path].dtype == wanted.dtype, path
        if path not in floats or not np.isfinite(wanted).all():
            found[path] = 0.0 if np.array_equal(a[path], wanted, equal_nan=path in floats) else np.inf
            continue
        difference = norm(np.asarray(a[path], np.float64) - np.asarray(wanted, np.float64))
        scale = max(norm(wanted), 1e-3 * total)
        found[path] = 0.0 if difference == 0 else float(difference / scale) if scale else np.inf
        if np.isnan(found[path]):
            found[path] = np.inf
    return found


def images(seed: int, rows: int, size: int, channels: int, classes: int) -> Arrays:
    """Noise, brighter by its label."""
    rng = rng_of(seed)
    label = rng.integers(0, classes, rows, dtype="int32")
    image = rng.standard_normal((rows, size, size, channels), "float32") + label[:, None, None, None] / classes
    return {"image": image, "label": label}


def rng_of(seed: int) -> np.random.Generator:
    """Random numbers for a batch."""
    return np.random.default_rng(seed)


def loop(name: str) -> Loop:
    """The loop of a name: only its own imports are loaded."""
    module = next(module for module, names in MODULES.items() if name in names)
    return getattr(importlib.import_module(f"tests.loops.{module}"), name)()
