"""The page: what was chosen and what it yields, pictures, and tables that can be searched and sorted."""

from __future__ import annotations

from collections.abc import Callable

from alpa_lite.paths import shown
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import computing, modules, stages, summary, text, units, words
from alpa_lite.report.html import pictures
from alpa_lite.report.html.assets import SCRIPT, STYLE
from alpa_lite.report.html.elements import Markup, element, join, section, table
from alpa_lite.report.tables import type_text

_MOST_MODULES = 40
_TIMES = (("forward", "--c0"), ("backward and update", "--c3"), ("communication", "--c6"))


def document(plan: Plan) -> str:
    """The plan as a whole HTML document, in which everything stands: no resource is loaded."""
    head = element(
        "head", element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"Plan {plan.method} for {plan.cluster.num_devices} {plan.cluster.device}"),
    )  # fmt: skip
    body = element("body", fragment(plan), style="margin:0")
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def fragment(plan: Plan) -> Markup:
    """The plan as an element with its own style and script, as notebooks show it."""
    parts = [
        ("overview", "Chosen", _chosen(plan)),
        ("compared", "Beside it, at the same prices", _compared(plan)),
        ("mesh", "Mesh", _meshes(plan)),
        ("memory", "Memory per device", _memory(plan)),
        ("time", "Time by module and operation", _time(plan)),
        ("operations", "Operations, and what bounds them", _operations(plan)),
        ("schedule", "Schedule", pictures.schedule(plan.division.timeline) if plan.pipelined else None),
        ("tensors", "Tensors", _tensors(plan)),
        ("collectives", "Collectives", _collectives(plan)),
        ("activations", "Activations that wait for the backward pass", _activations(plan)),
        ("notes", "Notes and everything else", _notes(plan)),
    ]
    shown_parts = [(name, heading, body) for name, heading, body in parts if body]
    links = [element("a", heading.split(",")[0], href=f"#{name}") for name, heading, _ in shown_parts]
    title = f"Plan {plan.method} for {plan.cluster}"
    main = element(
        "main", element("h1", title), element("p", _facts(plan), class_="dim"), _cards(plan),
        element("nav", *links, aria_label="sections"),
        *(section(name, heading, body) for name, heading, body in shown_parts), id="alpa-main",
    )  # fmt: skip
    skip = element("a", "skip to the plan", href="#alpa-main", class_="skip")
    style, script = element("style", Markup(STYLE)), element("script", Markup(SCRIPT))
    return element("div", style, skip, main, script, class_="alpa")


def _facts(plan: Plan) -> str:
    parts = [f"{plan.num_devices} devices"]
    parts += (
        [f"mesh {stages.meshes(plan)}"] if len(plan.stages) == 1 else [f"{plan.num_stages} stages, {plan.schedule}"]
    )
    return ", ".join([*parts, f"{plan.num_microbatches} micro-batches", f"fingerprint {plan.fingerprint[:12]}"])


def _cards(plan: Plan) -> Markup:
    examples, tokens = summary.batch(plan)
    size = summary.peak(plan)
    cards = [(units.seconds(plan.step_seconds), "predicted step")]
    if plan.step_seconds and tokens:
        cards.append((units.digits(tokens / plan.step_seconds), "tokens a second"))
    if plan.step_seconds and examples:
        cards.append((units.digits(examples / plan.step_seconds), "examples a second"))
    if plan.products.flops:
        cards.append(
            (f"{100 * summary.utilisation(plan):.3g} %", "of the peak: utilisation by the step's own products")
        )
    share = units.percent(size, plan.memory_per_device)
    cards.append((units.nbytes(size), f"per device, {share} of {units.nbytes(plan.memory_per_device)}"))
    return element(
        "div", *(element("div", element("b", b), element("span", s), class_="card") for b, s in cards), class_="cards"
    )


def _chosen(plan: Plan) -> Markup:
    lines: list[str] = []
    for said in words.chosen(plan):  # an indented line goes on with the stages of the one before
        if said.startswith(" "):
            lines[-1] += f"; {said.strip()}"
        else:
            lines.append(said)
    return element("ul", *(element("li", line) for line in lines))


def _compared(plan: Plan) -> Markup | None:
    if not plan.comparisons:
        return None
    own = (plan.num_stages,) if plan.pipelined else plan.stages[0].mesh_shape
    rows: list[tuple[str, str, float | None, float | None, str]] = []
    rows += [("this plan", summary.shape_text(own, plan.pipelined), plan.step_seconds, summary.peak(plan), "chosen")]
    for row in plan.comparisons:
        shape = summary.shape_text(row.mesh_shape, row.name == "pipeline")
        rows.append((row.name, shape, row.step_seconds, row.bytes_per_device, summary.why_not(plan, row)))
    cells = [
        (name, shape, _number(seconds, units.seconds), _number(size, units.nbytes), why)
        for name, shape, seconds, size, why in rows
    ]
    columns = (("method", False), ("mesh", False), ("step", True), ("per device", True), ("", False))
    return table("methods", columns, cells)


def _number(value: float | None, write: Callable[[float], str]) -> tuple[float, str]:
    return (float("inf"), "") if value is None else (value, write(value))


def _meshes(plan: Plan) -> Markup:
    """The mesh of each submesh, once."""
    out = []
    seen: dict[int, list[int]] = {}
    for number, where in enumerate(plan.division.submeshes):
        seen.setdefault(where, []).append(number)
    for where, numbers in seen.items():
        stage = plan.stages[numbers[0]]
        heading = element("h3", f"submesh {where}: {stages.named(numbers)}") if plan.pipelined else None
        out.append(element("div", heading, pictures.mesh(stage, plan.division.first_devices[where])))
    return element("div", *out, class_="row")


def _memory(plan: Plan) -> Markup:
    if len(plan.stages) == 1:
        memory = plan.stages[0].memory
        rows = [("every device", memory.kinds, memory.total)]
    else:
        rows = [(f"submesh {i}", row.kinds, row.peak) for i, row in enumerate(stages.memory(plan))]
    return pictures.stacked(rows, plan.memory_per_device)


def _time(plan: Plan) -> Markup | None:
    """Modules by their seconds, each with its operations."""
    rows = modules.of(plan)
    if not rows:
        return None
    most = max(row.seconds for row in rows)
    out = []
    for row in rows[:_MOST_MODULES]:
        seconds = row.forward, row.backward, row.communication
        pieces = [(name, s, colour) for (name, colour), s in zip(_TIMES, seconds, strict=True)]
        bar = element(
            "div",
            *(
                element("i", style=f"width:{100 * s / most:.3f}%;background:var({c})", title=f"{n}: {units.seconds(s)}")
                for n, s, c in pieces
            ),
            class_="bar", role="img", aria_label=", ".join(f"{n} {units.seconds(s)}" for n, s, _ in pieces),
        )  # fmt: skip
        operations = [element("li", f"{name}: {units.seconds(seconds)}") for name, seconds in row.operations[:12]]
        name = element("details", element("summary", element("code", row.name)), element("ul", *operations))
        share = units.percent(row.seconds, plan.step_seconds)
        out.append(join(name, bar, element("span", f"{units.seconds(row.seconds)}, {share}", class_="number")))
    legend = element("ul", *(element("li", pictures.swatch(c), n) for n, c in _TIMES), class_="legend")
    rest = len(rows) - _MOST_MODULES
    note = "Seconds per step of an average device. Open a module for its operations."
    note += f" {rest} smaller modules are left out." if rest > 0 else ""
    return join(legend, element("div", *out, class_="bars"), element("p", note, class_="dim"))


def _operations(plan: Plan) -> Markup | None:
    """Every operation with the terms of its cost, identical ones of a place as one row."""
    rows = computing.heaviest(plan)
    if not rows:
        return None
    whole = sum(row.total for row in rows)
    cells = []
    for row in rows:
        terms = ((s, units.seconds(s)) for s in (row.flops, row.bytes, row.links, row.latency + row.starts))
        time, share = (row.total, units.seconds(row.total)), (row.total, units.percent(row.total, whole))
        cells.append((row.operation, (row.count, row.count), time, share, row.bound, *terms, row.where))
    columns = (("operation", False), ("count", True), ("time a step", True), ("share", True), ("bound by", False))
    columns = (*columns, *((name, True) for name in computing.BOUNDS), ("where", False))
    note = "Seconds per step of an average device, with the collectives that operations wait for."
    note += f" All of it is bound by {computing.bounds_text(rows)}."
    return join(element("p", note, class_="dim"), table("operation-table", columns, cells, search="Search operations:"))


def _tensors(plan: Plan) -> Markup:
    several = len(plan.stages) > 1
    rows = []
    for number, stage in enumerate(plan.stages):
        for leaf in stage.arguments:
            each = stage.bytes_per_device(leaf)
            cells = (
                element("span", shown(leaf.path), class_="path"), leaf.role, type_text(leaf), units.spec(leaf.spec),
                (leaf.bytes, units.nbytes(leaf.bytes)), (each, units.nbytes(each)), pictures.tiles(stage, leaf),
            )  # fmt: skip
            rows.append((*(((number, number),) if several else ()), *cells))
    columns = [("tensor", False), ("role", False), ("type", False), ("sharding", False), ("whole", True)]
    columns += [("per device", True), ("tiles", False)]
    return table("tensor-table", [*([("stage", True)] if several else []), *columns], rows, search="Search tensors:")


def _collectives(plan: Plan) -> Markup | None:
    if not plan.collectives:
        return None
    rows = [
        (
            c.kind, units.axes(c.axes), (c.bytes, units.nbytes(c.bytes)), (c.count, c.count),
            (seconds, units.seconds(seconds)), (c.stage, c.stage), c.where,
        )
        for c, seconds in zip(plan.collectives, plan.collective_seconds, strict=True)
    ]  # fmt: skip
    columns = (
        ("kind", False),
        ("axes", False),
        ("size each", True),
        ("count", True),
        ("time a step", True),
        ("stage", True),
    )
    return table("collective-table", (*columns, ("where", False)), rows, search="Search collectives:")


def _activations(plan: Plan) -> Markup | None:
    rows = []
    for row in (row for stage in plan.stages for row in stage.held):
        total = row.bytes * row.count
        rows.append(
            (
                row.where, row.operation, units.type_name(row.dtype, row.shape), units.spec(row.spec),
                (row.count, row.count), (row.bytes, units.nbytes(row.bytes)), (total, units.nbytes(total)),
            )
        )  # fmt: skip
    columns = (("where", False), ("operation", False), ("type", False), ("layout", False), ("count", True))
    columns = (*columns, ("per device, each", True), ("all", True))
    return table("activation-table", columns, rows, search="Search activations:") if rows else None


def _notes(plan: Plan) -> Markup:
    lines = [*plan.verification, *plan.rewrites, *plan.notes]
    details = element("details", element("summary", "Everything as text"), element("pre", text.render(plan)))
    return join(element("ul", *(element("li", line) for line in lines)) if lines else None, details)
