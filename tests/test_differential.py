"""The differential test itself: it is deterministic, it finds what is wrong, and some seeds of it find nothing.

`python -m benchmarks run differential` runs as many programs as there is time for.
"""

import collections
import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.passes.lowering import lowering
from benchmarks.harness import AT
from benchmarks.numerics import differential
from benchmarks.random_steps import contests
from benchmarks.random_steps.contests import Contest
from benchmarks.random_steps.prelude import PRELUDE
from benchmarks.random_steps.program import Builder, Line, Program, Value
from tests.marks import one_in

KEPT = json.loads((Path(__file__).parent / "random_programs.json").read_text())
"""Programs that were planned and run wrongly, and two that were not, by the seeds that once made them."""


def kept(seed: str) -> tuple[Program, Contest]:
    """A program of the file, and how it is planned."""

    def value(of: Any) -> Value:
        return Value(**of | {"shape": tuple(of["shape"])})

    program, contest = KEPT[seed]["program"], KEPT[seed]["contest"]
    lines = tuple(
        Line(**line | {"value": value(line["value"]), "reads": tuple(line["reads"])}) for line in program["lines"]
    )
    program |= {where: tuple(map(value, program[where])) for where in ("state", "batch")}
    program |= {"lines": lines, "outputs": tuple(program["outputs"]), "updates": tuple(map(tuple, program["updates"]))}
    pairs = {
        "specs": tuple(map(tuple, contest["specs"])),
        "returned": contest["returned"] and tuple(contest["returned"]),
    }
    return Program(**program), Contest(**contest | pairs)


@pytest.mark.parametrize("seed", ["9", "735"])
def test_programs_are_planned_as_jit_runs_them(seed):
    assert differential.run(*kept(seed)).leaves


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(4, range(1000, 1024, 6)))
def test_more_programs(first):
    counts = differential.search(range(first, first + 6), 100, 0)
    assert not counts.failures
    assert sum(counts.leaves.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", list(KEPT)[2:])
def test_programs_that_went_wrong(seed):
    """In order, what was wrong.

    A plan was not replayed, as a method fixed what was no choice; a pipeline sharded arrays without elements; what was
    sent in twice the width was taken for another payload; a loop of two results was taken for a part of a softmax;
    a stage sent what another waited for in its backward pass, since it read it there, too; and what is gathered in each
    run of a loop and again after it, once as it is compiled, was missed; a loop of unknown trip count was counted four
    times in the compiled program, as its scope stood within `jvp(...)`; arguments of eight bits were not disturbed.
    """
    assert differential.run(*kept(seed)).leaves


def test_seeds_make_programs_that_jax_runs():
    for seed in range(8):
        program, contest = differential.made(seed)
        again, same = differential.made(seed)
        assert (program.source(), contest) == (again.source(), same)
        jax.eval_shape(program.function(), *program.arguments())
        compile(program.script(contest.script(program)), "script", "exec")


def test_a_wrong_operation_is_found_and_its_program_made_shorter(monkeypatch):
    form_of = lowering.local_form

    def broken(op, *args):
        form = form_of(op, *args)
        if form is None or op.name != "tanh" or not any(axes for layout in form.results for axes in layout.dims):
            return form
        return differential.dataclasses.replace(form, own=lambda x: [jnp.tanh(x) * 1.01])

    monkeypatch.setattr(lowering, "local_form", broken)
    b = Builder(0)
    h = b.leaf("batch", (8, 8))
    for source in ("{} * 2", "jnp.tanh({})", "jnp.sin({})"):
        h = b.add("line", source.format(h.name), [h])
        assert h is not None
    b.leaf("state", ())
    program = b.finished(False, "threefry2x32", (h.name,))
    specs = (("batch['b0']", "P('x')"),)
    method = "method=alpa_lite.Manual(SPECS, mesh_shape=(8,), axis_names=('x',)), verify='off'"
    contest = Contest("manual", method, False, specs)
    with pytest.raises(differential.Failure, match=r"first call|Differs") as found:
        differential.run(program, contest)
    shorter, failure = differential.shorter(program, contest, found.value, 20)
    assert failure.where == "first call"
    assert sum("tanh" in line.source for line in shorter.lines) == 1
    assert len(shorter.lines) < len(program.lines)
    assert PRELUDE in shorter.script("")


TABLE = differential.BENCHMARKS[0].path
FEATURES = ("reference", "effect", "ordered effect", "whole-batch loop", "low-bit type", "returned array in two places")


def committed(back: int) -> dict[str, dict[str, int]]:
    """Features by count for each version, as of the commit that changed the table `back` changes ago."""
    run = ["git", "-C", str(Path(__file__).parents[1])]
    name = "benchmarks/results/differential.json"
    log = subprocess.run([*run, "log", "--format=%H", "--", name], capture_output=True, text=True, check=False)
    commits = log.stdout.split()
    if len(commits) <= back:
        pytest.skip("the history of the table is not in this checkout")
    text = subprocess.run([*run, "show", f"{commits[back]}:{name}"], capture_output=True, text=True, check=True)
    return {version: row["kinds"] for version, row in json.loads(text.stdout).items() if version != "faults"}


def test_the_table_only_grows() -> None:
    now = {version: row["kinds"] for version, row in json.loads(TABLE.read_text()).items() if version != "faults"}
    for back in (0, 1):
        for version, kinds in committed(back).items():
            fewer = {kind for kind, count in kinds.items() if now.get(version, {}).get(kind, 0) < count}
            assert not fewer, (version, fewer)


def test_the_table_has_every_feature() -> None:
    known = json.loads(TABLE.read_text())
    total: collections.Counter[str] = collections.Counter()
    for version, row in known.items():
        total.update({} if version == "faults" else row["kinds"])
    settings = [f"setting: {name}" for name in contests.SETTINGS]
    assert not {feature for feature in (*FEATURES, *settings) if not total[feature]}


def test_counts_are_added() -> None:
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for seeds in ("0-2", "2-4"):
        counts = differential.Counts(kinds=collections.Counter({"effect": 2}))
        differential.added(rows, f"{seeds}{AT}jax 1", vars(counts))
    assert rows["jax 1"]["kinds"] == {"effect": 4}
