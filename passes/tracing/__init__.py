"""From a Python function to a graph.

In: the user's step and its arguments, arrays or shapes. Out: `alpa_lite.graph.Traced`, one flat graph in which calls
are inlined, Flax NNX objects are split into arrays, and each argument is known as state, batch or neither. What the
arguments say of where they lie is read here, too.
"""

from alpa_lite.passes.tracing.annotations import annotated
from alpa_lite.passes.tracing.contexts import under
from alpa_lite.passes.tracing.tracing import trace

__all__ = ["annotated", "trace", "under"]
