"""Pipeline schedules: which task of which micro-batch a submesh runs next. Functions from integers to task lists.

A model is cut into stages 0, 1, ..., and the batch into micro-batches. Per stage s and micro-batch m there is a task
forward(s, m), which needs forward(s-1, m), and a task backward(s, m), which needs backward(s+1, m) and forward(s, m).
A schedule may split the backward task: `backward` then computes the gradients of the stage's inputs alone, and
weight(s, m), which needs backward(s, m), those of its parameters. In a schedule without weight tasks, backward
computes both. With S submeshes and B micro-batches, stage s is on submesh s; with virtual stages, submesh i holds the
stages i, i+S, i+2S, and so on. Every schedule runs each kind of task of a stage in ascending order of micro-batches, so
that gradients are summed in one order, whatever the schedule.

Where sequences are in slices, each of these is one task for each slice: forward of slice i also needs that of slice
i-1 of the same stage, and backward that of slice i+1. None of zb-h1 are: gradients of parameters are not apart then.

  gpipe             all forwards, then all backwards. Huang et al., arXiv:1811.06965 (the figure there runs the
                    backwards in descending order, which takes as long).
  1f1b              submesh i starts with S-i-1 forwards, then alternates forward and backward, so that at most S-i
                    micro-batches are in flight. PipeDream-Flush: Narayanan et al., arXiv:2006.09503.
  eager-1f1b        as 1f1b, but starts with 2(S-i-1) forwards: at most 2(S-i)-1 in flight. Between a task and the
                    one on the next submesh that needs it there is then another task, under which the transfer hides.
                    Zhuang et al., arXiv:2211.05322.
  interleaved-1f1b  v stages on each submesh, each v times smaller: so is the bubble. Submesh i starts with
                    2(S-i-1) + (v-1)S forwards; micro-batches go through its stages in groups of S. Needs B divisible
                    by S. Narayanan et al., arXiv:2104.04473. One stage a submesh leaves nothing to interleave: 1f1b.
  zb-h1             backward split. Starts as 1f1b; submesh i puts its weight tasks off by i micro-batches, so that
                    all submeshes hold as many as the first one does in 1f1b, and the last weight tasks fill what was
                    the bubble at the end. Qi et al., arXiv:2401.10241.

A step that takes no gradients, on submeshes that are given, has the schedule `forward`: forwards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from alpa_lite.errors import OptionError


@dataclass(frozen=True)
class Strategy:
    """A kind of schedule: how tasks alternate, and the seconds that a stage adds to a step (see `stages.dp.slicing`).

    Forward, backward and transfers are seconds of one micro-batch, numbers or arrays.

    Attributes:
      warm_up: how many forwards a submesh runs before it alternates, of S, B, the submeshes behind it, and its stages.
        There may be fewer.
      hides_transfers: whether transfers hide behind computing.
      splits_backward: whether gradients of parameters are tasks of their own.
    """

    name: str
    warm_up: Callable[[int, int, int, int], int]
    hides_transfers: bool = False
    splits_backward: bool = False

    def bubble_filled(self, forward: Any, backward: Any) -> Any:
        """Returns seconds of the bubble that weight tasks fill, each half of a backward task."""
        return 2 * np.minimum(backward / 2, forward) if self.splits_backward else 0.0

    def latency(self, forward: Any, backward: Any, transfer: Any) -> Any:
        """Returns seconds of a micro-batch on a stage, and over the cut behind it and back."""
        return forward + backward + 2 * transfer - self.bubble_filled(forward, backward)

    def period(self, forward: Any, backward: Any, transfer: Any, slowest: Any) -> Any:
        """Returns seconds from one micro-batch to the next: transfers that hide count by the slowest."""
        whole = forward + backward
        return np.maximum(whole, 2 * slowest) if self.hides_transfers else whole + 2 * transfer

    def in_flight(self, num_meshes: int, num_microbatches: int, mesh: int, virtual: int = 1) -> int:
        """Returns the most micro-batch activations that a submesh holds at once.

        One activation is what one stage saves of one micro-batch. It is held from the start of forward(s, m) to the end
        of backward(s, m), or of weight(s, m) where backward is split: after backward, weight still needs the inputs of
        the stage's layers and the gradients of their outputs, less than all of it. With v stages a submesh, an
        activation is that of one stage: a v-th of what the submesh saves of a micro-batch.

        gpipe: B. 1f1b: min(S-i, B). eager-1f1b: min(2(S-i)-1, B). interleaved-1f1b with v > 1:
        min(2(S-i-1) + (v-1)S + 1, vB). zb-h1: min(S, B). forward: 1.
        """
        if self.splits_backward:
            return min(num_meshes, num_microbatches)
        warm_up = self.warm_up(num_meshes, num_microbatches, num_meshes - mesh - 1, virtual)
        return min(warm_up + 1, virtual * num_microbatches)

    def bubble(
        self, num_meshes: int, num_microbatches: int,
        *, forward: float, backward_input: float, backward_weight: float,
    ) -> float:  # fmt: skip
        """Returns seconds that each submesh idles in a step if all stages take the same time and transfers are free.

        (S-1)(f + b + w), with f, b and w those of one *stage*: with v stages a submesh they are v times shorter than
        the submesh's, which is the published (S-1)(f + b + w)/v.
        (S-1)(f + b - w) for zb-h1 with B >= S; the paper has no formula for fewer micro-batches, when only B-1 weight
        tasks are there to fill the bubble: (S-1)(f + b) - (B-1)w. Both hold for w <= f and w <= b. Sources: see the
        module.

        Args:
          num_meshes, num_microbatches: as of `schedule`.
          forward: f, seconds of one stage's forward for one micro-batch.
          backward_input: b, seconds of its gradients of inputs.
          backward_weight: w, seconds of its gradients of parameters.
        """
        others = num_meshes - 1
        if self.splits_backward:
            return others * (forward + backward_input) - min(others, num_microbatches - 1) * backward_weight
        return others * (forward + backward_input + backward_weight)


FORWARD = Strategy("forward", lambda *_: 0)
"""The schedule of steps without a backward pass (`forwards`); it is not chosen, and cannot be asked for."""

_CHOSEN = (
    Strategy("gpipe", lambda _, count, later, v: count, hides_transfers=True),
    Strategy("1f1b", lambda meshes, _, later, v: later),
    Strategy("eager-1f1b", lambda meshes, _, later, v: 2 * later, hides_transfers=True),
    Strategy("interleaved-1f1b", lambda meshes, _, later, v: 2 * later + (v - 1) * meshes if v > 1 else later),
    Strategy("zb-h1", lambda meshes, _, later, v: later, splits_backward=True),
)

STRATEGIES = {one.name: one for one in (*_CHOSEN, FORWARD)}
"""The schedules that there are, by name."""

NAMES = tuple(one.name for one in _CHOSEN)
"""The names of those that may be chosen."""

TaskKind = Literal["forward", "backward", "weight", "step"]


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one stage for one micro-batch, or one slice of its sequence. See the module for the kinds.

    A step that is not divided is one task of kind "step", in no micro-batch (-1).
    """

    kind: TaskKind
    stage: int
    microbatch: int
    slice: int = 0


@dataclass(frozen=True)
class Schedule:
    """The tasks of every submesh, in the order in which it runs them.

    Attributes:
      name: one of `NAMES`.
      num_meshes: S, the number of submeshes.
      num_microbatches: B.
      num_stages: S times the stages of each submesh. Stage s is on submesh s modulo S.
      tasks: one list for each submesh.
      num_slices: of the sequence of each micro-batch.
    """

    name: str
    num_meshes: int
    num_microbatches: int
    num_stages: int
    tasks: tuple[tuple[Task, ...], ...]
    num_slices: int = 1

    @property
    def virtual(self) -> int:
        """The number of stages of each submesh."""
        return self.num_stages // self.num_meshes

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are tasks of their own, of kind weight."""
        return any(task.kind == "weight" for task in self.tasks[0])

    def mesh(self, stage: int) -> int:
        """Returns the submesh that a stage is on."""
        return stage % self.num_meshes


def schedule(name: str, num_meshes: int, num_microbatches: int, *, virtual: int = 1, slices: int = 1) -> Schedule:
    """Returns the tasks of every submesh.

    Args:
      name: one of `NAMES`.
      num_meshes: S, at least 1.
      num_microbatches: B, at least 1; for "interleaved-1f1b" a multiple of S.
      virtual: stages of each submesh; more than 1 for "interleaved-1f1b" only.
      slices: of the sequence: a forward task is one for each slice in order, a backward task likewise in reverse.

    Raises:
      OptionError: no such schedule, or one that does not exist for these numbers.
    """
    strategy = _validated(name, num_meshes, num_microbatches, virtual)
    if slices > 1 and strategy.splits_backward:
        raise OptionError(
            "schedule 'zb-h1' computes gradients of parameters apart, which slices of the sequence do not; give "
            "schedule='1f1b', or leave token_slices out."
        )
    meshes, count = range(num_meshes), num_microbatches
    if virtual > 1:
        tasks = [_interleaved(mesh, num_meshes, count, virtual) for mesh in meshes]
    elif strategy.splits_backward:
        tasks = [_zero_bubble(mesh, num_meshes, count) for mesh in meshes]
    else:
        tasks = [
            _alternating(
                [Task("forward", mesh, m) for m in range(count)],
                [Task("backward", mesh, m) for m in range(count)],
                strategy.warm_up(num_meshes, count, num_meshes - mesh - 1, virtual),
            )
            for mesh in meshes
        ]
    lists = tuple(tuple(part for task in some for part in _in_slices(task, slices)) for some in tasks)
    return Schedule(name, num_meshes, count, num_meshes * virtual, lists, slices)


def _in_slices(task: Task, slices: int) -> Iterator[Task]:
    """Yields a task as one for each slice of the sequence.

    Backward, later tokens come first: earlier ones wait for them.
    """
    for number in range(slices) if task.kind == "forward" else reversed(range(slices)):
        yield replace(task, slice=number)


def forwards(meshes: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards alone. If all stages take the same time, forward(s, m) can start at s + m: that is their order.

    Args:
      meshes: the submesh of each stage, in the order in which a micro-batch goes through them.
      num_microbatches: B.
    """
    lists: list[list[Task]] = [[] for _ in range(max(meshes) + 1)]
    every = ((stage, microbatch) for stage in range(len(meshes)) for microbatch in range(num_microbatches))
    for stage, microbatch in sorted(every, key=lambda pair: (sum(pair), pair[1])):
        lists[meshes[stage]].append(Task("forward", stage, microbatch))
    return Schedule(FORWARD.name, len(lists), num_microbatches, len(meshes), tuple(map(tuple, lists)))


def _validated(name: str, num_meshes: int, num_microbatches: int, virtual: int) -> Strategy:
    """Returns the strategy of this name; raises OptionError unless it exists for these numbers."""
    if name not in NAMES:
        raise OptionError(f"schedule={name!r} does not exist; give one of {', '.join(map(repr, NAMES))}.")
    for argument, value in (("num_meshes", num_meshes), ("num_microbatches", num_microbatches), ("virtual", virtual)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{argument}={value!r} of schedule {name!r} is not a positive integer; give at least 1.")
    if virtual > 1 and name != "interleaved-1f1b":
        raise OptionError(
            f"virtual={virtual}: schedule {name!r} has one stage for each submesh; "
            "give virtual=1, or schedule='interleaved-1f1b'."
        )
    if name == "interleaved-1f1b" and num_microbatches % num_meshes:
        lower = num_microbatches - num_microbatches % num_meshes
        near = " or ".join(str(n) for n in (lower, lower + num_meshes) if n)
        raise OptionError(
            f"num_microbatches={num_microbatches} is not divisible by the {num_meshes} submeshes, as schedule "
            f"'interleaved-1f1b' needs it; give {near} micro-batches, or schedule='1f1b'."
        )
    return STRATEGIES[name]


def _alternating(forwards: list[Task], backwards: list[Task], warm_up: int) -> list[Task]:
    """`warm_up` forwards; then forward and backward in turn; then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    out = forwards[:warm_up]
    paired = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        out += (forward, backward)
    return out + backwards[paired:]


def _interleaved(mesh: int, num_meshes: int, num_microbatches: int, virtual: int) -> list[Task]:
    """Groups of S micro-batches go through all stages of the submesh: forward upwards, backward downwards."""
    warm_up = STRATEGIES["interleaved-1f1b"].warm_up(num_meshes, num_microbatches, num_meshes - mesh - 1, virtual)
    stages = [mesh + chunk * num_meshes for chunk in range(virtual)]
    groups = [range(first, first + num_meshes) for first in range(0, num_microbatches, num_meshes)]
    forwards = [Task("forward", s, m) for group in groups for s in stages for m in group]
    backwards = [Task("backward", s, m) for group in groups for s in reversed(stages) for m in group]
    return _alternating(forwards, backwards, warm_up)


def _zero_bubble(mesh: int, num_meshes: int, num_microbatches: int) -> list[Task]:
    """1F1B in which the weight task of micro-batch m comes after the backward task of micro-batch m + `mesh`."""
    base = _alternating(
        [Task("forward", mesh, m) for m in range(num_microbatches)],
        [Task("backward", mesh, m) for m in range(num_microbatches)],
        num_meshes - mesh - 1,
    )
    out = []
    for task in base:
        out.append(task)
        if task.kind == "backward" and task.microbatch >= mesh:
            out.append(Task("weight", mesh, task.microbatch - mesh))
    first = max(0, num_microbatches - mesh)
    return out + [Task("weight", mesh, m) for m in range(first, num_microbatches)]
