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
from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite import paths
from alpa_lite.errors import PlanError
from alpa_lite.figures import Spending
from alpa_lite.records import Alternative, Decision, Leaf, Replicated, Stage
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import break_even, computing, console, grouping, stages, units
from alpa_lite.report.sections import type_text
from alpa_lite.report.tables import Block, Column, Nested, Row, Section, Table

_LISTED = 20
_RANGE = re.compile(r"\\\{(.*?)\\\}")
_STAGES = re.compile(r"(.*?)\s*\(stages? ([\d, -]+)\)\s*", re.DOTALL)


def explain(plan: Plan, name: str) -> str:
    """Explains the sharding of the named argument or operation, in at most 100 columns.

    One match is explained, and the others are listed after it. A name is tried as each of these in turn, and the first
    that matches anything decides:

    1. the whole path of an argument, in either notation (`alpa_lite.paths`);
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
    wanted, stages = (match[1], _numbers(match[2])) if match else (name, None)
    sites = [site for site in _sites(plan) if stages is None or site.number in stages]
    leaves = _find_leaves(sites, wanted)
    subjects = _of_leaves(leaves) if leaves else _of_operations(sites, wanted)
    if not subjects:
        raise PlanError(_unknown(_sites(plan), name))
    first = min(subjects, key=_rank)
    same = _identical(first, subjects)
    lines, *sections = _explanation(first)
    rest = [subject for subject in subjects if subject not in same]
    heading = Section("", f"{_title(same)}{_stages(same)}", lines.body)
    return console.plain(console.render([heading, *sections, *([_others(name, rest)] if rest else [])]))


@dataclass(frozen=True, eq=False)
class _Site:
    """A stage with the decisions for it; it has a number if there are several."""

    plan: Plan
    stage: Stage
    number: int | None = None


def _sites(plan: Plan) -> list[_Site]:
    several = len(plan.stages) > 1
    return [_Site(plan, stage, n if several else None) for n, stage in enumerate(plan.stages)]


def _examples(plan: Plan) -> int | None:
    """The number of examples in the batch, where all of it agrees."""
    sizes = {leaf.shape[0] for stage in plan.stages for leaf in stage.arguments if leaf.role == "batch" and leaf.shape}
    return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, eq=False)
class _Subject:
    """A match: an argument or several that are sharded together, an operation, or one that is not distributed.

    Attributes:
      names: the stored paths of the arguments, or the operation's name.
      leaf: of the arguments, the one that was asked for.
      spending: what all operations of the name take at a place, where the plan had nothing to decide about them.
    """

    names: tuple[str, ...]
    site: _Site
    decision: Decision | None = None
    leaf: Leaf | None = None
    replicated: Replicated | None = None
    spending: Spending | None = None

    @property
    def record(self) -> Decision | Replicated | Spending | None:
        """The plan's record of it."""
        return self.decision or self.replicated or self.spending

    @property
    def is_settled(self) -> bool:
        """Whether the plan has no alternatives to it."""
        return self.decision is None or self.decision.chosen is None or len(self.decision.alternatives) < 2

    @property
    def where(self) -> str:
        """The source line and scope of an operation."""
        return self.record.where if self.record else ""


def _numbers(text: str) -> set[int]:
    """The numbers in a list of stages such as "0, 2-4"."""
    ends = [tuple(map(int, re.findall(r"\d+", part))) for part in text.split(",")]
    return {number for pair in ends if pair for number in range(pair[0], pair[-1] + 1)}


def _find_leaves(sites: list[_Site], name: str) -> list[tuple[_Site, Leaf]]:
    """The arguments of that path, by the first of the rules of `explain` that matches any."""
    everything = [(site, leaf) for site in sites for leaf in site.stage.arguments]
    exact = set(paths.find(name, [leaf.path for _, leaf in everything]))
    if exact:
        return [item for item in everything if item[1].path in exact]
    forms = [form for form in paths.spellings(name) if form]
    for keys in (_keys, _keys_without_indices):
        patterns = [re.compile(rf"(?:^|/){keys(form)}(?:\[\d+:\d+\])?$") for form in forms]  # or a part of it
        shown = ((item, paths.shown(item[1].path)) for item in everything)
        found = [item for item, path in shown if any(pattern.search(path) for pattern in patterns)]
        if found:
            return found
    return []


def _keys(form: str) -> str:
    """A regular expression for a printed path; `{0-11}` matches any number, `{q,k}` any of the names."""
    escaped = re.escape(form).replace(r"\-", "-")

    def choices(match: re.Match[str]) -> str:
        inner = match.group(1)
        return r"\d+" if re.fullmatch(r"\d+(-|\\.\\.)\d+", inner) else f"(?:{inner.replace(',', '|')})"

    return _RANGE.sub(choices, escaped)


def _keys_without_indices(form: str) -> str:
    """As `_keys`, where a key that does not end with a number may be followed by one: `_3`, `3` or `/3`."""
    return "/".join(
        f"{_keys(key)}{'' if key[-1:].isdigit() else '(?:_?[0-9]+)?'}(?:/[0-9]+)*" for key in form.split("/")
    )


def _rank(subject: _Subject) -> tuple[bool, int, float]:
    """Less for the match to be explained; see `explain`."""
    if subject.leaf:
        return subject.is_settled, len(paths.tokens(subject.leaf.path)), 0.0
    record = subject.record
    seconds = record.total if isinstance(record, Spending) else record.seconds if record else 0.0
    return subject.is_settled, 0, -seconds


def _identical(first: _Subject, subjects: list[_Subject]) -> list[_Subject]:
    """The matches in other stages that differ from `first` in numbers of their names alone, and it itself."""

    def form(subject: _Subject) -> str:
        return re.sub(r"\d+", "#", subject.names[0])

    def text(subject: _Subject) -> str:
        return console.plain(console.render(_explanation(subject)))

    own = text(first)
    return [s for s in subjects if s is first or (form(s) == form(first) and text(s) == own)]


def _stages(subjects: list[_Subject]) -> str:
    numbers = sorted({s.site.number for s in subjects if s.site.number is not None})
    return f" ({stages.named(numbers)})" if numbers else ""


def _title(subjects: list[_Subject]) -> str:
    """The names of some matches as one: a range of layers for arguments that are decided together."""
    names = list(dict.fromkeys(name for subject in subjects for name in subject.names))
    if subjects[0].leaf is None:
        return names[0]
    rows = grouping.group((name, None) for name in names)
    own = next(row for row in rows if subjects[0].leaf.path in row.members)
    return own.path if len(rows) == 1 else f"{own.path} and {len(names) - len(own.members)} more"


def _of_leaves(leaves: list[tuple[_Site, Leaf]]) -> list[_Subject]:
    """One subject for each decision that the arguments share, and for identical arguments without a decision."""
    out: list[_Subject] = []
    for site in dict.fromkeys(site for site, _ in leaves):
        by_path = {path: decision for decision in site.stage.decisions for path in decision.paths}
        decided: dict[str, _Subject] = {}
        free: dict[str, Leaf] = {}
        for leaf in (leaf for other, leaf in leaves if other is site):
            decision = by_path.get(leaf.path)
            if decision:
                decided.setdefault(decision.key, _Subject(decision.paths, site, decision, leaf))
            else:
                free[leaf.path] = leaf
        rows = grouping.group((path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for path, leaf in free.items())
        out += [*decided.values(), *(_Subject(row.members, site, leaf=free[row.members[0]]) for row in rows)]
    return out


def _of_operations(sites: list[_Site], name: str) -> list[_Subject]:
    """Operations whose name or key is `name`, else those whose name or place contains it."""
    operations = [_Subject((d.name,), site, d) for site in sites for d in site.stage.decisions if not d.paths]
    operations += [_Subject((r.name,), site, replicated=r) for site in sites for r in site.stage.replicated]
    exact = [s for s in operations if name in s.names or (s.decision and name == s.decision.key)]
    if exact or not name.strip():
        return exact
    wanted = name.lower()
    spent = [_Subject((s.operation,), site, spending=s) for site in sites for s in site.stage.spending]
    for some in (operations, spent):
        found = [s for s in some if wanted in f"{s.names[0]} {s.where}".lower()]
        if found:
            return found
    return []


def _unknown(sites: list[_Site], name: str) -> str:
    known = [paths.shown(leaf.path) for site in sites for leaf in site.stage.arguments]
    known += [d.name for site in sites for d in site.stage.decisions if not d.paths]
    known += [r.name for site in sites for r in site.stage.replicated]
    by_form = {item.lower(): item for item in reversed(known)}
    ends = {"/".join(form.split("/")[-n:]): item for form, item in by_form.items() for n in range(1, 5)}
    close = difflib.get_close_matches(paths.spellings(name)[-1].lower(), [*by_form, *ends], n=20, cutoff=0.6)
    best = list(
        {re.sub(r"\d+", "#", item): item for item in reversed([by_form.get(f) or ends[f] for f in close])}.values()
    )
    best = best[::-1][:3]
    hint = (
        f"Did you mean {' or '.join(best)}?"
        if best
        else "plan.details() lists the arguments and the operations that are not distributed."
    )
    return f"no argument or operation of this plan is called {name!r}. {hint}"


def _others(name: str, subjects: list[_Subject]) -> Section:
    """The subjects in one table; subjects for which it would show the same are one row."""
    rows = []
    for stage in dict.fromkeys(_stages([s]) for s in subjects if s.leaf):
        own = {path: s for s in subjects if s.leaf and _stages([s]) == stage for path in s.names}
        for row in grouping.group((path, _choice(s)) for path, s in own.items()):
            first = own[row.members[0]]
            rows.append((first, f"{row.path}{stage}", "", _choice(first)))
    rows += [(s, f"{_title([s])}{_stages([s])}", s.where, _choice(s)) for s in subjects if not s.leaf]
    counts = Counter(row[1:] for row in sorted(rows, key=lambda row: _rank(row[0])))
    body = [
        Row((Nested(title, tuple(line for line in (where, choice) if line)), count if count > 1 else None))
        for (title, where, choice), count in list(counts.items())[:_LISTED]
    ]
    if len(counts) > _LISTED:
        body.append(Row((f"and {len(counts) - _LISTED} more", None)))
    heading = f"Other matches of {name.strip()!r} (give more of a name to have it explained)"
    return Section("", heading, (Table((Column(wide=True), Column("", units.times)), tuple(body)),))


def _choice(subject: _Subject) -> str:
    if subject.leaf:
        return units.spec(subject.leaf.spec)
    if subject.decision:
        chosen = subject.decision.chosen
        return chosen.layout if chosen else _assignment(subject.decision)
    if subject.spending:
        spent = subject.spending
        return f"{units.seconds(spent.total)} a step, bound by {spent.bound}; the method fixed its sharding"
    return "not distributed"


def _assignment(decision: Decision) -> str:
    """The sharded factors, such as "64 over data, 3072 over model"."""
    parts = [
        f"{size:,} over {units.axes(axes)}"
        for size, axes in zip(decision.factors, decision.strategy, strict=True)
        if axes
    ]
    return "factor of size " + ", ".join(parts) if parts else "nothing sharded"


def _explanation(subject: _Subject) -> list[Section]:
    """The explanation: lines for below the name, and sections."""
    decision, stage = subject.decision, subject.site.stage
    lines: list[Block] = [*_facts(subject)]
    if decision and decision.count > 1:
        kind = "arguments" if subject.leaf else "operations"
        count = decision.count
        lines.append(f"{count} identical {kind} share this decision; figures are totals over all {count}")
    if subject.replicated:
        return [Section("", "", tuple(lines))]
    if decision is None or decision.chosen is None or subject.is_settled:
        lines.append("no alternatives: the method fixed this sharding, or there is no other strategy")
        return [Section("", "", tuple(lines))]
    lines.append(_bound(decision.chosen))
    lines.append(f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}; all times are predictions")
    whole = "Step time if this choice is forced and the others re-optimised"
    scaled = "no other change to either step"
    if subject.site.number is not None:
        whole = "Stage time, micro-batches in sequence, if this choice is forced and the others re-optimised"
        scaled = "for the stage alone, no other change"
    sections = {
        "": lines,
        whole: [_steps(decision)],
        "Cost of this choice alone, others unchanged": [_local(decision)],
        f"What would make another choice win ({scaled})": [_verdicts(subject.site, decision, decision.chosen)],
    }
    return [Section("", heading, tuple(body)) for heading, body in sections.items()]


def _facts(subject: _Subject) -> Iterator[str]:
    """Type and bytes of a subject, or its place and seconds."""
    leaf, stage = subject.leaf, subject.site.stage
    if leaf:
        size = f"{units.nbytes(leaf.bytes)} whole, {units.nbytes(stage.bytes_per_device(leaf))} per device"
        yield f"argument ({leaf.role}) {type_text(leaf)}: {units.spec(leaf.spec)}; {size}"
        return
    match subject.record:
        case Decision():
            yield f"operation at {subject.where}: {_choice(subject)}"
        case Spending() as spent:
            share = units.percent(spent.total, stage.compute_seconds + stage.communication_seconds)
            number = f"all {spent.count:,}" if spent.count > 1 else "all"
            yield f"operations at {spent.where}: {units.seconds(spent.total)} per step"
            all_of_it = "of the computing and the collectives of the stage"
            yield f"{share} {all_of_it}, {number} of this name at this place together"
            yield f"bound by {spent.bound}: {computing.terms_text(spent)}"
        case Replicated() as row:
            size = f"{units.nbytes(row.bytes)}, {units.seconds(row.seconds)} per step"
            yield f"not distributed: {row.reason}; at {row.where}; {size}"


def _bound(chosen: Alternative) -> str:
    """The resource that bounds the operations of a decision, and the terms."""
    terms = {"FLOPs": chosen.flops_seconds, "bytes": chosen.bytes_seconds, "links": chosen.link_seconds}
    text = ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in terms.items())
    return f"bound by {max(terms, key=lambda name: terms[name])}: {text} per step"


def _lettered(decision: Decision) -> list[tuple[str, Alternative, str]]:
    """The alternatives, each with a letter and a style; ">" marks the chosen one."""
    letters = iter(f"{a}{b}" for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    chosen = decision.chosen
    return [(">", a, "bold") if a is chosen else (next(letters), a, "") for a in decision.alternatives]


def _steps(decision: Decision) -> Table:
    """The whole step with each alternative."""
    seconds = [Column(name, units.seconds) for name in ("step", "compute", "communication")]
    sizes = [Column(name, units.nbytes) for name in ("sent", "peak")]
    rows = []
    for letter, a, style in _lettered(decision):
        step = a.step
        costs = step.seconds, step.compute_seconds, step.communication_seconds, step.bytes_sent, step.bytes_per_device
        rows.append(Row((letter, a.layout, *costs, "yes" if a.fits else "no"), style))
    return Table((Column(), Column("layout", wide=True), *seconds, *sizes, Column("fits")), tuple(rows))


def _local(decision: Decision) -> Table:
    """The cost of each alternative itself."""
    seconds = [Column(name, units.seconds) for name in ("FLOPs", "bytes", "reduce", "reshard")]
    rows = []
    for letter, a, style in _lettered(decision):
        costs = a.flops_seconds, a.bytes_seconds, a.communication_seconds, a.transfer_seconds, a.bytes_per_device
        rows.append(Row((letter, a.layout, *costs), style))
    return Table((Column(), Column("layout", wide=True), *seconds, Column("result", units.nbytes)), tuple(rows))


def _verdicts(site: _Site, decision: Decision, chosen: Alternative) -> Table:
    """The changes that would make each of the other alternatives win."""
    examples = _examples(site.plan)
    rows = (
        Row((letter, break_even.verdict(site.plan, site.stage, examples, other, chosen)))
        for letter, other, _ in _lettered(decision)
        if other is not chosen
    )
    return Table((Column(), Column(wide=True)), tuple(rows))
