"""Notes on the user's shardings: one for each kind, read from the planned stages, with the reason if it is not met."""

from __future__ import annotations

from collections.abc import Iterator

from alpa_lite import _jax
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.ir.paths import format_path
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
        mesh = stage.program.mesh
        for path, what, wish, shape, layout in (*_of_values(stage), *_of_arguments(stage, wishes)):
            why = fits(wish, shape, mesh) or ("" if _fulfils(layout, wish, mesh) else f"the plan has {layout}")
            found.setdefault((what, why), []).append(format_path(path))
    notes = []
    for (what, why), paths in found.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        times = f" ({len(paths)} times)" if len(paths) > 1 and not paths[0] else ""
        of = f" on {paths[0]}{more}" if paths[0] else ""
        notes.append(f"{what}{of}: {f'not applied: {why}' if why else 'applied'}{times}")
    more = len(notes) - MOST
    return (*notes[:MOST], f"{more} more of the user's shardings") if more > 0 else tuple(notes)


_Said = tuple[str, str, Wish, tuple[int, ...], Layout]
"""A constraint of the user: the argument's path, if it is on one; how it is called; what it fixes; the shape and the
layout of its value in the plan."""


def _of_values(stage: PlannedStage) -> Iterator[_Said]:
    """Yields the constraints on values."""
    for item in (item for item in computes(stage.program.body.instructions) if item.op.name == CONSTRAINT):
        op = item.op
        wish, shape = Wish(op.params["dims"], op.params["why"]), stage.graph.traced.graph.values[op.results[0]].shape
        what = f"{wish.why} at {_jax.source_line(op.source)} fixes {list(shape)} to {_spec(wish.dims)}"
        yield "", what, wish, shape, item.form.results[0]


def _of_arguments(stage: PlannedStage, wishes: Wishes) -> Iterator[_Said]:
    """Yields the constraints on annotated arguments."""
    traced = stage.graph.traced
    inputs = zip(traced.arguments, stage.program.inputs, traced.graph.block.inputs, strict=False)
    for argument, layout, value in inputs:
        wish = wishes.leaf(argument.path)
        if wish is not None and not wishes.names_leaf(argument.path):
            yield argument.path, wish.why, wish, traced.graph.values[value].shape, layout


def _fulfils(layout: Layout, wish: Wish, mesh: LogicalMesh) -> bool:
    """Returns whether a layout has the axes that a constraint requires."""
    real = [None if axes is None else tuple(a for a in axes if mesh.axis_size(a) > 1) for axes in wish.dims]
    return all(axes is None or axes == have for axes, have in zip(real, layout.dims, strict=False))


def _spec(dims: tuple[Axes | None, ...]) -> str:
    """Returns the axes of dims, as a PartitionSpec prints them, a free dim as UNCONSTRAINED."""
    entries = ("UNCONSTRAINED" if a is None else "None" if not a else repr(a[0] if len(a) == 1 else a) for a in dims)
    return f"P({', '.join(entries)})"
