"""The frame of every benchmark: cases in processes of their own, rows that keep their origin, and pages.

A module of this package declares `BENCHMARKS`. Each names its cases and measures one of them as a *row* of figures.
`pages/NAME.md` is a template (Jinja) that shows all rows. `results/NAME.json` has the rows by case; each also has

    status        "finished", or why its process failed or was ended
    wall_seconds, load_before, peak_gib
    environment   date, commit of the library, versions of JAX and Python, and the host

so that a row says whether it is stale: whether the sources that it depends on have changed since its commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import html
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

Row = dict[str, Any]
Rows = Mapping[str, Row]

ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "pages"
LIBRARY = ("alpa_lite", "passes", "runtime", "models")
AT = " @ "
"""Between the name of a case and the variant that its row is of: a version of JAX, or a compiler."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "planning": {"planning": "planning", "equal_plans": "plans"},
    "quality": {
        "pipelines": "plans", "published": "published", "scanned": "scanned", "token_published": "slices",
    },
    "numerics": {
        "pipeline_correctness": "numerics.pipelines", "token_correctness": "numerics.tokens",
        "process_correctness": "numerics.processes", "differential": "numerics.differential",
    },
    "runtime": {
        "by_hand": "runtime.steps", "calibration": "runtime.steps", "overhead": "runtime.calls",
        "pipeline_overhead": "runtime.tasks", "processes": "runtime.tasks", "kills": "runtime.kills",
    },
    "memory": {"stage_memory": "compilers"},
    "compilers": {"bytes_accessed": "compilers", "target_compilers": "compilers"},
    "pages": {"pictures": "pictures"},
}  # fmt: skip
"""The benchmarks by what they tell, each with its module, which is imported when it is needed."""
NAMES: Mapping[str, str] = {name: module for group in GROUPS.values() for name, module in group.items()}


@dataclass(frozen=True)
class Benchmark:
    """A measurement.

    Attributes:
      name: of its results, and of the template in `pages/` that shows them.
      cases: the names of all cases.
      measure: (case, **options) to a row.
      view: of the rows that finished, further values for the template.
      parts: further measures of a case, each in a process of its own; its result is the row's item of that name.
      devices: virtual CPU devices of a process, or none; 0 for the accelerators of this machine.
      quickly: whether programs are compiled without most optimisations.
      settings: environment variables of a process, given the options.
      limit, memory: seconds and GiB of a case.
      versions: whether rows of several versions of JAX are kept side by side. A row that has a `variant`, such as a
        compiler, is kept beside those of others.
      together: the process of a case; cases of one process are measured one after another.
      merge: puts a new row among the rows; it replaces one of the same name by default.
      sources: the folders whose changes make a row stale.
      is_open: whether any text is a case, such as a range of seeds.
    """

    name: str
    cases: Callable[[], Iterable[str]]
    measure: Callable[..., Row]
    view: Callable[[Rows], Mapping[str, Any]] = lambda rows: {}
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    devices: int | None = None
    quickly: bool = False
    settings: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda options: {}
    limit: float = 900.0
    memory: float = 16.0
    versions: bool = False
    together: Callable[[str], str] = lambda case: case
    merge: Callable[[dict[str, Any], str, Row], None] = lambda rows, name, row: rows.update({name: row})
    sources: Sequence[str] = LIBRARY
    is_open: bool = False

    @property
    def path(self) -> Path:
        """The file of its rows."""
        return RESULTS / f"{self.name}.json"

    @property
    def title(self) -> str:
        """The first line of its page."""
        return (PAGES / f"{self.name}.md").read_text().splitlines()[0].removeprefix("# ")

    def key(self, case: str) -> str:
        """The name of a case's row under the JAX that is installed."""
        return case + AT + jax_version() if self.versions else case

    def chosen(self, wanted: Sequence[str]) -> list[str]:
        """The cases that are named, or contain a text that names none; all if nothing is wanted.

        Raises:
          ValueError: a text is in no case.
        """
        cases = list(self.cases())
        found = [
            case for text in wanted for case in ([text] if text in cases else [case for case in cases if text in case])
        ]
        if self.is_open:
            found += [text for text in wanted if not any(text in case for case in cases)]
        elif missing := [text for text in wanted if not any(text in case for case in cases)]:
            raise ValueError(f"{self.name} has no case {', '.join(missing)}; it has {', '.join(cases)}")
        return list(dict.fromkeys(found)) if wanted else cases


def get(name: str) -> Benchmark:
    """The benchmark of a name."""
    return next(one for one in importlib.import_module(f"benchmarks.{NAMES[name]}").BENCHMARKS if one.name == name)


def named(name: str) -> list[str]:
    """The names of the benchmarks of a group, or of one benchmark. The benchmark goes first: "planning" is both."""
    return [name] if name in NAMES else list(GROUPS[name])


# -- rows -------------------------------------------------------------------------------------------------------------


@functools.cache
def jax_version() -> str:
    """The version of JAX that is installed, as rows name it."""
    return f"jax {metadata.version('jax')}"


def environment() -> Row:
    """The origin of a row that this process measures."""
    import alpa_lite

    root = Path(alpa_lite.__file__).resolve().parents[1]
    changed = bool(_git("status", "--porcelain", "--", *LIBRARY, root=root))
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
        "commit": (_git("rev-parse", "--short", "HEAD", root=root) or "unknown") + "+" * changed,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _git(*arguments: str, root: Path = ROOT) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def load(benchmark: Benchmark) -> dict[str, Row]:
    """The rows that are kept."""
    return json.loads(benchmark.path.read_text()) if benchmark.path.exists() else {}


@contextlib.contextmanager
def changed(benchmark: Benchmark) -> Iterator[dict[str, Row]]:
    """The rows, to change in place; other processes wait. Rows and page are written at the end."""
    RESULTS.mkdir(exist_ok=True)
    with benchmark.path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = json.loads(file.read() or "{}")
        yield rows
        file.truncate(0)
        file.write(dumped(rows))
        write_page(benchmark, rows)


def dumped(rows: Rows) -> str:
    """Rows as JSON, a line each."""
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def keep(benchmark: Benchmark, case: str, row: Row, part: str = "") -> None:
    """Puts the row of a case, or of a part of it, among the rows that are kept."""
    variant = row.pop("variant", None)
    name = benchmark.key(case) if variant is None else case + AT + variant
    with changed(benchmark) as rows:
        if part:
            rows[name] = {"status": "not measured"} | rows.get(name, {}) | {part: row.get("value", row["status"])}
        else:
            before = {key: value for key, value in rows.get(name, {}).items() if key in benchmark.parts}
            benchmark.merge(rows, name, before | row)


def case_of(name: str) -> str:
    """The case of a row."""
    return name.partition(AT)[0]


def by_variant(rows: Rows) -> dict[str, dict[str, Row]]:
    """Rows by version of JAX or compiler, and then by case."""
    out: dict[str, dict[str, Row]] = {}
    for name, row in rows.items():
        if isinstance(row, dict):
            case, _, variant = name.partition(AT)
            out.setdefault(variant, {})[case] = row
    return dict(sorted(out.items()))


# -- reports ----------------------------------------------------------------------------------------------------------


@functools.cache
def changes_since(commit: str, sources: Sequence[str]) -> int | None:
    """Commits since one that change the sources; None if it is not in this history."""
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *sources)
    return int(count) if count else None


def age(benchmark: Benchmark, row: Row) -> int | None:
    """Commits that have changed the sources of a row since it was measured; None if nobody knows."""
    commit = row.get("environment", {}).get("commit", "").rstrip("+")
    return changes_since(commit, tuple(benchmark.sources)) if commit else None


def standing(benchmark: Benchmark) -> list[Any]:
    """A line of the report: rows, cases without one, failures, dates, and how many rows are stale."""
    rows = {name: row for name, row in load(benchmark).items() if isinstance(row, dict)}
    cases = set(benchmark.cases())
    ages = [age(benchmark, row) for row in rows.values()]
    dates = sorted({row.get("environment", {}).get("date", "unknown") for row in rows.values()})
    stale = [-1 if n is None else n for n in ages if n != 0]
    most = "commit unknown" if -1 in stale else f"by at most {max(stale, default=0)} commits"
    return [
        benchmark.name, len(rows), 0 if benchmark.is_open else len(cases - {case_of(name) for name in rows}),
        sum(map(has_failed, rows.values())),
        " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "-", f"{len(stale)}, {most}" if stale else "none",
    ]  # fmt: skip


def report(names: Iterable[str]) -> list[str]:
    """Writes the pages of benchmarks anew from their rows; returns a table of what is stale, missing or failed."""
    lines = []
    for name in names:
        benchmark = get(name)
        write_page(benchmark, load(benchmark))
        lines.append(standing(benchmark))
    return table("benchmark | rows | cases without one | failed | measured | stale rows", lines)


def has_failed(row: Any) -> bool:
    """Whether a row is one without figures."""
    return isinstance(row, dict) and row.get("status", "finished") != "finished"


def write_page(benchmark: Benchmark, rows: Rows) -> None:
    """Writes `results/NAME.md` of the rows that finished, and names the others."""
    if text := page(benchmark, rows):
        benchmark.path.with_suffix(".md").write_text(text)


def page(benchmark: Benchmark, rows: Rows) -> str:
    """The page of some rows; empty if none finished."""
    wrong = {name: row["status"] for name, row in rows.items() if has_failed(row)}
    rows = {name: row for name, row in rows.items() if name not in wrong}
    origins = [row["environment"] for row in rows.values() if isinstance(row, dict) and "environment" in row]
    made = sorted({", ".join(f"{key} {value}" for key, value in sorted(origin.items())) for origin in origins})
    if not rows:
        return ""
    values = {"rows": rows, "variants": by_variant(rows), "cases": list(benchmark.cases()), **benchmark.view(rows)}
    body = templates().get_template(f"{benchmark.name}.md").render(values)
    lines = [aligned(body), "", *(f"- {name}: {status}" for name, status in wrong.items()), ""]
    lines += (
        ["Measured with:", "", *(f"- {one}" for one in made)] if made[1:] else [f"Measured: {one}." for one in made]
    )
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


@functools.cache
def templates() -> jinja2.Environment:
    """The templates of pages, with the filters that they use."""
    from alpa_lite.ir.units import nbytes

    loader = jinja2.FunctionLoader(lambda name: (PAGES / name).read_text())
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"f": show, "html": html.escape, "nbytes": nbytes, "median": statistics.median}
    made.tests["near"] = is_near
    return made


def show(value: float | None, form: str = ".2f") -> str:
    """A number in a form of `format`, "-" for None."""
    return "-" if value is None else format(value, form)


def is_near(value: Any) -> bool:
    """Whether a ratio, or that of a pair, is within 25 % of one."""
    ratio = value[0] / value[1] if isinstance(value, list) else value
    return abs(ratio - 1) <= 0.25


NUMBER = re.compile(r"[-+~]?[\d,.]+(e[-+]?\d+)?( ?[%A-Za-z]{1,3})?|-?")
"""A cell that is a number, with its unit."""


def aligned(text: str) -> str:
    """Markdown whose tables have lines below their heads; columns of numbers are aligned to the right."""

    def with_marks(found: re.Match[str]) -> str:
        head, *rows = found[0].splitlines()
        if rows and rows[0].startswith("|--"):
            return found[0]
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
        columns = zip(*cells, strict=True) if cells else [()] * (head.count("|") - 1)
        marks = ["--:" if column and all(NUMBER.fullmatch(cell) for cell in column) else "---" for column in columns]
        return "\n".join([head, f"|{'|'.join(marks)}|", *rows, ""])

    return re.sub(r"(?:^\|.*(?:\n|$))+", with_marks, text, flags=re.MULTILINE)


def table(head: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table of Markdown; None is an empty cell."""
    cells = [["" if cell is None else str(cell).replace("|", "/") for cell in row] for row in rows]
    return aligned("\n".join(f"| {' | '.join(row)} |" for row in (head.split(" | "), *cells))).splitlines()
