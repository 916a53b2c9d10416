"""Random programs, planned by random methods, against plain `jit`: every leaf, replayed plans, checks and reports.

Each seed makes one program (`random_programs`) and one way to plan it: a method, a mesh of 8, 4 x 2 or 2 x 2 x 2
virtual CPU devices or submeshes of them, micro-batches, communication, and what is verified. What is compared:

- two calls, the second on the state that the first returned, with plain `jit` on copies, per leaf. The tolerances are
  those of `alpa_lite.check`: rounding by dtype, else thirty times what a change of the arguments in their last place
  does to the leaf;
- from seed 1,000,000 on, callbacks run as often as under plain `jit`, and the second call may run under another
  setting of JAX, or with an array of the state that the first returned in the batch, too (`random_further`);
- `alpa_lite.check`, which looks for its own differences operation by operation;
- the library's verification: collectives of the lowered program, and of the compiled one, are those of the plan;
- the plan, saved, loaded and run again without solving, gives the same bits; summaries and explanations do not raise.

A refusal that says what cannot be done (`InfeasibleError`, `MicrobatchError`, `OptionError`) is counted, by its words,
and is no failure; so is what plain `jit` does not run. A program that fails is made shorter, and printed as a script.

    PYTHONPATH=. python benchmarks/differential.py --seed 0 --programs 100 --seconds 600

adds its counts to benchmarks/results/differential.json and writes differential.md from all of them. What was found is
listed in the same file by hand, under "faults".
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir import schedules
from alpa_lite.runtime.debug import reference
from benchmarks import random_further, random_operations, virtual_devices
from benchmarks.differential_results import RESULTS, Counts, keep
from benchmarks.random_programs import Program, kinds_of

MESHES = {(8,): ("x",), (4, 2): ("x", "y"), (2, 2, 2): ("x", "y", "z")}
FREE_LINKS = Cluster(
    device="cpu", platform="cpu", devices_per_node=8, memory=1 << 30, peak_flops={"f32": 1e4}, memory_bandwidth=1e4,
    node_link=Link(1e15), tile=1,
)  # fmt: skip
"""Communication costs nothing, so that plans shard what they can."""
REFUSALS = (InfeasibleError, MicrobatchError, OptionError)
_ENLARGED = 30.0
WIDER = 10_000
"""From this seed on, programs have the lines of `random_wider`, too; those of earlier seeds stay what they were."""
FURTHER = 1_000_000
"""From this seed on, programs have the lines and features of `random_further`, too."""


@dataclass(frozen=True)
class Contest:
    """How a program is planned: the name of the method, and options of `parallelize` as text that makes them."""

    method: str
    options: str
    reports: bool
    specs: tuple[tuple[str, str], ...] = ()
    features: random_further.Features = random_further.NO_FEATURES

    def text(self, program: Program) -> str:
        """The options for a program, specs of the leaves alone that it has."""
        paths = {f"{where}['{v.name}']" for where in ("state", "batch") for v in getattr(program, where)}
        specs = ", ".join(f"{path!r}: {spec}" for path, spec in self.specs if path in paths)
        return self.options.replace("SPECS", f"{{{specs}}}")

    def parallelized(self, program: Program, step: Any) -> Any:
        """The planned step."""
        space = {"alpa_lite": alpa_lite, "P": P, "Cluster": Cluster, "FREE_LINKS": FREE_LINKS}
        return alpa_lite.parallelize(step, **eval(f"dict({self.text(program)})", space))

    def script(self, program: Program) -> str:
        """The lines of a script that plan, run and compare."""
        cluster = f"from alpa_lite.cluster import Cluster, Dispatch, Link\nFREE_LINKS = {FREE_LINKS!r}\n"
        return (
            f"import alpa_lite\n{cluster if 'FREE_LINKS' in self.options else ''}"
            f"planned = alpa_lite.parallelize(step, {self.text(program)})\n"
            f"{self._again()}print(alpa_lite.check(planned, state, batch))\n"
        )

    def _again(self) -> str:
        """The lines of a script that show a feature."""
        features = self.features
        if not features.names():
            return ""
        returned = ""
        if features.returned is not None:
            state, batch = features.returned
            returned = f"    batch = {{**batch, {batch!r}: state[{state!r}]}}\n"
        context = random_further.SETTINGS.get(features.setting, "contextlib.nullcontext()")
        return (
            f"import contextlib\nstate, _ = planned(state, batch)\nwith {context}:\n{returned}"
            "    planned(state, batch)\n"
        )


@dataclass(frozen=True)
class Failure(Exception):
    """Something went wrong: where, and what is said."""

    where: str
    message: str

    @property
    def kind(self) -> tuple[str, str]:
        """What a shorter program must fail with, too."""
        return self.where, re.sub(r"\W.*", "", self.message)


@dataclass
class Outcome:
    """What became of one program."""

    leaves: int = 0
    refusal: str = ""


def contest_of(program: Program, seed: int, is_layered: bool) -> Contest:
    """A random way to plan a program."""
    rng = random.Random(seed * 7919 + 1)
    shape = rng.choice(list(MESHES))
    kinds = ["manual"] * 5 + ["textbook"] * 2 + ["sharded"] * 3 + ["small"] * 1
    if is_layered:
        kinds = ["pipeline"] * 5 + ["manual"] * 2 + ["textbook", "sharded", "small", "manual pipeline"]
    kind = rng.choice(kinds)
    options: dict[str, str] = {}
    specs: tuple[tuple[str, str], ...] = ()
    parts = rng.choice((1, 2, 4, 4, 8)) if is_layered else 1
    if "pipeline" in kind:
        stages = rng.choice((2, 2, 2, 3, 4))
        submeshes = rng.choice({
            2: ["((1,), (1,))", "((2,), (2,))", "((4,), (4,))", "((2, 2), (2, 2))", "((4,), (2,))"],
            3: ["((2,), (2,), (2,))", "((4,), (2,), (2,))", "((1,), (1,), (1,))"],
            4: ["((2,), (2,), (2,), (2,))", "((1,), (1,), (1,), (1,))"],
        }[stages])  # fmt: skip
        parts = rng.choice((1, 2, 4, 4, 8))
        schedule = rng.choice(schedules.NAMES)
        if schedule == "interleaved-1f1b":
            parts = stages * rng.choice((1, 2) if stages != 3 else (1,))
        remat = rng.choice(("none", "none", "layer", "selective"))
        method = f"alpa_lite.Pipeline(schedule={schedule!r}, submesh_shapes={submeshes}, remat={remat!r})"
        name = f"pipeline {schedule}"
        if kind == "manual pipeline":
            specs = _specs(program, rng, ("x",), {"x": 2})
            names = ("x", "y") if "(2, 2)" in submeshes else ("x",)
            method = f"alpa_lite.Manual(SPECS, axis_names={names}, rest={method})"
            name = "manual pipeline"
    elif kind == "manual":
        axes = MESHES[shape]
        specs = _specs(program, rng, axes, dict(zip(axes, shape, strict=True)))
        rest = rng.choice(("Sharded()", "Sharded()", "DataParallel()", "Zero(3)", "TensorParallel()", "Zero(1)"))
        method = f"alpa_lite.Manual(SPECS, mesh_shape={shape}, axis_names={axes}, rest=alpa_lite.{rest})"
        name = "manual"
    elif kind == "textbook":
        text = rng.choice(("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()"))
        method, name = f"alpa_lite.{text}", text
    elif kind == "small":
        method, name = f"alpa_lite.Sharded({shape})", "sharded, small memory"
        options["memory_per_device"] = str(rng.choice((2000, 4000, 8000, 20_000)))
    else:
        method, name = f"alpa_lite.Sharded({shape})", "sharded"
    options = {"method": method, **options, "num_microbatches": str(parts)}
    if kind in ("sharded", "manual", "textbook") and rng.random() < 0.6:
        options["cluster"] = "FREE_LINKS"
    if rng.random() < 0.5:
        options["verify"] = "'hlo'"
    if rng.random() < 0.1 and "pipeline" not in kind:
        options["communication"] = "'compiler'"
    if seed >= WIDER and program.feeding != "aliased" and rng.random() < 0.25:
        options["donate_argnums"] = rng.choice(("()", "(0,)", "(0, 1)"))
    if seed >= WIDER and is_layered and rng.random() < 0.15:
        name, specs = "auto", ()
        options |= {"method": "alpa_lite.Auto()", "effort": "'quick'"}
        options.pop("communication", None)
    return Contest(name, ", ".join(f"{k}={v}" for k, v in options.items()), rng.random() < 0.3, specs)


def _specs(
    program: Program, rng: random.Random, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    """Random specs of arguments: paths, and specs as text."""
    found = {}
    for where, leaves in (("state", program.state), ("batch", program.batch)):
        for leaf in leaves:
            if rng.random() < 0.35 or leaf.dtype == "key":
                continue
            free = rng.sample(axes, len(axes))
            spec: list[str] = []
            for size in leaf.shape:
                taken = tuple(free[: rng.choice((0, 1, 1, 2))])
                count = int(np.prod([sizes[a] for a in taken])) if taken else 1
                if not taken or (size % count and rng.random() < 0.97):
                    spec.append("None")
                    continue
                free = free[len(taken) :]
                spec.append(repr(taken[0]) if len(taken) == 1 else repr(taken))
            found[f"{where}['{leaf.name}']"] = f"P({', '.join(spec)})"
    return tuple(found.items())


def run(program: Program, contest: Contest) -> Outcome:
    """Plans, runs and compares a program.

    Raises:
      Failure: what is wrong.
    """
    step, outcome, fresh = program.function(), Outcome(), program.arguments  # calls may donate what they are given
    jitted = jax.jit(step)
    try:
        want = jitted(*fresh())
        calls = _calls(step)
    except Exception as error:
        outcome.refusal = f"plain jit: {_plain(str(error))}"
        return outcome
    planned = contest.parallelized(program, step)
    try:
        compiled, _ = planned.planned(fresh(), {})
        got = planned(*fresh())
    except REFUSALS as refusal:
        outcome.refusal = f"{type(refusal).__name__}: {_plain(str(refusal))}"
        if isinstance(refusal, InfeasibleError) and refusal.smallest_budget is not None:
            outcome.leaves = _least_memory(program, contest, step, fresh, refusal.smallest_budget, want)
        return outcome
    except Exception as error:
        raise failure("planning and running", error) from error
    _same_calls("first call", _calls(step), calls)
    first = jax.tree.map(lambda leaf: leaf, got)
    conditioning = _Conditioning(compiled.source)
    outcome.leaves += compare("first call", first, want, fresh, conditioning)
    kept = jax.tree.map(_words, jax.tree.map(_copied, got))
    again = jax.tree.map(_copied, got[0])
    _calls(step)  # conditioning, too, runs callbacks
    with contest.features.context():
        try:
            want = jitted(*contest.features.arguments(again, fresh()[1]))
            calls = _calls(step)
        except Exception as error:
            outcome.refusal = f"plain jit: {_plain(str(error))}"
            return outcome
        try:
            got = planned(*contest.features.arguments(got[0], fresh()[1]))
        except REFUSALS as refusal:
            outcome.refusal = f"{type(refusal).__name__}: {_plain(str(refusal))}"
            return outcome
        except Exception as error:
            raise failure("second call", error) from error
        _same_calls("second call", _calls(step), calls)
        given = lambda: contest.features.arguments(again, fresh()[1])  # noqa: E731
        if contest.features.setting:
            conditioning = _Conditioning(planned.planned(given(), {})[0].source)
        outcome.leaves += compare("second call", got, want, given, conditioning)
    checked = _guarded("check", lambda: alpa_lite.check(planned, *fresh()))
    if not checked:
        raise Failure("check", f"Checked {checked}")
    outcome.leaves += len(checked.leaves)
    plan = planned.plan(*fresh())
    outcome.leaves += _replayed(plan, step, contest, fresh(), kept)
    _guarded("reports", lambda: _report(plan, contest, program))
    return outcome


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


def _guarded(where: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Failure:
        raise
    except Exception as error:
        raise failure(where, error) from error


def failure(where: str, error: Exception) -> Failure:
    """An exception as a failure."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, AlpaLiteError) else f" ({Path(last.filename).name}:{last.lineno})"
    return Failure(where, f"{type(error).__name__}{place}: {error}")


class _Conditioning:
    """By how much leaves change if the arguments change in their last place, on arguments looked at before."""

    def __init__(self, traced: Any):
        self.traced = traced

    def of(self, args: tuple[Any, ...]) -> list[float]:
        return self.with_passed_through(reference.reference_run(self.traced, args, {}).conditioning())

    def with_passed_through(self, figures: list[float]) -> list[float]:
        """Figures of the results that are computed, with zeros for arguments that are handed through."""
        for place, _ in self.traced.through:
            figures.insert(place, 0.0)
        return figures


def compare(where: str, got: Any, want: Any, fresh: Callable[[], tuple[Any, ...]], conditioning: _Conditioning) -> int:
    """Compares leaves with the tolerances of `alpa_lite.check`; returns how many.

    Raises:
      Failure: naming those that differ.
    """
    mine, others = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise Failure(where, "Structure differs")
    limits = conditioning.with_passed_through(reference.tolerances(conditioning.traced))
    wrong: dict[int, tuple[float, float]] = {}
    for i, ((_, a), b, allowed) in enumerate(zip(mine, others, limits, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Failure(where, f"Type differs: {a.dtype}{a.shape}, {b.dtype}{b.shape}")
        found = reference.error(a, b)
        if found > allowed:
            wrong[i] = found, allowed
    if wrong:
        changes = conditioning.of(fresh())
        texts = [
            f"{jax.tree_util.keystr(mine[i][0])} {others[i].dtype}{others[i].shape} error {e:.2g} of {t:.2g}"
            f" (conditioning {changes[i]:.2g})"
            for i, (e, t) in wrong.items()
            if t == 0 or e > max(t, _ENLARGED * changes[i])
        ]
        if texts:
            raise Failure(where, "Differs: " + "; ".join(texts[:6]))
    return len(others)


def _least_memory(program: Program, contest: Contest, step: Any, fresh: Any, budget: float, want: Any) -> int:
    """The least memory that an error names is enough."""
    options = re.sub(r"memory_per_device=\d+", f"memory_per_device={int(budget) + 1}", contest.options)
    if options == contest.options:
        return 0
    planned = dataclasses.replace(contest, options=options).parallelized(program, step)
    got = _guarded("the least memory that an error names", lambda: planned(*fresh()))
    compiled, _ = planned.planned(fresh(), {})
    return compare("first call", got, want, fresh, _Conditioning(compiled.source))


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
        got = _guarded("replay", lambda: alpa_lite.parallelize(step, plan=file, **more)(*args))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(kept), strict=True):
        has_nan = jax.numpy.issubdtype(b.dtype, np.inexact)
        if not np.array_equal(np.asarray(_words(a)), np.asarray(b), equal_nan=has_nan):
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
        if plan.pipelined:
            plan.simulate(Path(folder) / "timeline.json")
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


def _copied(leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.numpy.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jax.numpy.asarray(np.array(leaf))


def _words(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _plain(message: str) -> str:
    """An error's message without its numbers and places."""
    first = message.split("\n")[0]
    return re.sub(r"\b[vsb]?\d[\d.,]*\b", "#", re.sub(r"program_\d+", "program", first))[:160]


def shorter(program: Program, contest: Contest, found: Failure, seconds: float) -> tuple[Program, Failure]:
    """The program with as few lines and outputs as still fail in the same way."""
    end, changed = time.monotonic() + seconds, True
    while changed and time.monotonic() < end:
        changed = False
        for smaller in _reductions(program):
            if time.monotonic() > end:
                break
            try:
                _guarded("comparing", lambda smaller=smaller: run(smaller, contest))
            except Failure as other:
                if other.kind == found.kind:
                    program, found, changed = smaller, other, True
                    break
    return program, found


def _reductions(program: Program) -> list[Program]:
    """Smaller programs, the least first."""
    found: list[Program | None] = []
    if program.gradient:
        found.append(dataclasses.replace(program, gradient=False).pruned())
    if len(program.outputs) > 1:
        for name in program.outputs:
            found.append(dataclasses.replace(program, outputs=(name,)).pruned())
            found.append(dataclasses.replace(program, outputs=tuple(n for n in program.outputs if n != name)).pruned())
    for i in range(len(program.updates)):
        updates = (*program.updates[:i], *program.updates[i + 1 :])
        found.append(dataclasses.replace(program, updates=updates).pruned())
    found += [program.without(line.value.name) for line in program.lines]
    size = _size(program)
    return sorted((one for one in found if one is not None and _size(one) < size), key=_size)


def _size(program: Program) -> tuple[int, int]:
    constants = sum(line.kind == "constant" for line in program.lines)
    return 2 * len(program.lines) - constants + program.gradient, len(program.outputs) + len(program.updates)


def made(seed: int) -> tuple[Program, Contest]:
    """The program of a seed, and how it is planned."""
    layered = random.Random(seed).random() < 0.4
    make = random_operations.layered if layered else random_operations.general
    program = make(seed, seed >= WIDER, seed >= FURTHER)
    contest = contest_of(program, seed, layered)
    if seed >= FURTHER:
        contest = dataclasses.replace(contest, features=random_further.features(program, seed))
    return program, contest


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
        counts.kinds.update(kinds_of(program))
        counts.kinds.update(contest.features.names())
        try:
            outcome = _guarded("comparing", lambda program=program, contest=contest: run(program, contest))
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


def main() -> None:
    """Runs seeds, prints failures, keeps counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--programs", type=int, default=100, help="at most so many")
    parser.add_argument("--seconds", type=float, default=600, help="no program begins later")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to make a failing program shorter")
    parser.add_argument("--scripts", type=Path, help="a folder for scripts of failing programs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the counts")
    parser.add_argument("--dry", action="store_true", help="keep no counts")
    arguments = parser.parse_args()
    virtual_devices.prepare()
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    counts = search(seeds, arguments.seconds, arguments.shrink, arguments.scripts)
    print(dict(counts.programs), dict(counts.leaves), dict(counts.refused), len(counts.failures))
    print(json.dumps(dict(counts.refusals.most_common()), indent=1))
    if not arguments.dry:
        keep(counts, arguments.results)
    sys.exit(1 if counts.failures else 0)


if __name__ == "__main__":
    main()
