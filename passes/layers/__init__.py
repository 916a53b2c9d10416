"""The forward pass as layers, and which stage runs which operation once layers are assigned to stages.

In: a loop over micro-batches. Out: `Layering`, contiguous layers of about equal cost with identical ones recognised,
and `Assignment`, the stage of every operation, backward and update included. Scans over layers are cut where stages
begin, and what a stage does not save is computed again.
"""

from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.division import divide_into_stages, find_layers

__all__ = ["assign", "divide_into_stages", "find_layers"]
