"""Why this sharding: the alternatives, the cost of the whole step with each, and what would have to change.

What would have to change is worked out in `report.winning`.

In a pipeline each stage was sharded as a separate step (`Stage.decisions`). Its seconds are then those of the stage,
for all micro-batches one after another, and stages with identical explanations share one.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite import paths
from alpa_lite.errors import PlanError
from alpa_lite.figures import Spending
from alpa_lite.records import Alternative, Decision, Leaf, Replicated, Stage
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import computing, grouping, stages, tables, units, winning

_LISTED = 20
_RANGE = re.compile(r"\\\{(.*?)\\\}")
_STAGES = re.compile(r"(.*?)\s*\(stages? ([\d, -]+)\)\s*", re.DOTALL)


def explain(plan: Plan, name: str) -> str:
    """Why the named argument or operation is sharded as it is, in at most 100 columns.

    One match is explained, and the others are listed after it. A name is tried as each of these in turn, and the first
    that matches anything decides:

    1. the whole path of an argument, in either notation (`alpa_lite.paths`);
    2. the last keys of a path: `mlp/up/kernel`;
    3. the same without indices: `layers/mlp/up/kernel` for `layers/3/mlp/up/kernel`, `h/mlp/up/kernel` for `h_3/...`;
    4. the name or the key of an operation;
    5. a part of an operation's name, source line or scope, in upper or lower case; of operations that the plan had
       nothing to decide about, as of those that a textbook method fixes, it says what they take.

    In a path, `{0-11}` stands for any number and `{q,k}` for any of the names, as the printout writes them. After any
    name, ` (stage 1)` or ` (stages 0-3)` leaves out the other stages of a pipeline.

    Of several matches, one with alternatives is explained before one without; then an argument with fewer keys in its
    path (a parameter before its optimizer moments), and an operation that costs more seconds; then the first in the
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
    told = _identical(first, subjects)
    rest = [subject for subject in subjects if subject not in told]
    return tables.plain(Group(_told(told), *([_listing(name, rest)] if rest else [])))


@dataclass(frozen=True, eq=False)
class _Site:
    """A stage with the decisions for it; it has a number if there are several."""

    plan: Plan
    stage: Stage
    examples: int | None  # in the batch
    number: int | None = None


def _sites(plan: Plan) -> list[_Site]:
    sizes = {leaf.shape[0] for stage in plan.stages for leaf in stage.arguments if leaf.role == "batch" and leaf.shape}
    now = sizes.pop() if len(sizes) == 1 else None
    several = len(plan.stages) > 1
    return [_Site(plan, stage, now, n if several else None) for n, stage in enumerate(plan.stages)]


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
    def name(self) -> str:
        """The name in print, without the stage."""
        return _title([self])


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
    decision, record = subject.decision, subject.decision or subject.replicated or subject.spending
    told = decision is not None and decision.chosen is not None and len(decision.alternatives) > 1
    if subject.leaf:
        return not told, len(paths.tokens(subject.leaf.path)), 0.0
    seconds = record.total if isinstance(record, Spending) else record.seconds if record else 0.0
    return not told, 0, -seconds


def _identical(first: _Subject, subjects: list[_Subject]) -> list[_Subject]:
    """The matches in other stages that differ from `first` in numbers of their names alone, and it itself."""

    def body(subject: _Subject) -> str:
        return tables.plain(Group(*_full(subject)))

    def form(subject: _Subject) -> str:
        return re.sub(r"\d+", "#", subject.names[0])

    own = body(first)
    return [s for s in subjects if s is first or (form(s) == form(first) and body(s) == own)]


def _told(subjects: list[_Subject]) -> RenderableType:
    """The explanation that matches in several stages share."""
    head, *rest = _full(subjects[0])
    return Group(tables.section(f"{_title(subjects)}{_stages(subjects)}", head), *rest)


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
        found = [s for s in some if wanted in f"{s.names[0]} {_where(s)}".lower()]
        if found:
            return found
    return []


def _where(subject: _Subject) -> str:
    record = subject.decision or subject.replicated or subject.spending
    return record.where if record else ""


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
        else "str(plan) lists the arguments and the operations that are not distributed."
    )
    return f"no argument or operation of this plan is called {name!r}. {hint}"


def _listing(name: str, subjects: list[_Subject]) -> RenderableType:
    """The subjects in one table; subjects for which it would show the same are one row."""
    rows = []
    for stage in dict.fromkeys(_stages([s]) for s in subjects if s.leaf):
        own = {path: s for s in subjects if s.leaf and _stages([s]) == stage for path in s.names}
        for row in grouping.group((path, _choice(s)) for path, s in own.items()):
            first = own[row.members[0]]
            rows.append((first, f"{row.path}{stage}", "", _choice(first)))
    rows += [(s, f"{s.name}{_stages([s])}", _where(s), _choice(s)) for s in subjects if not s.leaf]
    counts = Counter(row[1:] for row in sorted(rows, key=lambda row: _rank(row[0])))
    out = tables.table("", "", wide=0)
    for (title, where, choice), count in list(counts.items())[:_LISTED]:
        lines = [title, *(f"  {line}" for line in (where, choice) if line)]
        tables.add(out, "\n".join(lines), f"x {count}" if count > 1 else "")
    if len(counts) > _LISTED:
        tables.add(out, f"and {len(counts) - _LISTED} more", "")
    return tables.section(f"Other matches of {name.strip()!r} (give more of a name to have it explained)", out)


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


def _full(subject: _Subject) -> list[RenderableType]:
    """The explanation: lines for below the name, and sections."""
    lines: list[RenderableType] = []
    decision, stage = subject.decision, subject.site.stage
    if subject.leaf:
        leaf = subject.leaf
        size = f"{units.nbytes(leaf.bytes)} whole, {units.nbytes(stage.bytes_per_device(leaf))} per device"
        lines.append(f"argument ({leaf.role}) {tables.type_text(leaf)}: {units.spec(leaf.spec)}; {size}")
    elif decision:
        lines.append(f"operation at {decision.where}: {_choice(subject)}")
    elif subject.spending:
        spent = subject.spending
        share = units.percent(spent.total, stage.compute_seconds + stage.communication_seconds)
        lines.append(f"operations at {spent.where}: {units.seconds(spent.total)} per step")
        number = f"all {spent.count:,}" if spent.count > 1 else "all"
        lines.append(
            f"{share} of the computing and the collectives of the stage, {number} of this name at this place together"
        )
        lines.append(f"bound by {spent.bound}: {computing.terms_text(spent)}")
    if decision and decision.count > 1:
        kind = "arguments" if subject.leaf else "operations"
        lines.append(
            f"{decision.count} identical {kind} share this decision; figures are totals over all {decision.count}"
        )
    if subject.replicated:
        row = subject.replicated
        size = f"{units.nbytes(row.bytes)}, {units.seconds(row.seconds)} per step"
        lines.append(f"not distributed: {row.reason}; at {row.where}; {size}")
        return [_lines(lines)]
    if decision is None or decision.chosen is None or len(decision.alternatives) < 2:
        lines.append("no alternatives: the method fixed this sharding, or there is no other strategy")
        return [_lines(lines)]
    chosen = decision.chosen
    verdicts = tables.table("", "", wide=1)
    for letter, other in _lettered(decision):
        if other is not chosen:
            tables.add(
                verdicts, letter, winning.verdict(subject.site.plan, stage, subject.site.examples, other, chosen)
            )
    lines.append(_bound(chosen))
    lines.append(f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}; all times are predictions")
    whole = "Step time if this choice is forced and the others re-optimised"
    scaled = "no other change to either step"
    if subject.site.number is not None:
        whole = "Stage time, micro-batches in sequence, if this choice is forced and the others re-optimised"
        scaled = "for the stage alone, no other change"
    return [
        _lines(lines),
        tables.section(whole, _steps(decision)),
        tables.section("Cost of this choice alone, others unchanged", _local(decision)),
        tables.section(f"What would make another choice win ({scaled})", verdicts),
    ]


def _bound(chosen: Alternative) -> str:
    """What bounds the operations of a decision, and the terms."""
    terms = {"FLOPs": chosen.flops_seconds, "bytes": chosen.bytes_seconds, "links": chosen.link_seconds}
    said = ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in terms.items())
    return f"bound by {max(terms, key=lambda name: terms[name])}: {said} per step"


def _lines(lines: list[RenderableType]) -> RenderableType:
    """Lines of text, taken as they are."""
    return Group(*(Text(line) if isinstance(line, str) else line for line in lines))


def _lettered(decision: Decision) -> list[tuple[str, Alternative]]:
    """The alternatives, each with a letter; ">" marks the chosen one."""
    letters = iter(f"{a}{b}" for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    return [(">" if a is decision.chosen else next(letters), a) for a in decision.alternatives]


def _steps(decision: Decision) -> RenderableType:
    """The whole step with each alternative."""
    out = tables.table(
        "", "layout", "step", "compute", "communication", "sent", "peak", "fits", right=(2, 3, 4, 5, 6), wide=1
    )
    for letter, a in _lettered(decision):
        step = a.step
        costs = [units.seconds(s) for s in (step.seconds, step.compute_seconds, step.communication_seconds)]
        sizes = [units.nbytes(size) for size in (step.bytes_sent, step.bytes_per_device)]
        style = "bold" if a is decision.chosen else ""
        tables.add(out, letter, a.layout, *costs, *sizes, "yes" if a.fits else "no", style=style)
    return out


def _local(decision: Decision) -> RenderableType:
    """The cost of each alternative itself."""
    out = tables.table("", "layout", "FLOPs", "bytes", "reduce", "reshard", "result", right=range(2, 7), wide=1)
    for letter, a in _lettered(decision):
        terms = a.flops_seconds, a.bytes_seconds, a.communication_seconds, a.transfer_seconds
        costs = (units.seconds(s) for s in terms)
        style = "bold" if a is decision.chosen else ""
        tables.add(out, letter, a.layout, *costs, units.nbytes(a.bytes_per_device), style=style)
    return out
