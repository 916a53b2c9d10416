"""Random programs, planned by random methods, against plain `jit`: every leaf, replayed plans, checks and reports.

Each seed makes one program (`random_steps`) and one way to plan it: a method, a mesh of 8, 4 x 2 or 2 x 2 x 2
virtual CPU devices or submeshes of them, micro-batches, communication, and what is verified. What is compared:

- two calls, the second on the state that the first returned, with plain `jit` on copies, per leaf. The tolerances are
  those of `alpa_lite.check`: rounding by dtype, else thirty times what a change of the arguments in their last place
  does to the leaf;
- callbacks run as often as under plain `jit`, and the second call may run under another setting of JAX, or with an
  array of the state that the first returned in the batch, too;
- `alpa_lite.check`, which looks for its own differences operation by operation;
- the library's verification: collectives of the lowered program, and of the compiled one, are those of the plan;
- the plan, saved, loaded and run again without solving, gives the same bits; summaries and explanations do not raise.

A refusal that says what cannot be done (`InfeasibleError`, `MicrobatchError`, `OptionError`) is counted, by its words,
and is no failure; so is what plain `jit` does not run. A program that fails is made shorter, and printed as a script.

    python -m benchmarks run differential 0-100 -o seconds=600 -o scripts=FOLDER

adds its counts to benchmarks/results/differential.json, with scripts of failing programs in a folder. What was found is
listed in the same file by hand, under "faults".
"""

from __future__ import annotations

import collections
import dataclasses
import faulthandler
import gc
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import alpa_lite
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from benchmarks.harness import AT, Benchmark, Row
from benchmarks.random_steps.comparison import Conditioning, Failure, compare, copied, failure, guarded, words
from benchmarks.random_steps.contests import FREE_LINKS, Contest, made, reductions
from benchmarks.random_steps.program import Program

REFUSALS = (InfeasibleError, MicrobatchError, OptionError)


@dataclass
class Counts:
    """Of programs: by method, by kind of line, by refusal; failures with what they say."""

    programs: collections.Counter[str] = field(default_factory=collections.Counter)
    leaves: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of one program."""

    leaves: int = 0
    refusal: str = ""


class Refused(Exception):
    """A program is not run, for a reason that is no failure."""


def run(program: Program, contest: Contest) -> Outcome:
    """Plans, runs and compares a program.

    Raises:
      Failure: what is wrong.
    """
    outcome = Outcome()
    try:
        _compare_all(program, contest, outcome)
    except Refused as refusal:
        outcome.refusal = str(refusal)
    return outcome


def _compare_all(program: Program, contest: Contest, outcome: Outcome) -> None:
    """Counts the leaves of all comparisons; raises `Refused` as soon as something cannot be done."""
    step, fresh = program.function(), program.arguments  # calls may donate what they are given
    jitted = jax.jit(step)
    want, calls = _plain_jit(step, lambda: jitted(*fresh()))
    planned = contest.parallelized(program, step)
    try:
        compiled, _ = _planned("planning and running", lambda: planned.prepare_call(fresh(), {}))
        got = _planned("planning and running", lambda: planned(*fresh()))
    except Refused as refusal:
        if (budget := getattr(refusal.__cause__, "smallest_budget", None)) is not None:
            outcome.leaves = _least_memory(program, contest, step, fresh, budget, want)
        raise
    _same_calls("first call", _calls(step), calls)
    first = jax.tree.map(lambda leaf: leaf, got)
    conditioning = Conditioning(compiled.source)
    outcome.leaves += compare("first call", first, want, fresh, conditioning)
    kept = jax.tree.map(words, jax.tree.map(copied, got))
    again = jax.tree.map(copied, got[0])
    _calls(step)  # conditioning, too, runs callbacks
    with contest.context():
        want, calls = _plain_jit(step, lambda: jitted(*contest.arguments(again, fresh()[1])))
        got = _planned("second call", lambda: planned(*contest.arguments(got[0], fresh()[1])))
        _same_calls("second call", _calls(step), calls)
        given = lambda: contest.arguments(again, fresh()[1])  # noqa: E731
        if contest.setting:
            conditioning = Conditioning(planned.prepare_call(given(), {})[0].source)
        outcome.leaves += compare("second call", got, want, given, conditioning)
    checked = guarded("check", lambda: alpa_lite.check(planned, *fresh()))
    if not checked:
        raise Failure("check", f"Checked {checked}")
    outcome.leaves += len(checked.leaves)
    plan = planned.plan(*fresh())
    outcome.leaves += _replayed(plan, step, contest, fresh(), kept)
    guarded("reports", lambda: _report(plan, contest, program))


def _plain_jit(step: Any, call: Callable[[], Any]) -> tuple[Any, int]:
    """The results under plain `jit`, and the calls of callbacks."""
    try:
        return call(), _calls(step)
    except Exception as error:
        raise Refused(f"plain jit: {_plain(str(error))}") from error


def _planned(where: str, call: Callable[[], Any]) -> Any:
    """The results of the planned step, unless it is refused."""
    try:
        return call()
    except REFUSALS as refusal:
        raise Refused(f"{type(refusal).__name__}: {_plain(str(refusal))}") from refusal
    except Exception as error:
        raise failure(where, error) from error


def _calls(step: Any) -> int:
    """The calls of callbacks since it was asked last."""
    jax.effects_barrier()
    calls = step.__globals__.get("CALLS", [])
    count = len(calls)
    calls.clear()
    return count


def _same_calls(where: str, mine: int, others: int) -> None:
    """Raises Failure unless callbacks ran as often as under plain `jit`."""
    if mine != others:
        raise Failure(where, f"Effects differ: {mine} calls, {others} under plain jit")


def _least_memory(program: Program, contest: Contest, step: Any, fresh: Any, budget: float, want: Any) -> int:
    """The least memory that an error names is enough."""
    options = re.sub(r"memory_per_device=\d+", f"memory_per_device={int(budget) + 1}", contest.options)
    if options == contest.options:
        return 0
    planned = dataclasses.replace(contest, options=options).parallelized(program, step)
    got = guarded("the least memory that an error names", lambda: planned(*fresh()))
    compiled, _ = planned.prepare_call(fresh(), {})
    return compare("first call", got, want, fresh, Conditioning(compiled.source))


def _replayed(plan: Any, step: Any, contest: Contest, args: Any, kept: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        loaded = alpa_lite.Plan.load(file)
        if loaded != plan or hash(loaded) != hash(plan):
            raise Failure("replay", "Loaded plan differs from the saved one")
        more: dict[str, Any] = {"cluster": FREE_LINKS} if "FREE_LINKS" in contest.options else {}
        if "'compiler'" in contest.options:
            more["communication"] = "compiler"
        got = guarded("replay", lambda: alpa_lite.parallelize(step, plan=file, **more)(*args))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(kept), strict=True):
        has_nan = jax.numpy.issubdtype(b.dtype, np.inexact)
        if not np.array_equal(np.asarray(words(a)), np.asarray(b), equal_nan=has_nan):
            raise Failure("replay", f"Differs from the first run: {jax.tree_util.keystr(path)}")
    return len(jax.tree.leaves(kept))


def _report(plan: Any, contest: Contest, program: Program) -> None:
    """Everything that a plan prints; comparisons with other methods, which are planned for it, now and then."""
    texts = [repr(plan), plan.details(), plan.activations(), plan.diff(plan)]
    if contest.reports:
        texts.append(str(plan))
    with tempfile.TemporaryDirectory() as folder:
        if contest.reports:
            plan.to_html(Path(folder) / "plan.html")
        if plan.is_pipelined:
            plan.save_timeline(Path(folder) / "timeline.json")
    known = {leaf.path for stage in plan.stages for leaf in stage.arguments}
    for leaf in program.state[:2]:
        if f"state/{leaf.name}" in known:  # pipelines do not hold what the step hands through
            texts.append(plan.explain(f"state['{leaf.name}']"))
    for stage in plan.stages:
        for decision in stage.decisions[:2]:
            if decision.name in texts[1]:
                texts.append(plan.explain(decision.name))
    if not all(texts[:2]):
        raise Failure("reports", "Empty text")


def _plain(message: str) -> str:
    """An error's message without its numbers and places."""
    first = message.split("\n")[0]
    return re.sub(r"\b[vsb]?\d[\d.,]*\b", "#", re.sub(r"program_\d+", "program", first))[:160]


def shorter(program: Program, contest: Contest, found: Failure, seconds: float) -> tuple[Program, Failure]:
    """The program with as few lines and outputs as still fail in the same way."""
    end, changed = time.monotonic() + seconds, True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in reductions(program):
            if time.monotonic() > end:
                break
            try:
                guarded("comparing", lambda smaller=smaller: run(smaller, contest))
            except Failure as other:
                if other.kind == found.kind:
                    program, found, changed = smaller, other, True
                    break
    return program, found


def search(seeds: range, seconds: float, shrink: float, folder: Path | None = None) -> Counts:
    """Runs the programs of seeds until the time is up."""
    counts = Counts()
    end = time.monotonic() + seconds
    for number, seed in enumerate(seeds):
        if time.monotonic() > end:
            break
        faulthandler.dump_traceback_later(400, exit=True, file=sys.__stderr__ or sys.stderr)
        program, contest = made(seed)
        print(f"{seed} {contest.method}, {len(program.lines)} lines", file=sys.stderr, flush=True)
        counts.programs[contest.method] += 1
        counts.kinds.update(line.kind for line in program.lines)
        counts.kinds.update(contest.features())
        try:
            outcome = guarded("comparing", lambda program=program, contest=contest: run(program, contest))
        except Failure as found:
            program, found = shorter(program, contest, found, shrink)
            script = program.script(contest.script(program))
            counts.failures.append(
                {"seed": seed, "method": contest.method, "where": found.where, "message": found.message[:1500]}
            )
            print(f"FAILURE seed {seed} {contest.method} {found.where}: {found.message[:1500]}\n")
            print(f"{program.source()}\n{contest.text(program)}\n", flush=True)
            if folder is not None:
                folder.mkdir(exist_ok=True)
                (folder / f"{seed}.py").write_text(script)
        else:
            counts.leaves[contest.method] += outcome.leaves
            if outcome.refusal:
                counts.refused[contest.method] += 1
                counts.refusals[outcome.refusal] += 1
        if number % 12 == 11:
            jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530
            gc.collect()
    faulthandler.cancel_dump_traceback_later()
    return counts


def measure(case: str, seconds: float = 600, shrink: float = 60, scripts: str | None = None) -> Row:
    """Runs the programs of a range of seeds; counts.

    Args:
      seconds: no program begins later. shrink: seconds to make a failing program shorter.
      scripts: a folder for scripts of failing programs.
    """
    first, last = map(int, case.split("-"))
    counts = search(range(first, last), seconds, shrink, Path(scripts) if scripts else None)
    return vars(counts) | (
        {"status": f"failed: seeds {[one['seed'] for one in counts.failures]}"} if counts.failures else {}
    )


def added(rows: dict[str, Any], name: str, row: Row) -> None:
    """Adds the counts of a row to those of its version of JAX."""
    if "programs" not in row:  # its process was ended
        return
    version = rows.setdefault(name.partition(AT)[2], {})
    for counter in ("programs", "leaves", "refused", "kinds", "refusals"):
        total = collections.Counter(version.get(counter, {})) + collections.Counter(row[counter])
        version[counter] = dict(sorted(total.items()))
    version["failing programs"] = version.get("failing programs", 0) + len(row["failures"])
    version["environment"] = row.get("environment", {})


BENCHMARKS = (
    Benchmark(
        "differential", lambda: ["0-100"], measure, devices=8, quickly=True, versions=True, merge=added, is_open=True,
        limit=86400,
    ),
)  # fmt: skip
