"""The differences between two plans: mesh, shardings, collectives, memory, times, and the program they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from rich.text import Text

from alpa_lite.ir import units
from alpa_lite.ir.paths import tokens
from alpa_lite.plan.decisions import Decision
from alpa_lite.plan.records import Leaf
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import console, grouping, stages
from alpa_lite.report.sections import type_text
from alpa_lite.report.tables import Block, Column, Section, Table, tree

_MAX_DECISIONS = 12


def diff(before: Plan, after: Plan) -> str:
    """Returns the differences from `before` to `after`, in at most 100 columns.

    Everything equal is left out, planning times are never compared, and two plans without a difference give the one
    line "The plans do not differ."
    """
    parts: dict[str, Iterator[Block]] = {
        "Settings": _changes(_settings(before), _settings(after)),
        "Program and versions": _changes(before.ingredients, after.ingredients),
        "Shardings": _shardings(before, after),
        "Collectives per step": _collectives(before, after),
        "Memory per device": _amounts(_memory(before), _memory(after), units.nbytes),
        "Predicted times": _amounts(_seconds(before), _seconds(after), units.seconds),
        "Decisions": _decisions(before, after),
        "Not distributed": _replicated(before, after),
    }
    bodies = {name: tuple(b for b in blocks if not isinstance(b, Table) or b.rows) for name, blocks in parts.items()}
    sections = [Section("", name, body) for name, body in bodies.items() if body]
    if not sections:
        return "The plans do not differ."
    return console.render_plain(console.render([Text("before -> after", style="bold"), *sections]))


def _differing(old: Mapping[Any, Any], new: Mapping[Any, Any], missing: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Returns the keys whose values differ, with both values."""
    pairs = ((key, old.get(key, missing), new.get(key, missing)) for key in {**old, **new})
    return ((key, a, b) for key, a, b in pairs if a != b)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Block]:
    """Yields a table of the facts that differ."""
    rows = ((name, f"{old} -> {new}") for name, old, new in _differing(before, after, "absent"))
    yield Table.from_items((Column(), Column(is_wide=True)), rows)


def _amounts(before: Mapping[str, float], after: Mapping[str, float], text: units.Format) -> Iterator[Block]:
    """Yields a table of the amounts that differ, with the change in percent."""

    def relative(row: tuple[str, float | None, float | None]) -> str:
        _, old, new = row
        if not old or new is None:
            return ""
        change = 100 * (new - old) / old
        return f"{change:+.0f} %" if abs(change) >= 0.5 else f"{change:+.2g} %"

    sides = Column("before", itemgetter(1), text), Column("after", itemgetter(2), text)
    columns = Column("", itemgetter(0)), *sides, Column("", relative, str)
    yield Table.from_items(columns, _differing(before, after, None))


def _settings(plan: Plan) -> dict[str, str]:
    remat = plan.division.remat
    return {
        "method": plan.method,
        "cluster": str(plan.cluster),
        "devices": str(plan.num_devices),
        "stages": str(plan.num_stages),
        "layers by stage": stages.layer_ranges(plan),
        "mesh": stages.meshes(plan),
        "micro-batches": str(plan.num_microbatches),
        "schedule": plan.schedule,
        "rematerialisation": remat[0] if len(set(remat)) == 1 else stages.join_equal_stages(remat),
        "memory budget": units.nbytes(plan.memory_per_device),
    }


@dataclass(frozen=True)
class _Placed:
    """An argument, its bytes on a device of its first stage, and its stages if the plan has several."""

    leaf: Leaf
    size: int
    stages: tuple[int, ...]

    def text(self, typed: bool = True, placed: bool = False) -> str:
        """Sharding and bytes per device, after the type, and the stages."""
        where = f"{stages.name_stages(self.stages)}: " if placed and self.stages else ""
        kind = f"{type_text(self.leaf)} " if typed else ""
        return f"{where}{kind}{units.spec(self.leaf.spec)} {units.nbytes(self.size)}"


def _leaves(plan: Plan) -> dict[str, _Placed]:
    """Returns the arguments by path. One that several stages hold is shown with the sharding of the first of them."""
    sites = ((leaf, number) for number, stage in enumerate(plan.stages) for leaf in stage.arguments)
    out = {}
    for path, ((leaf, first), *others) in grouping.group_by_key(sites, lambda site: site[0].path).items():
        numbers = (first, *(number for _, number in others)) if len(plan.stages) > 1 else ()
        out[path] = _Placed(leaf, plan.stages[first].bytes_per_device(leaf), numbers)
    return out


def _shardings(before: Plan, after: Plan) -> Iterator[Block]:
    """Yields the arguments whose sharding differs, and the arguments that only one of the plans has."""
    old, new = _leaves(before), _leaves(after)
    pairs = {path: (old[path], new[path]) for path in old if path in new}
    changed = {path: (a, b) for path, (a, b) in pairs.items() if a.text() != b.text()}
    moved = sum(a.stages != b.stages for path, (a, b) in pairs.items() if path not in changed)
    of = f"of the {len(pairs)} arguments in both plans"
    if changed:
        yield _changed_leaves(changed)
        yield f"{len(changed)} {of} are sharded differently"
    if moved:
        yield f"{moved} {of} moved to other stages with the same sharding"
    for own, others, name in ((old, new, "before"), (new, old, "after")):
        alone = Counter(tokens(path)[0] for path in own if path not in others)
        for root, count in alone.items():
            yield f"{root}: {count} {'leaf' if count == 1 else 'leaves'} only in the '{name}' plan"


def _changed_leaves(changed: dict[str, tuple[_Placed, _Placed]]) -> Table:
    """A row for all arguments with the same change of sharding; types and stages are shown where they differ."""

    def sides(row: grouping.Row) -> tuple[str, str]:
        alike = [list(same) for same in zip(*(changed[path] for path in row.members), strict=True)]
        numbers = [tuple(sorted({stage for placed in same for stage in placed.stages})) for same in alike]
        old, new = (replace(same[0], stages=all_of) for same, all_of in zip(alike, numbers, strict=True))
        shown = type_text(old.leaf) != type_text(new.leaf), old.stages != new.stages
        return old.text(*shown), new.text(*shown)

    columns = (
        Column("argument", attrgetter("path"), is_wide=True),
        Column("", lambda row: len(row.members) if len(row.members) > 1 else None, units.times),
        Column("before", lambda row: sides(row)[0]),
        Column("after", lambda row: sides(row)[1]),
    )
    rows = grouping.group((path, (old.text(), new.text())) for path, (old, new) in changed.items())
    return Table(columns, tuple(tree(columns, rows)))


def _collectives(before: Plan, after: Plan) -> Iterator[Block]:
    """Yields a table of the kinds and axes whose executions, bytes or seconds per step differ."""

    def by_kind(plan: Plan) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, float]]:
        found = grouping.group_by_key(plan.priced_collectives, lambda item: (item[0].kind, item[0].axes))
        return {
            key: (sum(c.count for c, _ in same), sum(c.bytes * c.count for c, _ in same), sum(s for _, s in same))
            for key, same in found.items()
        }

    def cell(at: int, text: units.Format, row: tuple[Any, ...]) -> str:
        old, new = text(row[1][at]), text(row[2][at])
        return old if old == new else f"{old} -> {new}"

    formats = {"count": units.times, "total size": units.nbytes, "total time": units.seconds}
    columns = Column("kind"), Column("axes"), *(Column(name, format=str) for name in formats)
    rows = (
        (*(key[0], units.axes(key[1])), *(cell(n, text, (key, old, new)) for n, text in enumerate(formats.values())))
        for key, old, new in _differing(by_kind(before), by_kind(after), (0, 0, 0.0))
    )
    yield Table.from_items(columns, rows)


def _memory(plan: Plan) -> dict[str, float]:
    """Returns bytes of the fullest device of each kind of memory."""
    uses = stages.memory(plan)
    names = dict.fromkeys(name for use in uses for name, _ in use.kinds)
    largest = {name: max(dict(use.kinds).get(name, 0) for use in uses) for name in names}
    return {**largest, "total": max(use.peak for use in uses)}


def _seconds(plan: Plan) -> dict[str, float]:
    """Returns seconds of the step, and where they go: means over devices."""
    where = stages.seconds_by_use(plan)
    waiting = sum(where.communication.values())
    return {"step": plan.step_seconds, "compute": where.compute, "communication": waiting, "idle": where.idle}


def _decisions(before: Plan, after: Plan) -> Iterator[Block]:
    """Yields the operations whose strategy differs; decisions about arguments are among the shardings."""

    def operations(plan: Plan) -> dict[tuple[int, str], Decision]:
        apart = len(before.stages) == len(after.stages)
        found = [
            (number * apart, d) for number, stage in enumerate(plan.stages) for d in stage.decisions if not d.paths
        ]
        return {(number, decision.key): decision for number, decision in reversed(found)}

    def strategy(decision: Decision) -> str:
        return " ".join("+".join(axes) or "-" for axes in decision.strategy)

    old, new = operations(before), operations(after)
    columns = Column("operation"), Column("where", is_wide=True), Column("before"), Column("after")
    both = [(old[key], new[key]) for key in reversed(old) if key in new and old[key].strategy != new[key].strategy]
    rows = [(a.name, a.where, strategy(a), strategy(b)) for a, b in both]
    yield Table.from_items(columns, rows, _MAX_DECISIONS, "and {} more")
    for count, name in ((len(old.keys() - new.keys()), "before"), (len(new.keys() - old.keys()), "after")):
        if count:
            yield f"{units.count_of(count, 'operation')} only in the '{name}' plan"


def _replicated(before: Plan, after: Plan) -> Iterator[Block]:
    old, new = (
        {f"{r.name} at {r.where}": r.reason for r in stages.replicated_operations(plan)} for plan in (before, after)
    )
    return (f"{row}: {a} -> {b}" for row, a, b in _differing(old, new, "not listed"))
