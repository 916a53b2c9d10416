"""Operations as maps of factors: the dims that operands and results share, and those that are summed over.

In: the operations of a graph. Out: `alpa_lite.ir.strategy.Rule` by operation key. Sharding, micro-batches, layers and
local forms all read the same rules. Operations without a rule are opaque, with the reason.
"""

from alpa_lite.passes.factors.rules import describe, rules_of

__all__ = ["describe", "rules_of"]
