"""Each operation as a map of factors: which dims of its operands and results are one, and which are summed over.

In: the operations of a graph. Out: `alpa_lite.strategy.Rule` by operation key. Sharding, micro-batches, layers and
local forms all read the same rules. What no rule describes is opaque, with the reason.
"""

from alpa_lite.passes.factors.rules import check, describe, rules_of

__all__ = ["check", "describe", "rules_of"]
