"""The differences between two plans: mesh, shardings, collectives, memory, times, and the program they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite.paths import shown, tokens
from alpa_lite.records import Decision, Leaf, Stage
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import grouping, stages, tables, units

_ABSENT = "absent"


def diff(before: Plan, after: Plan) -> str:
    """The differences from `before` to `after`, in at most 100 columns.

    Everything equal is left out, planning times are never compared, and two plans without a difference give the one
    line "The plans do not differ."
    """
    parts = (
        ("Settings", _facts(before, after)),
        ("Program and versions", _ingredients(before, after)),
        ("Shardings", _shardings(before, after)),
        ("Collectives per step", _collectives(before, after)),
        ("Memory per device", _memory(before, after)),
        ("Predicted times", _seconds(before, after)),
        ("Decisions", _decisions(before, after)),
        ("Not distributed", _replicated(before, after)),
    )
    sections: list[RenderableType] = [tables.section(name, *body) for name, body in parts if body]
    if not sections:
        return "The plans do not differ."
    return tables.plain(Group(Text("before -> after", style="bold"), *sections))


def _facts(before: Plan, after: Plan) -> list[RenderableType]:
    facts = (
        ("method", before.method, after.method),
        ("cluster", str(before.cluster), str(after.cluster)),
        ("devices", str(before.num_devices), str(after.num_devices)),
        ("stages", str(before.num_stages), str(after.num_stages)),
        ("layers by stage", stages.layer_ranges(before), stages.layer_ranges(after)),
        ("mesh", stages.meshes(before), stages.meshes(after)),
        ("micro-batches", str(before.num_microbatches), str(after.num_microbatches)),
        ("schedule", before.schedule, after.schedule),
        ("rematerialisation", _remat(before), _remat(after)),
        ("memory budget", units.nbytes(before.memory_per_device), units.nbytes(after.memory_per_device)),
    )
    return _changes(facts)


def _remat(plan: Plan) -> str:
    """What the backward pass of each stage computes again, stages with the same answer joined."""
    found: dict[str, list[int]] = {}
    for number, what in enumerate(plan.division.remat):
        found.setdefault(what, []).append(number)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{stages.named(numbers)}: {what}" for what, numbers in found.items())


def _ingredients(before: Plan, after: Plan) -> list[RenderableType]:
    """The fingerprints' ingredients that differ: what makes one plan unfit for the other's program."""
    names = dict.fromkeys((*before.ingredients, *after.ingredients))
    return _changes(
        (name, before.ingredients.get(name, _ABSENT), after.ingredients.get(name, _ABSENT)) for name in names
    )


def _changes(facts: Iterable[tuple[str, str, str]]) -> list[RenderableType]:
    """A table of the facts that differ; an empty list if all are equal."""
    rows = [fact for fact in facts if fact[1] != fact[2]]
    if not rows:
        return []
    out = tables.table("", "", wide=1)
    for name, old, new in rows:
        tables.add(out, name, f"{old} -> {new}")
    return [out]


@dataclass(frozen=True)
class _Placed:
    """An argument with its sharding: on which stages, if there are several; and whether its type is printed."""

    stages: tuple[int, ...]
    stage: Stage
    leaf: Leaf
    typed: bool = True

    def text(self) -> str:
        """Stages, type, sharding and bytes per device."""
        where = f"{stages.named(self.stages)}: " if self.stages else ""
        kind = f"{tables.type_text(self.leaf)} " if self.typed else ""
        return f"{where}{kind}{units.spec(self.leaf.spec)} {units.nbytes(self.stage.bytes_per_device(self.leaf))}"


def _leaves(plan: Plan) -> dict[str, _Placed]:
    """The arguments by path. One that several stages hold is shown with the sharding of the first of them."""
    out: dict[str, _Placed] = {}
    for number, stage in enumerate(plan.stages):
        numbers = (number,) if len(plan.stages) > 1 else ()
        for leaf in stage.arguments:
            placed = out.get(leaf.path, _Placed((), stage, leaf))
            out[leaf.path] = replace(placed, stages=(*placed.stages, *numbers))
    return out


def _shardings(before: Plan, after: Plan) -> list[RenderableType]:
    """The arguments whose sharding differs, and the arguments that only one of the plans has."""
    old, new = _leaves(before), _leaves(after)
    pairs = {path: (old[path], new[path]) for path in old if path in new}
    changed = {path: pair for path, pair in pairs.items() if len({replace(p, stages=()).text() for p in pair}) > 1}
    moved = sum(len({placed.stages for placed in pair}) > 1 for path, pair in pairs.items() if path not in changed)
    out: list[RenderableType] = []
    if changed:
        out += [
            _changed_leaves(changed),
            f"{len(changed)} of the {len(pairs)} arguments in both plans are sharded differently",
        ]
    if moved:
        out.append(f"{moved} of the {len(pairs)} arguments in both plans moved to other stages with the same sharding")
    for mine, others, name in ((old, new, "before"), (new, old, "after")):
        alone = Counter(tokens(path)[0] for path in mine if path not in others)
        out += [
            f"{root}: {count} {'leaf' if count == 1 else 'leaves'} only in the '{name}' plan"
            for root, count in alone.items()
        ]
    return out


def _changed_leaves(changed: dict[str, tuple[_Placed, _Placed]]) -> RenderableType:
    """A row for all arguments with the same change of sharding, whatever their stages."""
    out = tables.table("argument", "", "before", "after", wide=0)
    items = [(path, tuple(replace(placed, stages=()).text() for placed in pair)) for path, pair in changed.items()]
    for part in grouping.sections(grouping.group(items)):
        alone = len(part.rows) == 1
        if not alone:
            tables.add(out, grouping.heading(part.prefix), "", "", "", style="bold")
        for row in part.rows:
            name = row.path if alone else f"  {shown(row.tokens[len(part.prefix) :])}"
            pairs = [changed[path] for path in row.members]
            texts = _sides(_everywhere(a for a, _ in pairs), _everywhere(b for _, b in pairs))
            tables.add(out, name, f"x {len(row.members)}" if len(row.members) > 1 else "", *texts)
    return out


def _everywhere(same: Iterable[_Placed]) -> _Placed:
    """Arguments with the same sharding as one, on the stages of all."""
    rows = list(same)
    return replace(rows[0], stages=tuple(sorted({stage for row in rows for stage in row.stages})))


def _sides(old: _Placed, new: _Placed) -> tuple[str, str]:
    """Sharding and bytes per device on both sides, with the type and the stages where those differ."""
    if tables.type_text(old.leaf) == tables.type_text(new.leaf):
        old, new = replace(old, typed=False), replace(new, typed=False)
    if old.stages == new.stages:
        old, new = replace(old, stages=()), replace(new, stages=())
    return old.text(), new.text()


def _collectives(before: Plan, after: Plan) -> list[RenderableType]:
    old, new = _by_kind(before), _by_kind(after)
    if old == new:
        return []
    out = tables.table("kind", "axes", "count", "total size", "total time", right=(2, 3, 4))
    zero = (0, 0, 0.0)
    for kind, axes in dict.fromkeys((*old, *new)):
        a, b = old.get((kind, axes), zero), new.get((kind, axes), zero)
        cells = _arrow(f"x {a[0]}", f"x {b[0]}"), _arrow(units.nbytes(a[1]), units.nbytes(b[1]))
        if a != b:
            tables.add(out, kind, units.axes(axes), *cells, _arrow(units.seconds(a[2]), units.seconds(b[2])))
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
    """The fullest device of each kind of memory."""
    rows = []
    old, new = _peaks(before), _peaks(after)
    for kind in dict.fromkeys((*old, *new)):
        a, b = old.get(kind), new.get(kind)
        if a != b:
            texts = ("" if size is None else units.nbytes(size) for size in (a, b))
            rows.append((kind, *texts, "" if a is None or b is None else _relative(a, b)))
    return _comparison(rows)


def _peaks(plan: Plan) -> dict[str, int]:
    """Bytes by kind; of several stages, buffers between tasks apart from the temporaries of executables."""
    if len(plan.stages) == 1:
        memory = plan.stages[0].memory
        return memory.kinds | {"total": memory.total}
    rows = stages.memory(plan)
    names = dict.fromkeys(name for row in rows for name in row.kinds)
    return {name: max(row.kinds.get(name, 0) for row in rows) for name in names} | {
        "total": max(row.peak for row in rows)
    }


def _seconds(before: Plan, after: Plan) -> list[RenderableType]:
    """Seconds of the step, and where they go: means over devices."""
    old, new = stages.spent(before), stages.spent(after)
    rows = []
    for name, a, b in (
        ("step", before.step_seconds, after.step_seconds),
        ("compute", old.compute, new.compute),
        ("communication", sum(old.communication.values()), sum(new.communication.values())),
        ("idle", old.idle, new.idle),
    ):
        if a != b:
            rows.append((name, units.seconds(a), units.seconds(b), _relative(a, b)))
    return _comparison(rows)


def _comparison(rows: list[tuple[str, str, str, str]]) -> list[RenderableType]:
    if not rows:
        return []
    out = tables.table("", "before", "after", "", right=(1, 2, 3))
    for row in rows:
        tables.add(out, *row)
    return [out]


def _relative(old: float, new: float) -> str:
    """The change in percent of `old`, such as "+12 %"."""
    if old == 0:
        return ""
    change = 100 * (new - old) / old
    return f"{change:+.0f} %" if abs(change) >= 0.5 else f"{change:+.2g} %"


def _decisions(before: Plan, after: Plan) -> list[RenderableType]:
    """The operations whose strategy differs; decisions about arguments are among the shardings."""
    apart = len(before.stages) == len(after.stages)
    old, new = _operations(before, apart), _operations(after, apart)
    both = [key for key in old if key in new and old[key].strategy != new[key].strategy]
    lines: list[RenderableType] = []
    if both:
        out = tables.table("operation", "where", "before", "after", wide=1)
        for key in both[:12]:
            tables.add(out, old[key].name, old[key].where, _strategy(old[key].strategy), _strategy(new[key].strategy))
        lines.append(out)
        if len(both) > 12:
            lines.append(f"and {len(both) - 12} more")
    for count, plan in ((len(old.keys() - new.keys()), "before"), (len(new.keys() - old.keys()), "after")):
        if count:
            lines.append(f"{count} operation{'s' * (count != 1)} only in the '{plan}' plan")
    return lines


def _operations(plan: Plan, apart: bool) -> dict[tuple[int, str], Decision]:
    """The decisions on operations by stage and key; by key alone unless stages are kept `apart`."""
    out: dict[tuple[int, str], Decision] = {}
    for number, stage in enumerate(plan.stages):
        for decision in stage.decisions:
            if not decision.paths:
                out.setdefault((number if apart else 0, decision.key), decision)
    return out


def _strategy(strategy: tuple[tuple[str, ...], ...]) -> str:
    """The axes of each factor, such as "data - - model"."""
    return " ".join("+".join(axes) or "-" for axes in strategy)


def _replicated(before: Plan, after: Plan) -> list[RenderableType]:
    old, new = ({(r.name, r.where): r.reason for r in stages.replicated(plan)} for plan in (before, after))
    return [
        f"{name} at {where}: {_arrow(old.get((name, where), 'not listed'), new.get((name, where), 'not listed'))}"
        for name, where in dict.fromkeys((*old, *new))
        if old.get((name, where)) != new.get((name, where))
    ]
