"""Lowering of a decided step to the program of each device: local operations, with every collective written out.

In: a graph, its groups, and the strategy of each. Out: `LocalProgram`, instructions as data. `collectives` reads the
plan's list off it, and `function_of` makes it a function of global arrays: the plan lists what is run.
"""

from alpa_lite.passes.lowering.emission import function_of
from alpa_lite.passes.lowering.lowering import lower
from alpa_lite.passes.lowering.program import LocalProgram, collectives, spec_of

__all__ = ["LocalProgram", "collectives", "function_of", "lower", "spec_of"]
