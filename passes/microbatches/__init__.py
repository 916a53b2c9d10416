"""Conversion of a step on a whole batch to a loop over micro-batches that gives the same numbers.

In: a traced step, the rules of its operations, and a number. Out: `Accumulated`: a step with one scan over the
micro-batches, sums accumulated, the update after the loop. Operations that cannot be exact are named and refused,
or, where the user allows it, computed on each micro-batch by itself.
"""

from alpa_lite.passes.microbatches.loop import Accumulated, accumulate, batch_dims

__all__ = ["Accumulated", "accumulate", "batch_dims"]
