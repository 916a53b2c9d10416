"""The document: what was decided, what it costs, what else there was; and running a decision again.

In: what the search found. Out: `alpa_lite.plan.plan.Plan`. `write` makes it; `replay.replay` finds the decisions of a
given plan in a step without solving. `heeded` says what became of the user's own shardings.
"""

from alpa_lite.passes.plans.saying import heeded
from alpa_lite.passes.plans.writing import write

__all__ = ["heeded", "write"]
