"""Reasons for a sharding: the alternatives, the cost of the whole step with each, and what would have to change
(`report.break_even`).

In a pipeline each stage was sharded as a separate step (`Stage.decisions`). Its seconds are then those of the stage,
for all micro-batches one after another, and stages with identical explanations share one.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from alpa_lite.errors import PlanError
from alpa_lite.ir import paths, units
from alpa_lite.plan.decisions import Alternative, Decision, Replicated
from alpa_lite.plan.figures import OpCost
from alpa_lite.plan.records import Leaf, Stage
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import break_even, console, grouping, operations, prose, stages
from alpa_lite.report.sections import type_text
from alpa_lite.report.tables import Column, Nested, Section, Table

_LISTED = 20
_RANGE = re.compile(r"\\\{(.*?)\\\}")
_STAGES = re.compile(r"(.*?)\s*\(stages? ([\d, -]+)\)\s*", re.DOTALL)


def explain(plan: Plan, name: str) -> str:
    """Explains the sharding of the named argument or operation, in at most 100 columns.

    One match is explained, and the others are listed after it. A name is tried as each of these in turn, and the first
    that matches anything decides:

    1. the whole path of an argument, in either notation (`alpa_lite.ir.paths`);
    2. the last keys of a path: `mlp/up/kernel`;
    3. the same without indices: `layers/mlp/up/kernel` for `layers/3/mlp/up/kernel`, `h/mlp/up/kernel` for `h_3/...`;
    4. the name or the key of an operation;
    5. a part of an operation's name, source line or scope, in upper or lower case; for operations without a
       decision in the plan, such as those that a textbook method fixes, it reports their seconds.

    In a path, `{0-11}` stands for any number and `{q,k}` for any of the names, as the printout writes them. After any
    name, ` (stage 1)` or ` (stages 0-3)` leaves out the other stages of a pipeline.

    Among several matches, one with alternatives is explained before one without; then an argument with fewer keys in
    its path (a parameter before its optimizer moments), and an operation that costs more seconds; then the first in the
    plan. Layers that share one decision, and stages with the same explanation, are one match.

    Args:
      plan: the plan.
      name: as above.

    Raises:
      PlanError: if nothing has that name; the message holds close matches.
    """
    match = _STAGES.fullmatch(name)
    wanted, numbers = (match[1], _numbers(match[2])) if match else (name, None)
    sites = [site for site in enumerate(plan.stages) if numbers is None or site[0] in numbers]
    subjects = list(_of_leaves(sites, wanted)) or _of_operations(sites, wanted)
    if not subjects:
        raise PlanError(_unknown(plan, name))
    first = min(subjects, key=_rank)
    same = _identical(plan, first, subjects)
    sections = _explanation(plan, first, f"{_title(same)}{_stages(plan, same)}")
    if rest := [subject for subject in subjects if subject not in same]:
        sections.append(_others(plan, name, rest))
    return console.render_plain(console.render(sections))


_Sites = Sequence[tuple[int, Stage]]
"""Stages with their numbers."""


@dataclass(frozen=True, eq=False)
class _Subject:
    """A match in a stage: an argument or several that are sharded together, or an operation.

    Attributes:
      names: the stored paths of the arguments, or the operation's name.
      number, stage: the stage.
      record: the decision; or what is not distributed; or what all operations of the name take at a place, where the
        plan had nothing to decide about them.
      leaf: of the arguments, the one that was asked for.
    """

    names: tuple[str, ...]
    number: int
    stage: Stage
    record: Decision | Replicated | OpCost | None = None
    leaf: Leaf | None = None

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The chosen alternative and the others; none where the plan has no others."""
        record = self.record
        if not isinstance(record, Decision) or record.chosen_alternative is None or len(record.alternatives) < 2:
            return ()
        return record.alternatives

    @property
    def where(self) -> str:
        """The source line and scope of an operation."""
        return self.record.where if self.record else ""


def _numbers(text: str) -> set[int]:
    """Returns the numbers in a list of stages such as "0, 2-4"."""
    ends = [tuple(map(int, re.findall(r"\d+", part))) for part in text.split(",")]
    return {number for pair in ends if pair for number in range(pair[0], pair[-1] + 1)}


def _find(name: str, known: Iterable[str]) -> set[str]:
    """Returns the stored paths that are meant, by the first of the rules of `explain` that matches any."""
    shown = {path: paths.format_path(path) for path in known}
    found, forms = set(paths.find(name, shown)), [form for form in paths.spellings(name) if form]
    for indices in ("", r"(?:/[0-9]+)*"):
        pattern = "|".join(rf"(?:^|/){_pattern(form, indices)}(?:\[\d+:\d+\])?$" for form in forms) or "(?!)"
        found = found or {path for path, text in shown.items() if re.search(pattern, text)}  # or a part of one
    return found


def _pattern(form: str, indices: str) -> str:
    """A regular expression for the keys of a printed path; `{0-11}` matches any number, `{q,k}` any of the names.

    indices: may follow each key; a key that does not end with a number may then be followed by one: `_3` or `3`.
    """

    def choices(match: re.Match[str]) -> str:
        """Any of the names in braces."""
        inner = match.group(1)
        return r"\d+" if re.fullmatch(r"\d+(-|\\.\\.)\d+", inner) else f"(?:{inner.replace(',', '|')})"

    def pattern(key: str) -> str:
        """That of one key."""
        number = "(?:_?[0-9]+)?" if indices and not key[-1:].isdigit() else ""
        return _RANGE.sub(choices, re.escape(key).replace(r"\-", "-")) + number + indices

    return "/".join(map(pattern, form.split("/")))


def _rank(subject: _Subject) -> tuple[bool, int, float]:
    """Less for the match to be explained; see `explain`."""
    settled, record = not subject.alternatives, subject.record
    if subject.leaf:
        return settled, len(paths.tokens(subject.leaf.path)), 0.0
    return settled, 0, -(record.total if isinstance(record, OpCost) else record.seconds if record else 0.0)


def _identical(plan: Plan, first: _Subject, subjects: list[_Subject]) -> list[_Subject]:
    """Returns the matches in other stages that differ from `first` in numbers of their names alone, and it itself."""

    def form(subject: _Subject) -> str:
        return re.sub(r"\d+", "#", subject.names[0])

    def text(subject: _Subject) -> str:
        return console.render_plain(console.render(_explanation(plan, subject)))

    own = text(first)
    return [s for s in subjects if s is first or (form(s) == form(first) and text(s) == own)]


def _stages(plan: Plan, subjects: Sequence[_Subject]) -> str:
    return f" ({stages.name_stages(sorted({s.number for s in subjects}))})" if len(plan.stages) > 1 else ""


def _title(subjects: list[_Subject]) -> str:
    """Returns the names of some matches as one: a range of layers for arguments that are decided together."""
    names = list(dict.fromkeys(name for subject in subjects for name in subject.names))
    if subjects[0].leaf is None:
        return names[0]
    rows = grouping.group((name, None) for name in names)
    own = next(row for row in rows if subjects[0].leaf.path in row.members)
    return own.path if len(rows) == 1 else f"{own.path} and {len(names) - len(own.members)} more"


def _of_leaves(sites: _Sites, name: str) -> Iterator[_Subject]:
    """Yields one subject for each decision that the arguments share, and for identical arguments without a decision."""
    wanted = _find(name, (leaf.path for _, stage in sites for leaf in stage.arguments))
    for number, stage in sites:
        decisions = {path: decision for decision in stage.decisions for path in decision.paths}
        leaves = {leaf.path: leaf for leaf in stage.arguments if leaf.path in wanted}
        decided: dict[str, _Subject] = {}
        for path, leaf in leaves.items():
            if decision := decisions.get(path):
                decided.setdefault(decision.key, _Subject(decision.paths, number, stage, decision, leaf))
        yield from decided.values()
        for row in grouping.group_leaves(leaf for path, leaf in leaves.items() if path not in decisions):
            yield _Subject(row.members, number, stage, leaf=leaves[row.members[0]])


def _of_operations(sites: _Sites, name: str) -> list[_Subject]:
    """Returns operations whose name or key is `name`, else those whose name or place contains it."""
    operations = [_Subject((d.name,), *site, d) for site in sites for d in site[1].decisions if not d.paths]
    operations += [_Subject((r.name,), *site, r) for site in sites for r in site[1].replicated]
    exact = [s for s in operations if name in (s.names[0], getattr(s.record, "key", None))]
    if exact or not name.strip():
        return exact
    spent = [_Subject((s.operation,), *site, s) for site in sites for s in site[1].spending]
    for some in (operations, spent):
        if found := [s for s in some if name.lower() in f"{s.names[0]} {s.where}".lower()]:
            return found
    return []


def _unknown(plan: Plan, name: str) -> str:
    """Returns the message for a name that matches nothing, with up to three close ones."""
    known = [paths.format_path(leaf.path) for stage in plan.stages for leaf in stage.arguments]
    known += [decision.name for decision in plan.decisions if not decision.paths]
    known += [row.name for row in plan.replicated]
    by_form = {item.lower(): item for item in reversed(known)}
    ends = {"/".join(form.split("/")[-n:]): item for form, item in by_form.items() for n in range(1, 5)}
    close = difflib.get_close_matches(paths.spellings(name)[-1].lower(), [*by_form, *ends], n=20, cutoff=0.6)
    items = [by_form.get(form) or ends[form] for form in close]
    alike = grouping.group_by_numbers(items, lambda item: (item, None))
    best = [same[0] for _, same in alike][:3]
    hint = "plan.details() lists the arguments and the operations that are not distributed."
    if best:
        hint = f"Did you mean {' or '.join(best)}?"
    return f"no argument or operation of this plan is called {name!r}. {hint}"


def _others(plan: Plan, name: str, subjects: list[_Subject]) -> Section:
    """Returns the subjects in one table; subjects for which it would show the same are one row."""
    rows = []
    for stage in dict.fromkeys(_stages(plan, [s]) for s in subjects if s.leaf):
        own = {path: s for s in subjects if s.leaf and _stages(plan, [s]) == stage for path in s.names}
        for row in grouping.group((path, _described(s)[0]) for path, s in own.items()):
            first = own[row.members[0]]
            rows.append((first, f"{row.path}{stage}", "", _described(first)[0]))
    rows += [(s, f"{_title([s])}{_stages(plan, [s])}", s.where, _described(s)[0]) for s in subjects if not s.leaf]
    counts = Counter(row[1:] for row in sorted(rows, key=lambda row: _rank(row[0])))
    body = [
        (Nested(title, tuple(line for line in (where, choice) if line)), count if count > 1 else None)
        for (title, where, choice), count in list(counts.items())[:_LISTED]
    ]
    body += [(f"and {len(counts) - _LISTED} more", None)] if len(counts) > _LISTED else []
    heading = f"Other matches of {name.strip()!r} (give more of a name to have it explained)"
    return Section("", heading, (Table.from_items((Column(is_wide=True), Column(format=units.times)), body),))


_STEP = (
    Column("step", attrgetter("step.seconds"), units.seconds),
    Column("compute", attrgetter("step.compute_seconds"), units.seconds),
    Column("communication", attrgetter("step.communication_seconds"), units.seconds),
    Column("sent", attrgetter("step.bytes_sent"), units.nbytes),
    Column("peak", attrgetter("step.bytes_per_device"), units.nbytes),
    Column("fits", lambda a: "yes" if a.fits else "no"),
)
"""The whole step with an alternative."""
_OWN = (
    Column("FLOPs", attrgetter("flops_seconds"), units.seconds),
    Column("bytes", attrgetter("bytes_seconds"), units.seconds),
    Column("reduce", attrgetter("communication_seconds"), units.seconds),
    Column("reshard", attrgetter("transfer_seconds"), units.seconds),
    Column("result", attrgetter("bytes_per_device"), units.nbytes),
)
"""The cost of an alternative itself."""


def _explanation(plan: Plan, subject: _Subject, title: str = "") -> list[Section]:
    """Returns the explanation: lines below the title, and for what has alternatives sections of tables."""
    decision, stage, lines = subject.record, subject.stage, _described(subject)[1]
    if isinstance(decision, Decision) and decision.count > 1:
        kind, count = "arguments" if subject.leaf else "operations", decision.count
        lines.append(f"{count} identical {kind} share this decision; figures are totals over all {count}")
    if (
        not isinstance(decision, Decision)
        or not subject.alternatives
        or (chosen := decision.chosen_alternative) is None
    ):
        if not isinstance(decision, Replicated):
            lines.append("no alternatives: the method fixed this sharding, or there is no other strategy")
        return [Section("", title, tuple(lines))]
    terms = {"FLOPs": chosen.flops_seconds, "bytes": chosen.bytes_seconds, "links": chosen.link_seconds}
    lines.append(f"{operations.terms_text(terms)} per step")
    lines.append(f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}; all times are predictions")
    letters = iter(f"{a}{b}" for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    marks = {id(a): ">" if a is chosen else next(letters) for a in decision.alternatives}
    mark = Column("", lambda a: marks[id(a)])

    def table(*columns: Column) -> Table:
        layout = Column("layout", attrgetter("layout"), is_wide=True)
        return Table.from_items((mark, layout, *columns), decision.alternatives, style=lambda a: "bold" * (a is chosen))

    sizes = {leaf.shape[0] for stage in plan.stages for leaf in stage.arguments if leaf.role == "batch" and leaf.shape}
    examples = sizes.pop() if len(sizes) == 1 else None
    verdict = Column("", lambda other: break_even.verdict(plan, stage, examples, other, chosen), is_wide=True)
    verdicts = Table.from_items((mark, verdict), (other for other in decision.alternatives if other is not chosen))
    of, scaled = "Step time", "no other change to either step"
    if len(plan.stages) > 1:
        of, scaled = "Stage time, micro-batches in sequence,", "for the stage alone, no other change"
    return [
        Section("", title, tuple(lines)),
        Section("", f"{of} if this choice is forced and the others re-optimised", (table(*_STEP),)),
        Section("", "Cost of this choice alone, others unchanged", (table(*_OWN),)),
        Section("", f"What would make another choice win ({scaled})", (verdicts,)),
    ]


def _described(subject: _Subject) -> tuple[str, list[str]]:
    """Returns the sharding of a subject in a few words; and its type and bytes, or its place and seconds, in lines."""
    leaf, stage, record = subject.leaf, subject.stage, subject.record
    if leaf:
        spec = units.spec(leaf.spec)
        return spec, prose.lines("argument", leaf, type_text(leaf), spec, stage.bytes_per_device(leaf))
    if isinstance(record, Decision):
        sharded = [(n, units.axes(axes)) for n, axes in zip(record.factors, record.strategy, strict=True) if axes]
        chosen = record.chosen_alternative
        short = chosen.layout if chosen else prose.sentence("factors", sharded)
        return short, [f"operation at {record.where}: {short}"]
    if isinstance(record, OpCost):
        whole = stage.compute_seconds + stage.communication_seconds
        short, *lines = prose.lines("operations", record, whole, operations.terms_text(record.terms))
        return short, lines
    assert record is not None
    return "not distributed", prose.lines("replicated", record)
