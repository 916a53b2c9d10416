"""From planned stages to the instruction lists of a pipeline, and the simulation of them.

In: planned stages, submeshes and a schedule. Out: `alpa_lite.ir.program.Program`: what each submesh runs and sends,
where each buffer begins and ends; `simulate` plays the lists that the runtime runs.
"""

from alpa_lite.passes.programs.simulation import simulate
from alpa_lite.passes.programs.staged import Staged, stage_pipeline, stage_whole_step

__all__ = ["Staged", "simulate", "stage_pipeline", "stage_whole_step"]
