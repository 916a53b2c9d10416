"""From a Python function to a graph.

In: the user's step and its arguments, arrays or shapes. Out: `alpa_lite.ir.graph.Traced`, one flat graph in which calls
are inlined, Flax NNX objects are split into arrays, and each argument is known as state, batch or neither. The
shardings that arguments arrive with, or are annotated with, are read here, too.
"""

from alpa_lite.passes.tracing.placements import read_annotations
from alpa_lite.passes.tracing.tracing import trace, trace_under

__all__ = ["read_annotations", "trace", "trace_under"]
