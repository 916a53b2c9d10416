"""Puts a planned step on the devices that are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan import Plan
from alpa_lite.runtime.executor import Donate, Executable, load_step
from alpa_lite.runtime.frozen import Copies
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.pipeline import PipelineExecutable

AnyExecutable = Executable | PipelineExecutable


def load(
    staged: Staged, plan: Plan, *, donate: Donate = "auto", devices: Sequence[Any] | None = None,
    owned: Owned | None = None, copies: Copies | None = None,
) -> AnyExecutable:  # fmt: skip
    """The planned step on devices that are here: one executable for one mesh, else the lists of the submeshes.

    Args:
      donate: "auto", or the positions of the arguments to donate; () for none. A pipeline has been told before.
      devices: in the order of the cluster; by default the first of `jax.devices()`.
      owned: what the step may overwrite, shared by its executables.
      copies: of frozen weights, shared likewise.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    if plan.pipelined:
        named = donate != "auto"
        return PipelineExecutable(
            staged.traced, staged.written, plan.cluster, devices, owned=owned, named=named, copies=copies
        )
    (stage,) = staged.stages
    return load_step(
        stage.graph.traced, stage.program,
        communication=stage.communication, donate=donate, devices=devices, owned=owned, copies=copies,
    )  # fmt: skip


def compiled(executable: AnyExecutable) -> tuple[Any, ...]:
    """The `jax.stages.Compiled` of each executable, in the program's order."""
    if isinstance(executable, PipelineExecutable):
        return tuple(executable.compile())
    return (executable.compiled(),)
