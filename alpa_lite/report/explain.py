"""Why this sharding: the alternatives, what each would cost, and what would have to change for it to win.

Let an alternative a cost T_a = R_a + C_a seconds a step, C_a of them communication, and the chosen strategy c likewise.
With links x times as fast the alternative wins where

    R_a + C_a / x  <  R_c + C_c / x,   that is for   x > (C_a - C_c) / (R_c - R_a)   if the chosen one computes longer,
                                       and for       x < (C_c - C_a) / (R_a - R_c)   if it communicates longer.

Likewise for a batch b times as large, where of its own seconds S_a grow with the batch and F_a do not:
F_a + b S_a < F_c + b S_c. These are first-order answers: everything else in the plan stays as it is.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType

from alpa_lite.errors import PlanError
from alpa_lite.plan import Alternative, Decision, Leaf, Plan, Replicated, Stage
from alpa_lite.report import grouping, text, units

_IN_FULL = 4  # matches that are explained in full before they are only listed
_LISTED = 40
_RANGE = re.compile(r"\\\{(.*?)\\\}")


def explain(plan: Plan, name: str) -> str:
    """Why the named argument or operation is sharded as it is, in at most 100 columns.

    Args:
      plan: the plan.
      name: the path of an argument, whole or its end, as `keystr` or the printout writes it (`h_3/mlp/up/kernel`,
        `h_{0-11}/mlp/up/kernel`); or the name, source line or scope of an operation, whole or in part.

    Raises:
      PlanError: if nothing has that name; the message holds close matches.
    """
    leaves = _find_leaves(plan, name)
    subjects: list[_Subject] = _of_leaves(plan, leaves) if leaves else _of_operations(plan, name)
    if not subjects:
        raise PlanError(_unknown(plan, name))
    if len(subjects) > _IN_FULL:
        return text.plain(_listing(name, subjects))
    return text.plain(Group(*(_full(plan, subject) for subject in subjects)))


@dataclass(frozen=True)
class _Subject:
    """What is explained: an argument, an operation, or one that is not distributed."""

    name: str
    decision: Decision | None = None
    leaf: tuple[Stage, Leaf] | None = None
    replicated: Replicated | None = None


def _find_leaves(plan: Plan, name: str) -> list[tuple[Stage, Leaf]]:
    """The arguments of that path; exact matches win over ends of paths."""
    everything = [(stage, leaf) for stage in plan.stages for leaf in stage.arguments]
    exact = [item for item in everything if item[1].path == name]
    if exact or not _words(name):
        return exact
    pattern = _pattern(name)
    return [item for item in everything if pattern.search(_words(item[1].path))]


def _words(path: str) -> str:
    """A path as its keys, each after a slash."""
    return "".join(f"/{key}" for key in re.findall(r"[^\[\].'\"/]+", path))


def _pattern(name: str) -> re.Pattern[str]:
    """Matches paths, in the form of `_words`, that end with `name`; `{0-11}` and `{q,k}` match any of theirs."""
    escaped = re.escape(_words(name)).replace(r"\-", "-")

    def choices(match: re.Match[str]) -> str:
        inner = match.group(1)
        return r"\d+" if re.fullmatch(r"\d+(-|\\\\.\\\\.)\d+", inner) else f"({inner.replace(',', '|')})"

    return re.compile(_RANGE.sub(choices, escaped) + "$")


def _of_leaves(plan: Plan, leaves: list[tuple[Stage, Leaf]]) -> list[_Subject]:
    """One subject for each decision that the arguments share, and for alike arguments without one."""
    by_path = {path: decision for decision in plan.decisions for path in decision.paths}
    out: dict[str, _Subject] = {}
    free: dict[str, tuple[Stage, Leaf]] = {}
    for stage, leaf in leaves:
        decision = by_path.get(leaf.path)
        if decision:
            out.setdefault(decision.key, _Subject(decision.name, decision, (stage, leaf)))
        else:
            free[leaf.path] = (stage, leaf)
    rows = grouping.group((path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for path, (_, leaf) in free.items())
    return [*out.values(), *(_Subject(row.path, leaf=free[row.members[0]]) for row in rows)]


def _of_operations(plan: Plan, name: str) -> list[_Subject]:
    """Operations whose name or key is `name`, else those whose name or place contains it."""
    operations = [_Subject(d.name, d) for d in plan.decisions if not d.paths]
    operations += [_Subject(r.name, replicated=r) for r in plan.replicated]
    exact = [s for s in operations if name == s.name or (s.decision and name == s.decision.key)]
    if exact or not name.strip():
        return exact
    wanted = name.lower()
    return [s for s in operations if wanted in f"{s.name} {_where(s)}".lower()]


def _where(subject: _Subject) -> str:
    record = subject.decision or subject.replicated
    return record.where if record else ""


def _unknown(plan: Plan, name: str) -> str:
    paths = [leaf.path for stage in plan.stages for leaf in stage.arguments]
    known = [*paths, *(d.name for d in plan.decisions if not d.paths), *(r.name for r in plan.replicated)]
    by_form = {form.lower(): item for item in reversed(known) for form in (item, _words(item).lstrip("/"))}
    ends = {"/".join(form.split("/")[-n:]): item for form, item in by_form.items() for n in range(1, 5)}
    close = difflib.get_close_matches(name.lower(), [*by_form, *ends], n=20, cutoff=0.6)
    best = list(
        {re.sub(r"\d+", "#", item): item for item in reversed([by_form.get(f) or ends[f] for f in close])}.values()
    )
    best = best[::-1][:3]
    hint = (
        f"Did you mean {' or '.join(best)}?" if best else "str(plan) lists the arguments and what is not distributed."
    )
    return f"no argument or operation of this plan is called {name!r}. {hint}"


def _listing(name: str, subjects: list[_Subject]) -> RenderableType:
    """The subjects in one table; those that agree in all that it shows are one row."""
    rows = Counter((subject.name, _where(subject), _choice(subject)) for subject in subjects)
    out = text.table("name and place", "", "chosen", wide=0)
    for (title, where, choice), count in list(rows.items())[:_LISTED]:
        text.add(out, f"{title}\n  {where}" if where else title, f"x {count}" if count > 1 else "", choice)
    if len(rows) > _LISTED:
        text.add(out, f"and {len(rows) - _LISTED} more", "", "")
    head = f"{len(subjects)} arguments or operations match {name!r}; name one of them for its alternatives."
    return text.section(head, out)


def _choice(subject: _Subject) -> str:
    if subject.leaf:
        return units.spec(subject.leaf[1].spec)
    if subject.decision:
        chosen = subject.decision.chosen
        return chosen.layout if chosen else _assignment(subject.decision)
    return "not distributed"


def _assignment(decision: Decision) -> str:
    """The factors that are sharded, such as "64 over data, 3072 over model"."""
    parts = [
        f"{size:,} over {units.axes(axes)}"
        for size, axes in zip(decision.factors, decision.strategy, strict=True)
        if axes
    ]
    return "factor of size " + ", ".join(parts) if parts else "nothing sharded"


def _full(plan: Plan, subject: _Subject) -> RenderableType:
    lines: list[RenderableType] = []
    decision = subject.decision
    if subject.leaf:
        stage, leaf = subject.leaf
        size = f"{units.nbytes(leaf.bytes)} whole, {units.nbytes(stage.bytes_per_device(leaf))} per device"
        lines.append(f"argument ({leaf.role}) {text.type_text(leaf)}: {units.spec(leaf.spec)}; {size}")
    elif decision:
        lines.append(f"operation at {decision.where}: {_choice(subject)}")
    if decision and decision.count > 1:
        lines.append(f"decided once for {decision.count} alike ones; costs below are for all of them together")
    if subject.replicated:
        row = subject.replicated
        size = f"{units.nbytes(row.bytes)}, {units.seconds(row.seconds)} a step"
        lines.append(f"not distributed: {row.reason}; at {row.where}; {size}")
        return text.section(subject.name, *lines)
    if decision is None or decision.chosen is None or len(decision.alternatives) < 2:
        lines.append("no alternatives are known: the method fixed it, or there was no other strategy")
        return text.section(subject.name, *lines)
    chosen = decision.chosen
    others = [(f"{letter}", a) for letter, a in _lettered(decision) if a is not chosen]
    verdicts = text.table("", "", wide=1)
    for letter, other in others:
        text.add(verdicts, letter, _verdict(plan, other, chosen))
    return Group(
        text.section(subject.name, *lines, "", _alternatives(decision)),
        text.section("What would have to change for another to win", verdicts),
    )


def _lettered(decision: Decision) -> list[tuple[str, Alternative]]:
    """The alternatives, each with a letter; the chosen one is marked instead."""
    letters = iter(f"{a}{b}" for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    return [(">" if a is decision.chosen else next(letters), a) for a in decision.alternatives]


def _alternatives(decision: Decision) -> RenderableType:
    out = text.table(
        "", "layout", "compute", "reduce", "reshard", "bytes/device", "whole step", right=(2, 3, 4, 5, 6), wide=1
    )
    for letter, a in _lettered(decision):
        step = "does not fit" if not a.feasible else "" if a.total_seconds is None else units.seconds(a.total_seconds)
        costs = (units.seconds(s) for s in (a.compute_seconds, a.communication_seconds, a.transfer_seconds))
        style = "bold" if a is decision.chosen else ""
        text.add(out, letter, a.layout, *costs, units.nbytes(a.bytes_per_device), step, style=style)
    return out


def _verdict(plan: Plan, other: Alternative, chosen: Alternative) -> str:
    """How much worse `other` is, and under which conditions it would win."""
    more = other.bytes_per_device - chosen.bytes_per_device
    if not other.feasible:
        need = f"at least {units.nbytes(more)} more" if more > 0 else "more"
        return f"no plan with it fits {units.nbytes(plan.memory_per_device)} per device; it needs {need}."
    delta, communication, scope = _difference(other, chosen)
    if abs(delta) <= 1e-9 * max(plan.step_seconds, abs(delta)):
        return f"costs the same {scope}: either would do."
    if delta < 0:
        reason = "the whole plan is what counts" if scope == "by itself" else "within the solver's gap"
        return f"costs {units.seconds(-delta)} less {scope}; {reason}."
    out = [f"costs {units.seconds(delta)} more {scope}", *_links(delta, communication), *_batch(other, chosen)]
    if len(out) == 1:
        out.append("no link speed and no batch size alone changes that")
    if more < 0:
        out.append(f"takes {units.nbytes(-more)} less per device, which a tighter memory budget may need")
    return "; ".join(out) + "."


def _difference(other: Alternative, chosen: Alternative) -> tuple[float, float, str]:
    """Seconds that `other` costs more, those of them that are communication, and what was compared."""
    totals = (other.total_seconds, chosen.total_seconds)
    parts = (other.total_communication_seconds, chosen.total_communication_seconds)
    if totals[0] is not None and totals[1] is not None:
        local = other.local_seconds - other.compute_seconds - (chosen.local_seconds - chosen.compute_seconds)
        known = parts[0] is not None and parts[1] is not None
        return totals[0] - totals[1], parts[0] - parts[1] if known else local, "per step"  # type: ignore[operator]
    communication = other.communication_seconds + other.transfer_seconds
    communication -= chosen.communication_seconds + chosen.transfer_seconds
    return other.local_seconds - chosen.local_seconds, communication, "by itself"


def _links(delta: float, communication: float) -> list[str]:
    """The link speed from which, or below which, an alternative that costs `delta` seconds more wins."""
    rest = delta - communication
    if abs(rest) <= 1e-9 * max(abs(delta), abs(communication)):  # they compute equally long; the rest is rounding
        return []
    if communication > 0 > rest:
        return [f"wins with links more than {units.factor(communication / -rest)} as fast"]
    if communication < 0 < rest:
        return [f"wins with links less than {units.factor(-communication / rest)} as fast"]
    return []


def _batch(other: Alternative, chosen: Alternative) -> list[str]:
    """The batch size from which, or below which, `other` wins by its own costs."""
    if other.batch_seconds is None or chosen.batch_seconds is None or other.local_seconds <= chosen.local_seconds:
        return []
    growing = other.batch_seconds - chosen.batch_seconds
    fixed = other.local_seconds - chosen.local_seconds - growing
    if growing < 0 < fixed:
        return [f"wins with a batch more than {units.factor(fixed / -growing)} as large"]
    if fixed < 0 < growing:
        return [f"wins with a batch less than {units.factor(-fixed / growing)} as large"]
    return []
