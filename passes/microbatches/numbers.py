"""Which numbers of micro-batches are worth trying in a pipeline, and what bounds those of one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError
from alpa_lite.graph import Traced
from alpa_lite.options import Pipeline
from alpa_lite.passes.microbatches.loop import batch_dims
from alpa_lite.strategy import Rule

MOST = 256
"""The most micro-batches of a pipeline that are tried unless a number is given."""


def of_pipelines(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, method: Pipeline) -> list[int]:
    """Powers of two that the batch divides into, exactly, rising.

    Raises:
      MicrobatchError: there is none, not even one.
    """
    most = min(MOST, 8 * max(2, method.num_stages or cluster.num_devices))
    counts = [1 << i for i in range(most.bit_length())]
    while counts and batch_dims(traced, rules, counts[-1]) is None:
        counts.pop()  # what can be cut into a number of parts can be cut into half as many
    if not counts:
        raise MicrobatchError("the step cannot be written as a loop over micro-batches; use one mesh (Sharded())")
    return counts


def state_bytes(traced: Traced) -> int:
    """Bytes of the training state and of frozen weights, whole."""
    values = traced.graph.values
    arguments = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    return sum(values[value].nbytes for argument, value in arguments if argument.stays)
