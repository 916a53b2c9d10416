"""The command line of the benchmarks.

python -m benchmarks run planning|quality|numerics|runtime|memory|compilers [CASE...]
python -m benchmarks run BENCHMARK [CASE...] -o limit=20
python -m benchmarks report
python -m benchmarks compare REVISION [CASE...]
python -m benchmarks pictures
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import harness, workers

app = typer.Typer(
    pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
Names = Annotated[list[str] | None, typer.Argument(help="cases, or texts that their names contain; all by default")]
Options = Annotated[list[str] | None, typer.Option("-o", "--option", help="KEY=VALUE for the benchmark, JSON or text")]


def _parsed(options: list[str] | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for text in options or ():
        key, _, value = text.partition("=")
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out


@app.command(name="list")
def list_benchmarks(names: Names = None) -> None:
    """Lists the benchmarks by group, or the cases of some."""
    for name in names or ():
        for one in harness.named(name):
            print(one, *(f"  {case}" for case in harness.get(one).cases()), sep="\n")
    for group, members in harness.GROUPS.items() if not names else ():
        print(group, *(f"  {name:22} {harness.get(name).title}" for name in members), sep="\n")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help=f"a benchmark, or one of {', '.join(harness.GROUPS)}")],
    cases: Names = None,
    option: Options = None,
    part: Annotated[list[str] | None, typer.Option(help="parts of the rows alone; `row` is the rest")] = None,
    limit: Annotated[float | None, typer.Option(help="seconds of a case")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB of a case")] = None,
    missing: Annotated[bool, typer.Option("--missing", help="cases without a row alone")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="print, and keep nothing")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="print where the CPU time of a case goes")] = False,
) -> None:
    """Measures cases, each in a process of its own, and keeps their rows; rows of other cases stay."""
    failed = False
    for benchmark in map(harness.get, harness.named(name)):
        options = _parsed(option)
        known = harness.load(benchmark) if missing else {}
        try:
            chosen = [case for case in benchmark.chosen(cases or ()) if benchmark.key(case) not in known]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if profile:
            workers.prepare(benchmark.devices)
            print(workers.profiled(lambda b=benchmark, o=options, c=chosen: b.measure(c[0], **o)))
            continue
        for one in part or ("row", *benchmark.parts):
            own = "" if one == "row" else one
            for case, row in workers.run(benchmark, chosen, options, part=own, limit=limit, memory=memory):
                print(f"{benchmark.name}: {case}: {json.dumps(row)[:2000]}", flush=True)
                failed |= row["status"] != "finished"
                if not dry:
                    harness.keep(benchmark, case, row, own)
    raise typer.Exit(int(failed))


@app.command()
def report(names: Names = None) -> None:
    """Writes all pages from the rows, and says which rows are stale, which cases have none, and which failed."""
    print("\n".join(harness.report(one for name in names or harness.NAMES for one in harness.named(name))))


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="a revision, or the folder of a checkout")],
    cases: Names = None,
    after: Annotated[Path, typer.Option(help="another checkout than this one")] = harness.ROOT,
    before_options: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of make_plan in the former")] = None,
    limit: Annotated[float | None, typer.Option(help="seconds of each planning")] = None,
) -> None:
    """Plans cases by the library of another revision and by this one in turn, and prints the ratios."""
    from benchmarks import planning

    for line in planning.compared(before, after, cases or (), _parsed(before_options), limit):
        print(line, flush=True)


@app.command()
def pictures() -> None:
    """Draws the pictures of the documentation from stored rows."""
    from benchmarks import pictures as drawing

    drawing.draw()


@app.command(hidden=True)
def child(request: str) -> None:
    """Measures cases in this process; see `workers.run`."""
    workers.child(request)


if __name__ == "__main__":
    app()
