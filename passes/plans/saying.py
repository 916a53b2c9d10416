"""Notes on the user's shardings: one for each kind, read from the planned stages, with the reason if it is not met."""

from __future__ import annotations

from collections.abc import Iterator

from alpa_lite import _jax
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.ir.paths import shown
from alpa_lite.passes.ir.primitives import CONSTRAINT
from alpa_lite.passes.lowering.program import computes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.space import fits
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.plan.pins import Wish, Wishes

MOST = 12
"""The most notes; the others are counted."""


def constraint_notes(staged: Staged, wishes: Wishes) -> tuple[str, ...]:
    """Returns notes on the step's own constraints, and on annotations and arrays: applied, or the reason why not.

    Entries of `Manual` are the method of the plan, and need no note.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for stage in staged.stages:
        for path, what, why in (*_of_values(stage), *_of_arguments(stage, wishes)):
            found.setdefault((what, why), []).append(shown(path))
    notes = []
    for (what, why), paths in found.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        times = f" ({len(paths)} times)" if len(paths) > 1 and not paths[0] else ""
        of = f" on {paths[0]}{more}" if paths[0] else ""
        notes.append(f"{what}{of}: {why or 'applied'}{times}")
    more = len(notes) - MOST
    return (*notes[:MOST], f"{more} more of the user's shardings") if more > 0 else tuple(notes)


def _of_values(stage: PlannedStage) -> Iterator[tuple[str, str, str]]:
    """Yields ("", the user's constraint, the reason why it is not applied or "") of each constraint on a value."""
    values, mesh = stage.graph.traced.graph.values, stage.program.mesh
    for item in (item for item in computes(stage.program.body.instructions) if item.op.name == CONSTRAINT):
        op = item.op
        wish = Wish(op.params["dims"], op.params["why"])
        shape = values[op.results[0]].shape
        why = fits(wish, shape, mesh) or ("" if _fulfils(item.form.results[0], wish, mesh) else "not applied")
        where = _jax.source_line(op.source)
        yield "", f"{wish.why} at {where} fixes {list(shape)} to {_spec(wish.dims)}", why and f"not applied: {why}"


def _of_arguments(stage: PlannedStage, wishes: Wishes) -> Iterator[tuple[str, str, str]]:
    """Yields (path, the user's constraint, the reason why it is not applied or "") of each annotated argument."""
    traced, mesh = stage.graph.traced, stage.program.mesh
    inputs = zip(traced.arguments, stage.program.inputs, traced.graph.block.inputs, strict=False)
    for argument, layout, value in inputs:
        wish = wishes.leaf(argument.path)
        if wish is None or wishes.names_leaf(argument.path):
            continue
        why = fits(wish, traced.graph.values[value].shape, mesh)
        if why is None and not _fulfils(layout, wish, mesh):
            why = f"the plan has {layout}"
        yield argument.path, wish.why, f"not applied: {why}" if why else ""


def _fulfils(layout: Layout, wish: Wish, mesh: LogicalMesh) -> bool:
    """Returns whether a layout has the axes that a constraint requires."""
    real = [None if axes is None else tuple(a for a in axes if mesh.axis_size(a) > 1) for axes in wish.dims]
    return all(axes is None or axes == have for axes, have in zip(real, layout.dims, strict=False))


def _spec(dims: tuple[Axes | None, ...]) -> str:
    """The axes of dims, as a PartitionSpec prints them, a free dim as UNCONSTRAINED."""
    entries = ("UNCONSTRAINED" if a is None else "None" if not a else repr(a[0] if len(a) == 1 else a) for a in dims)
    return f"P({', '.join(entries)})"
