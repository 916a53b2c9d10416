"""From layers to stages: what a stage costs, which layers it should have, and the stage as a step of its own.

In: a step cut into layers, and submeshes. Out: `StageSlices`, the best division by dynamic programming, and
`PlannedStage`, each stage solved, lowered and cut into the segments that a schedule runs (forward, backward, update).
"""

from alpa_lite.passes.stages.choosing import choose
from alpa_lite.passes.stages.owners import ownership, turns_of
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.pricing import price_layers
from alpa_lite.passes.stages.staging import stage_graphs

__all__ = ["PlannedStage", "choose", "ownership", "price_layers", "stage_graphs", "turns_of"]
