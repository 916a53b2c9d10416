"""The differences between two plans: mesh, shardings, collectives, memory, times, and the program they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rich.text import Text

from alpa_lite.paths import tokens
from alpa_lite.records import Decision, Leaf, Stage
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import console, grouping, stages, units
from alpa_lite.report.sections import type_text
from alpa_lite.report.tables import Block, Column, Row, Section, Table, tree

_MAX_DECISIONS = 12


def diff(before: Plan, after: Plan) -> str:
    """The differences from `before` to `after`, in at most 100 columns.

    Everything equal is left out, planning times are never compared, and two plans without a difference give the one
    line "The plans do not differ."
    """
    parts: dict[str, list[Block]] = {
        "Settings": _changes(_settings(before), _settings(after)),
        "Program and versions": _changes(before.ingredients, after.ingredients),
        "Shardings": _shardings(before, after),
        "Collectives per step": _collectives(before, after),
        "Memory per device": _amounts(_memory(before), _memory(after), units.nbytes),
        "Predicted times": _amounts(_seconds(before), _seconds(after), units.seconds),
        "Decisions": _decisions(before, after),
        "Not distributed": _replicated(before, after),
    }
    sections = [Section("", name, tuple(body)) for name, body in parts.items() if body]
    if not sections:
        return "The plans do not differ."
    return console.plain(console.render([Text("before -> after", style="bold"), *sections]))


def _settings(plan: Plan) -> dict[str, str]:
    return {
        "method": plan.method,
        "cluster": str(plan.cluster),
        "devices": str(plan.num_devices),
        "stages": str(plan.num_stages),
        "layers by stage": stages.layer_ranges(plan),
        "mesh": stages.meshes(plan),
        "micro-batches": str(plan.num_microbatches),
        "schedule": plan.schedule,
        "rematerialisation": _remat(plan),
        "memory budget": units.nbytes(plan.memory_per_device),
    }


def _remat(plan: Plan) -> str:
    """Rematerialisation by stages; one answer stands for all stages."""
    remat = plan.division.remat
    return remat[0] if len(set(remat)) == 1 else stages.by_stages(remat)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[Block]:
    """A table of the facts that differ; nothing if all are equal."""
    pairs = {name: (before.get(name, "absent"), after.get(name, "absent")) for name in {**before, **after}}
    rows = tuple(Row((name, f"{old} -> {new}")) for name, (old, new) in pairs.items() if old != new)
    return [Table((Column(), Column(wide=True)), rows)] if rows else []


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
        kind = f"{type_text(self.leaf)} " if self.typed else ""
        return f"{where}{kind}{units.spec(self.leaf.spec)} {units.nbytes(self.stage.bytes_per_device(self.leaf))}"

    def sharding(self) -> str:
        """`text`, whatever the stages."""
        return replace(self, stages=()).text()


def _leaves(plan: Plan) -> dict[str, _Placed]:
    """The arguments by path. One that several stages hold is shown with the sharding of the first of them."""
    out: dict[str, _Placed] = {}
    for number, stage in enumerate(plan.stages):
        numbers = (number,) if len(plan.stages) > 1 else ()
        for leaf in stage.arguments:
            placed = out.get(leaf.path, _Placed((), stage, leaf))
            out[leaf.path] = replace(placed, stages=(*placed.stages, *numbers))
    return out


def _shardings(before: Plan, after: Plan) -> list[Block]:
    """The arguments whose sharding differs, and the arguments that only one of the plans has."""
    old, new = _leaves(before), _leaves(after)
    pairs = {path: (old[path], new[path]) for path in old if path in new}
    changed = {path: (a, b) for path, (a, b) in pairs.items() if a.sharding() != b.sharding()}
    moved = sum(a.stages != b.stages for path, (a, b) in pairs.items() if path not in changed)
    out: list[Block] = []
    if changed:
        out.append(_changed_leaves(changed))
        out.append(f"{len(changed)} of the {len(pairs)} arguments in both plans are sharded differently")
    if moved:
        out.append(f"{moved} of the {len(pairs)} arguments in both plans moved to other stages with the same sharding")
    for own, others, name in ((old, new, "before"), (new, old, "after")):
        alone = Counter(tokens(path)[0] for path in own if path not in others)
        out += [
            f"{root}: {count} {'leaf' if count == 1 else 'leaves'} only in the '{name}' plan"
            for root, count in alone.items()
        ]
    return out


def _changed_leaves(changed: dict[str, tuple[_Placed, _Placed]]) -> Table:
    """A row for all arguments with the same change of sharding, whatever their stages."""

    def cells(row: grouping.Row) -> tuple[int | str | None, ...]:
        sides = zip(*(changed[path] for path in row.members), strict=True)
        count = len(row.members) if len(row.members) > 1 else None
        return count, *_texts(*map(_everywhere, sides))

    items = ((path, (old.sharding(), new.sharding())) for path, (old, new) in changed.items())
    columns = Column("argument", wide=True), Column("", units.times), Column("before"), Column("after")
    return Table(columns, tuple(tree(grouping.group(items), cells, lambda _: (None, "", ""))))


def _everywhere(same: Iterable[_Placed]) -> _Placed:
    """Arguments with the same sharding as one, on the stages of all."""
    rows = list(same)
    return replace(rows[0], stages=tuple(sorted({stage for row in rows for stage in row.stages})))


def _texts(old: _Placed, new: _Placed) -> tuple[str, str]:
    """Sharding and bytes per device on both sides, with the type and the stages where those differ."""
    if type_text(old.leaf) == type_text(new.leaf):
        old, new = replace(old, typed=False), replace(new, typed=False)
    if old.stages == new.stages:
        old, new = replace(old, stages=()), replace(new, stages=())
    return old.text(), new.text()


def _collectives(before: Plan, after: Plan) -> list[Block]:
    old, new = _by_kind(before), _by_kind(after)
    rows = []
    texts: tuple[units.Format, ...] = units.times, units.nbytes, units.seconds
    for key in old | new:
        sides = [map(_call, texts, plan.get(key, (0, 0, 0.0))) for plan in (old, new)]
        if old.get(key) != new.get(key):
            rows.append(Row((key[0], units.axes(key[1]), *map(_arrow, *sides))))
    numbers = (Column(name, str) for name in ("count", "total size", "total time"))
    return [Table((Column("kind"), Column("axes"), *numbers), tuple(rows))] if rows else []


def _by_kind(plan: Plan) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, float]]:
    """Executions, bytes and seconds per step, by kind and axes."""
    out: dict[tuple[str, tuple[str, ...]], tuple[int, int, float]] = {}
    for c, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        count, size, total = out.get((c.kind, c.axes), (0, 0, 0.0))
        out[c.kind, c.axes] = (count + c.count, size + c.bytes * c.count, total + seconds)
    return out


def _call(text: units.Format, value: float) -> str:
    return text(value)


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} -> {new}"


def _memory(plan: Plan) -> dict[str, float]:
    """Bytes of the fullest device of each kind of memory."""
    largest: dict[str, float] = {}
    for use in stages.memory(plan):
        for name, size in (*use.kinds, ("total", use.peak)):
            largest[name] = max(size, largest.pop(name, 0) if name == "total" else largest.get(name, 0))
    return largest


def _seconds(plan: Plan) -> dict[str, float]:
    """Seconds of the step, and where they go: means over devices."""
    where = stages.spent(plan)
    waiting = sum(where.communication.values())
    return {"step": plan.step_seconds, "compute": where.compute, "communication": waiting, "idle": where.idle}


def _amounts(before: Mapping[str, float], after: Mapping[str, float], text: units.Format) -> list[Block]:
    """A table of the amounts that differ, with the change in percent."""
    rows = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old != new:
            rows.append(Row((name, old, new, "" if old is None or new is None else _relative(old, new))))
    columns = Column(), Column("before", text), Column("after", text), Column("", str)
    return [Table(columns, tuple(rows))] if rows else []


def _relative(old: float, new: float) -> str:
    """The change in percent of `old`, such as "+12 %"."""
    if old == 0:
        return ""
    change = 100 * (new - old) / old
    return f"{change:+.0f} %" if abs(change) >= 0.5 else f"{change:+.2g} %"


def _decisions(before: Plan, after: Plan) -> list[Block]:
    """The operations whose strategy differs; decisions about arguments are among the shardings."""
    apart = len(before.stages) == len(after.stages)
    old, new = _operations(before, apart), _operations(after, apart)
    both = [(old[key], new[key]) for key in old if key in new and old[key].strategy != new[key].strategy]
    lines: list[Block] = []
    if both:
        columns = Column("operation"), Column("where", wide=True), Column("before"), Column("after")
        rows = (Row((a.name, a.where, _strategy(a), _strategy(b))) for a, b in both[:_MAX_DECISIONS])
        lines.append(Table(columns, tuple(rows)))
        if len(both) > _MAX_DECISIONS:
            lines.append(f"and {len(both) - _MAX_DECISIONS} more")
    for count, plan in ((len(old.keys() - new.keys()), "before"), (len(new.keys() - old.keys()), "after")):
        if count:
            lines.append(f"{units.plural(count, 'operation')} only in the '{plan}' plan")
    return lines


def _operations(plan: Plan, apart: bool) -> dict[tuple[int, str], Decision]:
    """The decisions on operations by stage and key; by key alone unless stages are kept `apart`."""
    out: dict[tuple[int, str], Decision] = {}
    for number, stage in enumerate(plan.stages):
        for decision in stage.decisions:
            if not decision.paths:
                out.setdefault((number if apart else 0, decision.key), decision)
    return out


def _strategy(decision: Decision) -> str:
    """The axes of each factor, such as "data - - model"."""
    return " ".join("+".join(axes) or "-" for axes in decision.strategy)


def _replicated(before: Plan, after: Plan) -> list[Block]:
    old, new = ({f"{r.name} at {r.where}": r.reason for r in stages.replicated(plan)} for plan in (before, after))
    reasons = {row: (old.get(row, "not listed"), new.get(row, "not listed")) for row in old | new}
    return [f"{row}: {a} -> {b}" for row, (a, b) in reasons.items() if a != b]
