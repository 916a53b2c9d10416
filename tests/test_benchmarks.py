"""The tool of the benchmarks: rows that are kept and merged, processes that are ended, and what is stale."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, workers
from benchmarks.harness import AT, Benchmark

EXAMPLE = Benchmark(
    "example", lambda: ["one", "two"], lambda case, **options: {"figure": len(case)} | options,
    parts={"part": lambda case: case.upper()},
)  # fmt: skip
PAGES = harness.PAGES
PAGE = """# An example

| case | figure |
{% for name, row in rows.items() %}
| {{ name }} | {{ row.get("figure", "") }} |
{% endfor %}
"""


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "example.md").write_text(PAGE)
    monkeypatch.setattr(harness, "PAGES", tmp_path / "pages")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path


def test_every_benchmark_is_declared_under_its_name_and_has_a_page_of_its_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(harness, "PAGES", PAGES)
    for name in harness.NAMES:
        benchmark = harness.get(name)
        assert benchmark.name == name and benchmark.title and list(benchmark.cases())
        rows = Path(harness.__file__).parent / "results" / f"{name}.json"
        if rows.exists():
            assert harness.page(benchmark, json.loads(rows.read_text()))


def test_a_row_replaces_that_of_its_case_and_keeps_its_parts(results: Path) -> None:
    harness.keep(EXAMPLE, "one", {"figure": 1, "old": 2})
    harness.keep(EXAMPLE, "one", {"status": "finished", "value": "ONE"}, "part")
    harness.keep(EXAMPLE, "one", {"figure": 3, "environment": {"date": "today"}})
    assert harness.load(EXAMPLE) == {"one": {"figure": 3, "part": "ONE", "environment": {"date": "today"}}}
    page = (results / "example.md").read_text()
    assert "| one | 3 |" in page and "Measured: date today." in page


def test_a_page_shows_rows_that_finished_and_names_the_others(results: Path) -> None:
    for name, status in (("one", "finished"), ("two", "not finished: time limit")):
        harness.keep(EXAMPLE, name, {"figure": 1, "status": status})
    page = (results / "example.md").read_text()
    assert "| one | 1 |" in page and "| two" not in page and "- two: not finished: time limit" in page


def test_rows_of_several_versions_and_compilers_stand_side_by_side() -> None:
    versions = dataclasses.replace(EXAMPLE, versions=True)
    harness.keep(versions, "one", {"figure": 1})
    harness.keep(EXAMPLE, "one", {"figure": 2, "variant": "a compiler"})
    found = harness.by_variant(harness.load(EXAMPLE))
    assert found == {harness.jax_version(): {"one": {"figure": 1}}, "a compiler": {"one": {"figure": 2}}}
    assert AT not in "one"


def test_cases_are_named_by_a_part_of_their_names() -> None:
    assert EXAMPLE.chosen(()) == ["one", "two"] and EXAMPLE.chosen(["tw", "o"]) == ["two", "one"]
    with pytest.raises(ValueError, match="example has no case three; it has one, two"):
        EXAMPLE.chosen(["three"])
    assert dataclasses.replace(EXAMPLE, is_open=True).chosen(["7-9"]) == ["7-9"]


def test_a_process_measures_and_a_case_that_raises_does_not_end_it(tmp_path: Path, monkeypatch: Any) -> None:
    def measure(case: str, **options: Any) -> dict[str, Any]:
        return {"figure": 1 / (case != "one")}

    monkeypatch.setattr(workers, "get", lambda name: dataclasses.replace(EXAMPLE, measure=measure))
    monkeypatch.setattr(workers, "prepare", lambda *_, **__: None)
    for part in ("", "part"):
        workers.child(json.dumps(["example", str(tmp_path / "out"), part, {}, "", ["one", "two"]]))
    first, second, third, _ = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert first[0] == "one" and first[1]["status"] == "failed: ZeroDivisionError: division by zero"
    assert second[1]["figure"] == 1 and set(second[1]["environment"]) == {"date", "jax", "python", "commit", "host"}
    assert third[1]["value"] == "ONE"


@pytest.mark.parametrize(
    ("program", "limit", "status"),
    [
        ("import sys; sys.exit(3)", 60.0, "failed: exit code 3"),
        ("import time; time.sleep(60)", 0.3, "not finished: time limit"),
    ],
)
def test_a_process_that_ends_early_or_takes_too_long_fails_its_case(
    tmp_path: Path, program: str, limit: float, status: str
) -> None:
    out = tmp_path / "out"
    out.write_text(json.dumps(["one", {"figure": 1}]) + "\n")
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    (case, row), (last, end) = workers._watch(process, out, limit, 16)
    assert (case, row["figure"], row["status"]) == ("one", 1, "finished")
    assert (last, end["status"]) == ("", status) and process.poll() is not None


def test_a_row_is_stale_once_its_sources_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str, root: Path = tmp_path) -> str:
        command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    monkeypatch.setattr(harness, "_git", git)
    git("init", "-q")
    commits = []
    for name in ("passes", "docs", "passes"):
        (tmp_path / name).write_text(str(len(commits)))
        git("add", ".")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "--short", "HEAD"))
    benchmark = dataclasses.replace(EXAMPLE, sources=("passes",))
    ages = [harness.age(benchmark, {"environment": {"commit": one}}) for one in (*commits, commits[2] + "+", "zzz")]
    assert ages == [1, 1, 0, 0, None] and harness.age(benchmark, {}) is None
    harness.keep(benchmark, "one", {"environment": {"commit": commits[0], "date": "2026-01-01"}})
    assert harness.standing(benchmark) == ["example", 1, 1, 0, "2026-01-01", "1, by at most 1 commits"]


def test_tables_align_numbers() -> None:
    lines = harness.table("name | value | of", [["a|b", "1.5 s", "8 x 2"], ["c", "-", None]])
    assert lines == ["| name | value | of |", "|---|--:|---|", "| a/b | 1.5 s | 8 x 2 |", "| c | - |  |"]
