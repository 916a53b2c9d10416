"""Puts a planned step on the devices that are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from alpa_lite.graph import Traced
from alpa_lite.passes import lowering
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering.program import LocalProgram
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan import Plan
from alpa_lite.runtime import callbacks
from alpa_lite.runtime.donation import Donate
from alpa_lite.runtime.executor import Executable
from alpa_lite.runtime.frozen import Copies
from alpa_lite.runtime.meshes import mesh_of
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.pipeline import PipelineExecutable

AnyExecutable = Executable | PipelineExecutable


def load(
    staged: Staged, plan: Plan, *, donate: Donate = "auto", devices: Sequence[Any] | None = None,
    owned: Owned | None = None, copies: Copies | None = None, settings: tuple[Any, ...] | None = None,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> AnyExecutable:  # fmt: skip
    """The planned step on devices that are here: one executable for one mesh, else the lists of the submeshes.

    Args:
      donate: "auto", or the positions of the arguments to donate; () for none. A pipeline has been told before.
      devices: in the order of the cluster; by default the first of `jax.devices()`.
      owned: what the step may overwrite, shared by its executables.
      copies: of frozen weights, shared likewise.
      settings: of JAX, under which it is called; None if they are not compared.
      compiler_options: beyond those of the cluster.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    for_compiler = {**plan.cluster.compiler_options, **compiler_options}
    if plan.pipelined:
        return PipelineExecutable(
            staged.traced, staged.written, plan.cluster, devices,
            owned=owned, named=donate != "auto", copies=copies, settings=settings, compiler_options=for_compiler,
        )  # fmt: skip
    (stage,) = staged.stages
    return _load_step(
        stage.graph.traced, stage.program,
        communication=stage.communication, donate=donate, devices=devices, owned=owned, copies=copies,
        compiler_options=for_compiler, settings=settings,
    )  # fmt: skip


def _load_step(
    traced: Traced,
    program: LocalProgram,
    *,
    communication: str = "explicit",
    donate: Donate = "auto",
    devices: Sequence[Any] | None = None,
    owned: Owned | None = None,
    copies: Copies | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    settings: tuple[Any, ...] | None = None,
) -> Executable:
    """The planned step on devices that are here.

    Args:
      traced, program: of one step.
      communication: "explicit", or "compiler" where the collectives are left to it.
      donate: "auto", or the positions of the arguments to donate; () for none.
      devices: in the order of the mesh, last axis fastest; by default the first of `jax.devices()`.
      owned, copies, compiler_options, settings: as for `Executable`.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    mesh = mesh_of(program.mesh, devices)
    return Executable(
        traced,
        emission.function_of(program, traced, mesh, communication),
        mesh,
        [lowering.spec_of(layout) for layout in program.inputs],
        [lowering.spec_of(layout) for layout in program.outputs],
        donate=donate,
        calls_back=callbacks.calls_back(program.body.instructions),
        owned=owned,
        copies=copies,
        compiler_options=compiler_options,
        settings=settings,
    )


def compiled(executable: AnyExecutable) -> tuple[Any, ...]:
    """The `jax.stages.Compiled` of each executable, in the program's order."""
    if isinstance(executable, PipelineExecutable):
        return tuple(executable.compile())
    return (executable.compiled(),)
