"""The common shape of the train loops in this folder, and how one is run.

The other modules have loops as their users write them, with models that `models/` does not have.
`tests/test_loops.py` runs them all, and compares them with plain `jax.jit`.

Two runs of a loop agree if every floating-point leaf of the final state, of every step's metrics and of every
evaluation holds ||a - b|| <= TOLERANCE * max(||b||, 1e-3 * ||all||), where `all` are the floating-point arrays of the
same tree, or its scalars if it has no arrays, and if all other leaves (counters, random keys, flags) are equal. The
loops update by gradient descent with momentum, or by Adam with a large epsilon: Adam proper makes steps of equal length
out of gradients that are rounding errors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from gallery.registry import Built, Case, parse_tags

TOLERANCE = 1e-5
"""Of float32: 84 times its unit roundoff, for sums over devices in another order, carried through 20 steps."""

ROWS, LAST, STEPS, EPOCH = 16, 6, 20, 10
"""Examples in a batch and in the last one of an epoch, steps of a run, and steps of an epoch: no device count divides
the last batch, as with most data sets."""

Arrays = dict[str, Any]
LOOPS: dict[str, Callable[[], "Loop"]] = {}
"""What builds the loops of the modules that are loaded, by name."""


@dataclass(frozen=True)
class Loop:
    """A train loop: what it carries, what it calls, and what it reads.

    Attributes:
      make_state: makes what is carried from step to step; the same values at every call.
      train_step: the step, written for one device.
      eval_step: evaluation, written for one device; returns no new state.
      batch: (seed, rows) to a batch of numpy arrays.
      evaluate: calls a step of evaluation on what is carried and a batch, for metrics.
      advance: calls a train step, whose leading results replace what is carried, for that and metrics.
    """

    make_state: Callable[[], tuple[Any, ...]]
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    batch: Callable[[int, int], Any]
    evaluate: Callable[[Any, Any, Any], Any] = lambda step, carried, batch: step(*carried, batch)
    advance: Callable[[Any, Any, Any], Any] = lambda step, carried, batch: replace_carry(
        carried, *step(*carried, batch)
    )


def replace_carry(carried: tuple[Any, ...], *results: Any) -> tuple[tuple[Any, ...], Any]:
    """What is carried with leading results in place of its first values, and the last result."""
    *new, metrics = results
    return (*new, *carried[len(new) :]), metrics


def registers(cases: list[Case], name: str, tags: str) -> Any:
    """Adds the first call of a loop to the cases of a module, by what builds the loop."""

    def register(build: Callable[[], Loop]) -> Callable[[], Loop]:
        LOOPS[name] = build
        cases.append(Case(name, partial(first_call, build), tags=parse_tags(tags), notes=build.__doc__ or ""))
        return build

    return register


def first_call(build: Callable[[], Loop]) -> Built:
    """The train step of a loop and its first arguments."""
    loop = build()
    return loop.train_step, (*loop.make_state(), loop.batch(0, ROWS))


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


def pictures(seed: int, rows: int, channels: int = 3) -> Arrays:
    """Noise of 8 x 8, brighter by its label of four."""
    rng = rng_of(seed)
    label = rng.integers(0, 4, rows, dtype="int32")
    image = rng.standard_normal((rows, 8, 8, channels), "float32") + label[:, None, None, None] / 4
    return {"image": image, "label": label}


def rng_of(seed: int) -> np.random.Generator:
    """Random numbers for a batch."""
    return np.random.default_rng(seed)
