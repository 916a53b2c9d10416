"""Why this sharding: the alternatives, what the whole step would cost with each, and what would have to change.

For every alternative the plan holds a whole step in which it is forced and the others adapt (`plan.Outcome`). Of its T
seconds, V are spent waiting for links, G grow with the batch. With links x times as fast, and the batch b times as
large, this step takes

    T(x) = T - V + V / x          T(b) = T - G + b G

and so does the plan with its own T, V and G. Where the two lines cross, the alternative begins to beat the plan:

    x = (V_a - V_c) / ((T_c - V_c) - (T_a - V_a))          b = ((T_a - G_a) - (T_c - G_c)) / (G_c - G_a)

These are predictions to first order: neither step adapts further on the way, and a third may win before.

In a pipeline each stage was sharded as a step of its own (`Plan.parts`). Its seconds are then those of the stage, for
all micro-batches one after another, and what is told alike for several stages is told once.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite.errors import PlanError
from alpa_lite.plan import Alternative, Decision, Leaf, Outcome, Plan, Replicated, Stage
from alpa_lite.report import grouping, pipeline, tables, units

_IN_FULL = 4  # matches that are explained in full before they are only listed
_LISTED = 40
_SAME = 1e-6  # share of the step by which two plans may differ and count as equally fast
_REACH = 1e3  # factors of link speed and batch beyond which nobody can go
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
    sites = _sites(plan)
    leaves = _find_leaves(sites, name)
    subjects = _of_leaves(leaves) if leaves else _of_operations(sites, name)
    if not subjects:
        raise PlanError(_unknown(sites, name))
    told = _told(subjects)
    if len(told) > _IN_FULL:
        return tables.plain(_listing(name, subjects))
    return tables.plain(Group(*told))


@dataclass(frozen=True, eq=False)
class _Site:
    """A mesh with what was decided for it: the plan itself, or a stage of a pipeline with its own plan."""

    plan: Plan
    stage: Stage
    examples: int | None  # in the batch
    number: int | None = None


def _sites(plan: Plan) -> list[_Site]:
    sizes = {leaf.shape[0] for stage in plan.stages for leaf in stage.arguments if leaf.role == "batch" and leaf.shape}
    now = sizes.pop() if len(sizes) == 1 else None
    if not plan.parts:
        return [_Site(plan, stage, now) for stage in plan.stages]
    return [_Site(part, stage, now, n) for n, (part, stage) in enumerate(zip(plan.parts, plan.stages, strict=True))]


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is explained: an argument, an operation, or one that is not distributed."""

    name: str
    site: _Site
    decision: Decision | None = None
    leaf: Leaf | None = None
    replicated: Replicated | None = None


def _find_leaves(sites: list[_Site], name: str) -> list[tuple[_Site, Leaf]]:
    """The arguments of that path; exact matches win over ends of paths."""
    everything = [(site, leaf) for site in sites for leaf in site.stage.arguments]
    exact = [item for item in everything if item[1].path == name]
    if exact or not _words(name):
        return exact
    pattern = _pattern(name)
    return [item for item in everything if pattern.search(_words(item[1].path))]


def _told(subjects: list[_Subject]) -> list[RenderableType]:
    """Every subject in full. What is the same in several stages but for numbers in its name is told once."""
    found: dict[tuple[str, str], list[_Subject]] = {}
    for subject in subjects:
        body = tables.plain(Group(*_full(subject)))
        found.setdefault((re.sub(r"\d+", "#", subject.name), body), []).append(subject)
    out: list[RenderableType] = []
    for alike in found.values():
        name = grouping.template([name for subject in alike for name in _spelled(subject.name)])
        stages = sorted({s.site.number for s in alike if s.site.number is not None})
        first, *rest = _full(alike[0])
        out.append(Group(tables.section(f"{name}{f' ({pipeline.named(stages)})' if stages else ''}", first), *rest))
    return out


def _spelled(name: str) -> list[str]:
    """A name with a range of numbers as the names of its ends and of all between: "h_{3-5}" gives h_3, h_4, h_5."""
    match = re.search(r"\{(\d+)-(\d+)\}|\{(\d+(?:,\d+)*)\}", name)
    if match is None:
        return [name]
    numbers = range(int(match[1]), int(match[2]) + 1) if match[1] else match[3].split(",")
    return [spelled for n in numbers for spelled in _spelled(f"{name[: match.start()]}{n}{name[match.end() :]}")]


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


def _of_leaves(leaves: list[tuple[_Site, Leaf]]) -> list[_Subject]:
    """One subject for each decision that the arguments share, and for alike arguments without one."""
    out: list[_Subject] = []
    for site in dict.fromkeys(site for site, _ in leaves):
        by_path = {path: decision for decision in site.plan.decisions for path in decision.paths}
        decided: dict[str, _Subject] = {}
        free: dict[str, Leaf] = {}
        for leaf in (leaf for other, leaf in leaves if other is site):
            decision = by_path.get(leaf.path)
            if decision:
                decided.setdefault(decision.key, _Subject(decision.name, site, decision, leaf))
            else:
                free[leaf.path] = leaf
        rows = grouping.group((path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for path, leaf in free.items())
        out += [*decided.values(), *(_Subject(row.path, site, leaf=free[row.members[0]]) for row in rows)]
    return out


def _of_operations(sites: list[_Site], name: str) -> list[_Subject]:
    """Operations whose name or key is `name`, else those whose name or place contains it."""
    operations = [_Subject(d.name, site, d) for site in sites for d in site.plan.decisions if not d.paths]
    operations += [_Subject(r.name, site, replicated=r) for site in sites for r in site.plan.replicated]
    exact = [s for s in operations if name == s.name or (s.decision and name == s.decision.key)]
    if exact or not name.strip():
        return exact
    wanted = name.lower()
    return [s for s in operations if wanted in f"{s.name} {_where(s)}".lower()]


def _where(subject: _Subject) -> str:
    record = subject.decision or subject.replicated
    return record.where if record else ""


def _unknown(sites: list[_Site], name: str) -> str:
    known = [leaf.path for site in sites for leaf in site.stage.arguments]
    known += [d.name for site in sites for d in site.plan.decisions if not d.paths]
    known += [r.name for site in sites for r in site.plan.replicated]
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
    out = tables.table("name, place and what was chosen", "", wide=0)
    for (title, where, choice), count in list(rows.items())[:_LISTED]:
        lines = [title, *(f"  {line}" for line in (where, choice) if line)]
        tables.add(out, "\n".join(lines), f"x {count}" if count > 1 else "")
    if len(rows) > _LISTED:
        tables.add(out, f"and {len(rows) - _LISTED} more", "")
    head = f"{len(subjects)} arguments or operations match {name!r}; name one of them for its alternatives."
    return tables.section(head, out)


def _choice(subject: _Subject) -> str:
    if subject.leaf:
        return units.spec(subject.leaf.spec)
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


def _full(subject: _Subject) -> list[RenderableType]:
    """What there is to say: lines for below the name, and sections."""
    lines: list[RenderableType] = []
    decision, stage = subject.decision, subject.site.stage
    if subject.leaf:
        leaf = subject.leaf
        size = f"{units.nbytes(leaf.bytes)} whole, {units.nbytes(stage.bytes_per_device(leaf))} per device"
        lines.append(f"argument ({leaf.role}) {tables.type_text(leaf)}: {units.spec(leaf.spec)}; {size}")
    elif decision:
        lines.append(f"operation at {decision.where}: {_choice(subject)}")
    if decision and decision.count > 1:
        lines.append(f"decided once for {decision.count} alike ones; what stands below is for all of them together")
    if subject.replicated:
        row = subject.replicated
        size = f"{units.nbytes(row.bytes)}, {units.seconds(row.seconds)} a step"
        lines.append(f"not distributed: {row.reason}; at {row.where}; {size}")
        return [_lines(lines)]
    if decision is None or decision.chosen is None or len(decision.alternatives) < 2:
        lines.append("no alternatives are known: the method fixed it, or there was no other strategy")
        return [_lines(lines)]
    chosen = decision.chosen
    verdicts = tables.table("", "", wide=1)
    for letter, other in _lettered(decision):
        if other is not chosen:
            tables.add(verdicts, letter, _verdict(subject.site, other, chosen))
    where = f"predicted, mesh {units.mesh(stage.mesh_shape, stage.axis_names)}"
    whole = f"The whole step with each choice, the rest adapted to it ({where})"
    scaled = "predicted, both steps otherwise as they are"
    if subject.site.number is not None:
        whole = f"The stage with each choice, micro-batches one after another ({where})"
        scaled = "predicted, for the stage by itself"
    return [
        _lines(lines),
        tables.section(whole, _steps(decision)),
        tables.section("The choice by itself, nothing else adapted", _local(decision)),
        tables.section(f"What would have to change for another to win ({scaled})", verdicts),
    ]


def _lines(lines: list[RenderableType]) -> RenderableType:
    """Lines of text, taken as they are."""
    return Group(*(Text(line) if isinstance(line, str) else line for line in lines))


def _lettered(decision: Decision) -> list[tuple[str, Alternative]]:
    """The alternatives, each with a letter; the chosen one is marked instead."""
    letters = iter(f"{a}{b}" for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    return [(">" if a is decision.chosen else next(letters), a) for a in decision.alternatives]


def _steps(decision: Decision) -> RenderableType:
    """What the whole step would be with each alternative."""
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
    """What each alternative costs where it stands."""
    out = tables.table("", "layout", "compute", "reduce", "reshard", "a result", right=(2, 3, 4, 5), wide=1)
    for letter, a in _lettered(decision):
        costs = (units.seconds(s) for s in (a.compute_seconds, a.communication_seconds, a.transfer_seconds))
        style = "bold" if a is decision.chosen else ""
        tables.add(out, letter, a.layout, *costs, units.nbytes(a.bytes_per_device), style=style)
    return out


def _verdict(site: _Site, other: Alternative, chosen: Alternative) -> str:
    """How much worse `other` is, and under which conditions it would beat the plan."""
    plan = site.plan
    delta = other.step.seconds - chosen.step.seconds
    if not other.fits:
        return f"{_too_large(plan, other.step, chosen)}."
    parts = [_difference(plan, other, chosen, delta)]
    changes = []
    if delta > _SAME * plan.step_seconds:
        changes = [*_links(other.step, chosen.step), *_batch(site.examples, other.step, chosen.step)]
    changes += _memory(plan, other, chosen)
    if changes:
        parts.append("would win " + ", or ".join(changes))
    elif delta > _SAME * plan.step_seconds:
        parts.append("batch size, link speed or memory alone does not make it win")
    return "; ".join(parts) + "."


def _difference(plan: Plan, other: Alternative, chosen: Alternative, delta: float) -> str:
    """What the step with `other` costs more, and why."""
    if abs(delta) <= _SAME * plan.step_seconds:
        return "the step takes as long: either would do"
    if delta < 0:
        gap = plan.solver.objective - plan.solver.bound
        reason = f"within the solver's gap of {units.seconds(gap)}" if -delta <= gap else "this plan is not the best"
        return f"the step takes {units.seconds(-delta)} less: {reason}"
    more = f"{units.seconds(delta)} ({_share(delta, plan.step_seconds)}) more a step"
    compute = other.step.compute_seconds - chosen.step.compute_seconds
    causes = [
        f"{units.seconds(abs(value))} {'more' if value > 0 else 'less'} {name}"
        for name, value in (("computing", compute), ("communicating", delta - compute))
        if abs(value) > 0.01 * delta
    ]
    if len(causes) > 1:
        more += f" ({', '.join(causes)})"
    elif abs(compute) > 0.5 * delta:
        more += ", computing"
    else:
        sent = other.step.bytes_sent - chosen.step.bytes_sent
        more += ", communicating"
        more += f" {units.nbytes(abs(sent))} {'more' if sent > 0 else 'less'}" if sent else ""
    least = other.bound_seconds - chosen.step.seconds
    if least > _SAME * plan.step_seconds and least < 0.9 * delta:
        more += f"; at least {units.seconds(least)} more in any plan"
    return more


def _share(part: float, whole: float) -> str:
    """A small share of the step in percent, with two digits."""
    share = 100 * part / whole if whole > 0 else 0.0
    return "under 0.01 %" if share < 0.01 else f"{share:.2g} %" if share < 100 else f"{share:,.0f} %"


def _too_large(plan: Plan, step: Outcome, chosen: Alternative) -> str:
    """What is known of an alternative with which no plan was found that fits."""
    delta = step.seconds - (chosen.roomy or chosen.step).seconds
    pace = f"{units.seconds(abs(delta))} a step {'more' if delta > 0 else 'less'} than the chosen one"
    head = f"no plan with it was found that fits {units.nbytes(plan.memory_per_device)} per device"
    return f"{head}; the fastest needs {units.nbytes(step.bytes_per_device)} and takes {pace}" + (
        ": with that memory it would win" if delta < 0 else ": more memory does not make it win"
    )


def _links(other: Outcome, chosen: Outcome) -> list[str]:
    """The link speed from which, or below which, `other` is faster; nothing if that is out of reach."""
    spent = [step.communication_seconds - step.latency_seconds for step in (other, chosen)]
    rest = [step.seconds - on_links for step, on_links in zip((other, chosen), spent, strict=True)]
    at = _ratio(spent[0] - spent[1], rest[1] - rest[0])
    if at is None:
        return []
    return [f"with links {'over' if at > 1 else 'under'} {units.factor(at)} as fast"]


def _batch(now: int | None, other: Outcome, chosen: Outcome) -> list[str]:
    """The batch from which, or below which, `other` is faster; nothing if that is out of reach."""
    fixed = [step.seconds - step.batch_seconds for step in (other, chosen)]
    at = _ratio(fixed[0] - fixed[1], chosen.batch_seconds - other.batch_seconds)
    if at is None:
        return []
    named = "" if now is None else f" ({'above' if at > 1 else 'below'} {units.digits(at * now)} examples)"
    return [f"with a batch {'over' if at > 1 else 'under'} {units.factor(at)} as large{named}"]


def _ratio(above: float, below: float) -> float | None:
    """above / below where the lines cross within a factor of a thousand of what is now; None where they do not."""
    if above == 0 or below == 0 or not 1 / _REACH <= above / below <= _REACH:
        return None
    return above / below


def _memory(plan: Plan, other: Alternative, chosen: Alternative) -> list[str]:
    """The memory budgets under which `other` is faster than the plan, or fits where the plan does not."""
    out = []
    low, high = other.step.bytes_per_device, chosen.step.bytes_per_device
    if low < 0.999 * high:
        out.append(f"where {units.nbytes(high)} per device do not fit but {units.nbytes(low)} do")
    best = (chosen.roomy or chosen.step).seconds  # with more memory the chosen strategy, too, may be in a faster plan
    if other.roomy is not None and other.roomy.seconds < best * (1 - _SAME):
        less = units.seconds(best - other.roomy.seconds)
        out.append(f"with {units.nbytes(other.roomy.bytes_per_device)} per device, by {less} a step")
    return out
