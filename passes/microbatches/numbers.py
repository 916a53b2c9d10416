"""Candidate numbers of micro-batches of a pipeline, and the bytes of state that bound those of one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import Pipeline
from alpa_lite.passes.microbatches.batch import batch_arrays, inputs_of
from alpa_lite.passes.microbatches.loop import batch_dims

MAX_MICROBATCHES = 256
"""The most micro-batches of a pipeline that are tried unless a number is given."""

LARGE_CLUSTER, MAX_MICROBATCHES_LARGE = 1024, 512
"""On this many devices more micro-batches are tried: there are more stages, and the bubble is longer."""


def candidate_numbers(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, method: Pipeline) -> list[int]:
    """Powers of two that the batch divides into, exactly, and above them its size over powers of two, rising.

    The latter leave a power of two of examples: a batch of 1600 is cut into 64 parts of 25, or into 100 of 16, which
    more devices can share. A step that can be cut into a number of parts can be cut into each of its divisors.

    Raises:
      MicrobatchError: there is none, not even one.
    """
    limit = MAX_MICROBATCHES_LARGE if cluster.num_devices >= LARGE_CLUSTER else MAX_MICROBATCHES
    most = min(limit, 8 * max(2, method.num_stages or cluster.num_devices))
    powers = [1 << i for i in range(most.bit_length())]
    sizes = {item.shape[0] for item in batch_arrays(traced)}
    if len(sizes) == 1:  # one analysis, of the least common multiple, may cover all numbers
        (size,) = sizes
        fitting = [count for count in powers if size % count == 0]
        finer = _halvings(size, fitting[-1], most)
        cut = batch_dims(traced, rules, math.lcm(fitting[-1], finer[-1])) if finer else None
        if cut and not any(cut.values()):
            return [*fitting, *finer]
    cut = None
    while powers and (cut := batch_dims(traced, rules, powers[-1])) is None:
        powers.pop()
    if cut is None:
        raise MicrobatchError("the step cannot be written as a loop over micro-batches; use one mesh (Sharded())")
    shapes = {argument.path: traced.graph.values[value].shape for argument, value in inputs_of(traced)}
    finer = _halvings(max(shapes[path][dim] for path, dim in cut.items()), powers[-1], most) if cut else []
    while finer and batch_dims(traced, rules, finer[-1]) is None:
        finer.pop()
    return [*powers, *finer]


def _halvings(size: int, largest: int, most: int) -> list[int]:
    """The size over powers of two, rising: those above the largest power of two of parts and not above the most."""
    found = [size >> i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted(count for count in found if 2 * largest <= most and largest < count <= most)


def state_bytes(traced: Traced) -> int:
    """Bytes of the training state and of frozen weights, whole."""
    return sum(traced.graph.values[value].nbytes for argument, value in inputs_of(traced) if argument.stays)
