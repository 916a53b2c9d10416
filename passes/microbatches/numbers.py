"""Which numbers of micro-batches are worth trying in a pipeline, and what bounds those of one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError
from alpa_lite.graph import Traced
from alpa_lite.options import Pipeline
from alpa_lite.passes.microbatches.loop import batch_dims
from alpa_lite.strategy import Rule

MOST = 256
"""The most micro-batches of a pipeline that are tried unless a number is given."""


MANY, MOST_OF_MANY = 1024, 512
"""With so many devices, so many micro-batches are tried: there are more stages, and the bubble is longer."""


def of_pipelines(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, method: Pipeline) -> list[int]:
    """Powers of two that the batch divides into, exactly, and above them its size over powers of two, rising.

    Raises:
      MicrobatchError: there is none, not even one.
    """
    most = min(
        MOST_OF_MANY if cluster.num_devices >= MANY else MOST, 8 * max(2, method.num_stages or cluster.num_devices)
    )
    counts, cut = [1 << i for i in range(most.bit_length())], None
    together = _together(traced, rules, counts, most)
    if together:
        return together
    while counts and (cut := batch_dims(traced, rules, counts[-1])) is None:
        counts.pop()  # what can be cut into a number of parts can be cut into half as many
    if cut is None:
        raise MicrobatchError("the step cannot be written as a loop over micro-batches; use one mesh (Sharded())")
    return [*counts, *_finer(traced, rules, cut, counts[-1], most)]


def _together(
    traced: Traced, rules: Mapping[Any, Rule], counts: Sequence[int], most: int
) -> list[int]:  # fmt: skip
    """All numbers, where the step can be cut into their least common multiple; else none, and each is to be tried.

    What can be cut into a number of parts can be cut into each of its divisors: one analysis tells of both kinds.
    """
    values = traced.graph.values
    inputs = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    sizes = {values[v].shape[0] for argument, v in inputs if argument.role == "batch" and values[v].shape}
    if len(sizes) != 1:
        return []
    (size,) = sizes
    powers = [count for count in counts if size % count == 0]
    finer = _halvings(size, powers[-1], most)
    cut = batch_dims(traced, rules, math.lcm(powers[-1], finer[-1])) if finer else None
    return [*powers, *finer] if cut and not any(cut.values()) else []


def _halvings(size: int, largest: int, most: int) -> list[int]:
    """The size over powers of two, rising: those above the largest power of two of parts and not above the most."""
    found = [size >> i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted(count for count in found if 2 * largest <= most and largest < count <= most)


def _finer(
    traced: Traced, rules: Mapping[Any, Rule], cut: Mapping[str, int], largest: int, most: int
) -> list[int]:  # fmt: skip
    """Numbers of which each is half of the next, above the largest power of two: the micro-batches are powers of two.

    A batch of 1600 is cut into 64 parts of 25, or into 100 of 16, which more devices can share.

    Args:
      cut: the dim of each batch argument that is cut.
    """
    values = dict(zip((a.path for a in traced.arguments), traced.graph.block.inputs, strict=False))
    if not cut:
        return []
    sizes = {traced.graph.values[values[path]].shape[dim] for path, dim in cut.items()}
    found = _halvings(max(sizes), largest, most)
    while found and batch_dims(traced, rules, found[-1]) is None:
        found.pop()
    return found


def state_bytes(traced: Traced) -> int:
    """Bytes of the training state and of frozen weights, whole."""
    values = traced.graph.values
    arguments = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    return sum(values[value].nbytes for argument, value in arguments if argument.stays)
