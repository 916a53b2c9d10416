"""The nouns of layering: layers of a forward pass, and which stage runs which operation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Block, Op, Traced
from alpa_lite.passes.ir.loops import scan_op


@dataclass(frozen=True, eq=False)
class Layer:
    """A contiguous part of the forward pass.

    Attributes:
      ops: forward op indices, in the order that layers cut: program order, but operations that need no activation
        (masks, positions, casts of parameters) stand before their first user.
      seconds: estimate for one micro-batch, forward only, on a nominal device: to compare layers, not to predict.
      fingerprint: equal for layers that compute the same function.
      bytes_out: bytes per micro-batch of the values that cross from this layer or earlier ones to later ones.
    """

    ops: tuple[int, ...]
    seconds: float
    fingerprint: str
    bytes_out: int


@dataclass(frozen=True, eq=False)
class Layering:
    """The forward pass of a micro-batch as layers.

    Attributes:
      traced: the step.
      scan: the index of the op of the top block that runs through the micro-batches.
      forward: the forward ops of the scan's body; the other ops of the body are its backward pass.
      layers: in order; each forward op is in exactly one.
      free_ops: the ops of the top block and of the body that need no activation and are cheap to run again.
    """

    traced: Traced
    scan: int
    forward: frozenset[int]
    layers: tuple[Layer, ...]
    free_ops: frozenset[int]

    @cached_property
    def scan_op(self) -> Op:
        """The scan over micro-batches."""
        return scan_op(self.traced, self.scan)

    @property
    def body(self) -> Block:
        """The block of one micro-batch."""
        return self.scan_op.bodies[0]

    def check(self, cuts: Sequence[int]) -> None:
        """Raises OptionError unless `cuts` rise strictly within 1 .. number of layers - 1."""
        count = len(self.layers)
        if any(low >= high for low, high in itertools.pairwise([0, *cuts, count])):
            raise OptionError(
                f"cuts={tuple(cuts)} leave a stage without layers: they must rise strictly, from 1 to {count - 1}, for "
                f"{count} layers"
            )

    def stage_of(self, cuts: Sequence[int]) -> dict[int, int]:
        """Forward op -> its stage, where `cuts` are the first layer of each stage after the first."""
        layers = ((sum(number >= first for first in cuts), layer) for number, layer in enumerate(self.layers))
        return {index: stage for stage, layer in layers for index in layer.ops}


@dataclass(frozen=True)
class Phases:
    """The tasks of a stage that run the ops of a micro-batch.

    Attributes:
      number: op index -> 1 in the backward task, 2 where it feeds accumulators alone and may run later (the weight task
        of zero-bubble schedules). In slices of the sequence, the phase in `tokens.slicing`. 0 for all others.
      num_slices: of the sequence.
    """

    number: Mapping[int, int] = field(default_factory=dict)
    num_slices: int = 1

    def phase_of(self, index: int, *, split_weights: bool) -> int:
        """Returns the phase of an op, where gradients of parameters have one of their own or not."""
        number = self.number.get(index, 0)
        return number if split_weights or self.num_slices > 1 else min(number, 1)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which stage runs which operation. Stages are numbered in the order of the forward pass.

    Attributes:
      num_stages: the number of stages.
      stage: op index -> stage, for every op of the scan's body and every other op of the top block. For a shared op,
        the lowest stage that uses it.
      shared_ops: ops that every stage that uses them runs for itself: their operands are inputs or other shared ops.
      home: input of the top block -> the stage that keeps it (for state: that updates it). Inputs that nobody reads
        are on stage 0. Other stages that read it get it once per step, the batch as slices.
      owner: argument number -> the stage that it is bound to, whose new value is returned there, wherever it is made.
      delayed_ops: ops of the top block that run no earlier than they must: their results are as large as what
        they read.
      split_sums: (carry, ((value, stage), ...)): what a micro-batch adds to this carry is the sum of these values,
        which are made on different stages. Each stage keeps an accumulator of its own, and they are added once per
        step.
      dissolved_additions: the additions that `stages.sums` replace: those that join the summands, and the carry's own.
      phases: of the body's ops; no stage needs to have an op of every phase.
    """

    num_stages: int
    stage: Mapping[int, int]
    shared_ops: frozenset[int]
    home: Mapping[int, int] = field(default_factory=dict)
    owner: Mapping[int, int] = field(default_factory=dict)
    delayed_ops: frozenset[int] = frozenset()
    split_sums: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    dissolved_additions: frozenset[int] = frozenset()
    phases: Phases = field(default_factory=Phases)
