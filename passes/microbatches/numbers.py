"""Which numbers of micro-batches are worth trying.

On one mesh, micro-batches only save memory: the step computes as much, synchronises its gradients once either way, and
keeps accumulators in addition. A plan whose peak is S + A, of which only A shrinks with the micro-batch, needs S + A/b
bytes with b micro-batches. If no plan needs less than P bytes with c of them, and every plan holds the training state,
F bytes per device when all of it is sharded, then S + A/c >= P and S >= F give

    S + A/b  >=  F + (P - F) c/b,

so numbers b for which that exceeds the budget are left out without solving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.graph import Traced
from alpa_lite.options import Pipeline
from alpa_lite.passes.microbatches.loop import batch_dims
from alpa_lite.report import units
from alpa_lite.strategy import Rule

T = TypeVar("T")

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


def next_count(tried: int, needed: float, floor: float, budget: float) -> int | None:
    """The next power of two that may fit on one mesh; None if none can.

    Args:
      tried: a number that does not fit; needed: P, the least bytes per device that it needs, 0 if unknown.
      floor: F, bytes per device of the training state when all of it is sharded.
      budget: bytes per device.
    """
    if floor >= budget or not needed:
        return None
    count = 2 * tried
    while floor + (needed - floor) * tried / count > budget:
        count *= 2
    return count


def least(solve: Callable[[int], T], first: InfeasibleError, floor: float, budget: float) -> T:
    """The result of `solve` for the least power of two of micro-batches that may fit, and does.

    Args:
      solve: plans the step with a number of micro-batches; raises InfeasibleError where that does not fit.
      first: what it raised for one micro-batch.
      floor, budget: as in `next_count`.

    Raises:
      InfeasibleError: none fits, or the step cannot be cut exactly; says so after the message of `first`.
    """
    tried, needed = 1, first.smallest_budget or 0.0
    while (count := next_count(tried, needed, floor, budget)) is not None:
        try:
            return solve(count)
        except MicrobatchError as refusal:
            raise InfeasibleError(f"{first} Micro-batches do not help: {refusal}", first.smallest_budget) from first
        except InfeasibleError as error:
            less = error.smallest_budget
            if less is None or less >= needed:
                raise InfeasibleError(
                    f"{first} Micro-batches do not help: {count} micro-batches need "
                    f"{units.exact_bytes(less or needed)} per device.",
                    first.smallest_budget,
                ) from error
            tried, needed = count, less
    raise first


def state_bytes(traced: Traced) -> int:
    """Bytes of the training state and of frozen weights, whole."""
    values = traced.graph.values
    arguments = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    return sum(values[value].nbytes for argument, value in arguments if argument.stays)


def fewer_do_not_fit(count: int, budget: float) -> str:
    """What a plan says of a number of micro-batches that memory asked for."""
    return (
        f"{count} micro-batches: with fewer, the step does not fit into memory_per_device={units.exact_bytes(budget)}"
    )
