"""The document: what was decided, what it costs, what else there was; and running a decision again.

In: what the search found. Out: `alpa_lite.plan.plan.Plan`. `write` makes it; `replay.replay` finds the decisions of a
given plan in a step without solving. `constraint_notes` says which of the user's shardings are applied.
"""

from alpa_lite.passes.plans.notes import constraint_notes
from alpa_lite.passes.plans.writing import write

__all__ = ["constraint_notes", "write"]
