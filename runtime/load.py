"""Loads a planned step onto the devices of this run."""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.passes.lowering import emission
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.pipeline import PipelineExecutable
from alpa_lite.runtime.single import SingleExecutable
from alpa_lite.runtime.step import Executable, LoadOptions


def load(staged: Staged, plan: Plan, options: LoadOptions | None = None) -> Executable:
    """Returns the planned step on devices that are here. The cluster's options for the compiler are added.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    options = options or LoadOptions()
    options = replace(options, compiler_options={**plan.cluster.compiler_options, **options.compiler_options})
    if plan.is_pipelined:
        return PipelineExecutable(staged.traced, staged.written, plan.cluster, options)
    (stage,) = staged.stages
    traced, program = stage.graph.traced, stage.program
    return SingleExecutable(
        traced,
        program.mesh,
        (program.inputs, program.outputs),
        lambda mesh: emission.function_of(program, traced, mesh, stage.communication),
        program.body.instructions,
        options,
    )
