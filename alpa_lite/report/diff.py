"""What two plans do differently: mesh, shardings, collectives, memory, seconds, and what they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite.plan import Leaf, Plan, Stage
from alpa_lite.report import grouping, text, units

_ABSENT = "absent"


def diff(before: Plan, after: Plan) -> str:
    """The differences from `before` to `after`, in at most 100 columns.

    What the plans agree in is left out, planning times are never compared, and two plans without a difference give the
    one line "The plans do not differ."
    """
    parts = (
        ("What they are for", _facts(before, after)),
        ("Belongs to", _ingredients(before, after)),
        ("Shardings", _shardings(before, after)),
        ("Collectives per step", _collectives(before, after)),
        ("Memory per device", _memory(before, after)),
        ("Predicted seconds", _seconds(before, after)),
        ("Decisions", _decisions(before, after)),
        ("Not distributed", _replicated(before, after)),
    )
    sections: list[RenderableType] = [text.section(name, *body) for name, body in parts if body]
    if not sections:
        return "The plans do not differ."
    return text.plain(Group(Text("before -> after", style="bold"), *sections))


def _facts(before: Plan, after: Plan) -> list[RenderableType]:
    facts = (
        ("method", before.method, after.method),
        ("cluster", str(before.cluster), str(after.cluster)),
        ("devices", str(before.num_devices), str(after.num_devices)),
        ("mesh", _meshes(before), _meshes(after)),
        ("micro-batches", str(before.num_microbatches), str(after.num_microbatches)),
        ("schedule", before.schedule, after.schedule),
        ("budget", units.nbytes(before.memory_per_device), units.nbytes(after.memory_per_device)),
    )
    return _changes(facts)


def _meshes(plan: Plan) -> str:
    return "; ".join(units.mesh(stage.mesh_shape, stage.axis_names) for stage in plan.stages)


def _ingredients(before: Plan, after: Plan) -> list[RenderableType]:
    """The fingerprints' ingredients that differ: what makes one plan unfit for the other's program."""
    names = dict.fromkeys((*before.ingredients, *after.ingredients))
    return _changes(
        (name, before.ingredients.get(name, _ABSENT), after.ingredients.get(name, _ABSENT)) for name in names
    )


def _changes(facts: Iterable[tuple[str, str, str]]) -> list[RenderableType]:
    """A table of the facts that differ; nothing where none does."""
    rows = [fact for fact in facts if fact[1] != fact[2]]
    if not rows:
        return []
    out = text.table("", "", wide=1)
    for name, old, new in rows:
        text.add(out, name, f"{old} -> {new}")
    return [out]


def _leaves(plan: Plan) -> dict[str, tuple[Stage, Leaf]]:
    return {leaf.path: (stage, leaf) for stage in plan.stages for leaf in stage.arguments}


def _shardings(before: Plan, after: Plan) -> list[RenderableType]:
    """The arguments that lie otherwise, and those that only one of the plans has."""
    old, new = _leaves(before), _leaves(after)
    sides = {path: _sides(old[path], new[path]) for path in old if path in new}
    changed = [(path, pair) for path, pair in sides.items() if pair[0] != pair[1]]
    out: list[RenderableType] = []
    if changed:
        out += [_changed_leaves(changed), f"{len(changed)} of {len(sides)} arguments that both have lie otherwise"]
    for mine, others, name in ((old, new, "before"), (new, old, "after")):
        alone = Counter(grouping.tokens(path)[0] for path in mine if path not in others)
        out += [f"{root}: {count} leaves, {name} only" for root, count in alone.items()]
    return out


def _changed_leaves(changed: list[tuple[str, tuple[str, str]]]) -> RenderableType:
    sides = dict(changed)
    out = text.table("argument", "", "before", "after", wide=0)
    for part in grouping.sections(grouping.group(changed)):
        alone = len(part.rows) == 1
        if not alone:
            text.add(out, grouping.heading(part.prefix), "", "", "", style="bold")
        for row in part.rows:
            name = row.path if alone else f"  {grouping.short(row.tokens[len(part.prefix) :])}"
            old, new = sides[row.members[0]]
            text.add(out, name, f"x {len(row.members)}" if len(row.members) > 1 else "", old, new)
    return out


def _sides(old: tuple[Stage, Leaf], new: tuple[Stage, Leaf]) -> tuple[str, str]:
    """Sharding and bytes per device on both sides, with the type where that differs."""
    types = [f"{text.type_text(leaf)} " for _, leaf in (old, new)]
    if types[0] == types[1]:
        types = ["", ""]
    a, b = (
        f"{kind}{units.spec(leaf.spec)} {units.nbytes(stage.bytes_per_device(leaf))}"
        for kind, (stage, leaf) in zip(types, (old, new), strict=True)
    )
    return a, b


def _collectives(before: Plan, after: Plan) -> list[RenderableType]:
    old, new = _by_kind(before), _by_kind(after)
    if old == new:
        return []
    out = text.table("kind", "axes", "count", "bytes", "seconds", right=(2, 3, 4))
    zero = (0, 0, 0.0)
    for kind, axes in dict.fromkeys((*old, *new)):
        a, b = old.get((kind, axes), zero), new.get((kind, axes), zero)
        cells = _arrow(f"x {a[0]}", f"x {b[0]}"), _arrow(units.nbytes(a[1]), units.nbytes(b[1]))
        if a != b:
            text.add(out, kind, units.axes(axes), *cells, _arrow(units.seconds(a[2]), units.seconds(b[2])))
    return [out]


def _by_kind(plan: Plan) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, float]]:
    """Executions, bytes and seconds per step, by kind and axes."""
    out: dict[tuple[str, tuple[str, ...]], tuple[int, int, float]] = {}
    for c, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        count, size, total = out.get((c.kind, c.axes), (0, 0, 0.0))
        out[c.kind, c.axes] = (count + c.count, size + c.bytes * c.count, total + seconds)
    return out


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} -> {new}"


def _memory(before: Plan, after: Plan) -> list[RenderableType]:
    rows = []
    for kind in ("params", "gradients", "optimizer", "activations", "total"):
        old, new = (max(getattr(stage.memory, kind) for stage in plan.stages) for plan in (before, after))
        if old != new:
            rows.append((kind, units.nbytes(old), units.nbytes(new), _relative(old, new)))
    return _comparison(rows)


def _seconds(before: Plan, after: Plan) -> list[RenderableType]:
    rows = []
    for name, old, new in (
        ("step", before.step_seconds, after.step_seconds),
        ("compute", _sum(before, "compute_seconds"), _sum(after, "compute_seconds")),
        ("communication", _sum(before, "communication_seconds"), _sum(after, "communication_seconds")),
    ):
        if old != new:
            rows.append((name, units.seconds(old), units.seconds(new), _relative(old, new)))
    return _comparison(rows)


def _sum(plan: Plan, name: str) -> float:
    return sum(getattr(stage, name) for stage in plan.stages)


def _comparison(rows: list[tuple[str, str, str, str]]) -> list[RenderableType]:
    if not rows:
        return []
    out = text.table("", "before", "after", "", right=(1, 2, 3))
    for row in rows:
        text.add(out, *row)
    return [out]


def _relative(old: float, new: float) -> str:
    """The change in percent of `old`, such as "+12 %"."""
    if old == 0:
        return ""
    change = 100 * (new - old) / old
    return f"{change:+.0f} %" if abs(change) >= 0.5 else f"{change:+.2g} %"


def _decisions(before: Plan, after: Plan) -> list[RenderableType]:
    """How many operations are decided otherwise; the arguments among them stand under shardings."""
    old = {d.key: d for d in before.decisions if not d.paths}
    new = {d.key: d for d in after.decisions if not d.paths}
    both = [key for key in old if key in new and old[key].strategy != new[key].strategy]
    lines: list[RenderableType] = []
    if both:
        out = text.table("operation", "where", "before", "after", wide=1)
        for key in both[:12]:
            text.add(out, old[key].name, old[key].where, _strategy(old[key].strategy), _strategy(new[key].strategy))
        lines.append(out)
        if len(both) > 12:
            lines.append(f"and {len(both) - 12} more")
    for count, plan in ((len(old.keys() - new.keys()), "before"), (len(new.keys() - old.keys()), "after")):
        if count:
            lines.append(f"{count} operations are in the plan {plan} only")
    return lines


def _strategy(strategy: tuple[tuple[str, ...], ...]) -> str:
    """The axes of each factor, such as "data - - model"."""
    return " ".join("+".join(axes) or "-" for axes in strategy)


def _replicated(before: Plan, after: Plan) -> list[RenderableType]:
    old, new = ({(r.name, r.where): r.reason for r in plan.replicated} for plan in (before, after))
    return [
        f"{name} at {where}: {_arrow(old.get((name, where), 'not listed'), new.get((name, where), 'not listed'))}"
        for name, where in dict.fromkeys((*old, *new))
        if old.get((name, where)) != new.get((name, where))
    ]
