"""Whether planned steps compute what plain `jit` computes: errors in shares of what is allowed, and random programs.

An error of 1 is what is allowed: ||a - b|| = 1e-5 * max(||b||, 1e-3 * ||all gradients||) for each leaf in float32, of
steps with Adam the first moment in place of what Adam makes of it; `tests/comparing.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.harness import Row, Rows, by_variant, show, table
from tests import comparing

ALLOWED = (
    "Errors are the largest of any leaf in consecutive steps; 1 is what is allowed, 1e-5 of the norm of the leaf or of "
    "1e-3 of all gradients in float32."
)


def largest(got: Iterable[Any], want: Iterable[Any]) -> Row:
    """The largest error of some steps as a share of what is allowed, and its leaf."""
    errors = {
        f"step {number} {name}": error
        for number, (one, other) in enumerate(zip(got, want, strict=True))
        for name, error in comparing.errors(one, other).items()
    }
    leaf = max(errors, key=errors.__getitem__)
    return {"error": round(float(errors[leaf]), 4), "leaf": leaf, "leaves": len(errors)}


def by_model(rows: Rows, models: Iterable[str], model_of: Callable[[str], str]) -> list[str]:
    """A table of models by variant of rows: how many cases were run, and the largest error."""
    variants = by_variant(rows)
    cells = []
    for model in models:
        of = [[row for name, row in found.items() if model_of(name) == model] for found in variants.values()]
        cells.append([model, *(cell for found in of for cell in _cells(found))])
    lines = table(" | ".join(["model", *(f"{variant}: cases | largest error" for variant in variants)]), cells)
    return [*lines, "", *(f"- {variant}: {said}" for variant, found in variants.items() for said in _counts(found))]


def _cells(rows: list[Row]) -> list[Any]:
    errors = [row["error"] for row in rows if "error" in row]
    return [len(errors), show(max(errors, default=None), ".3f")]


def _counts(found: Rows) -> Iterator[str]:
    errors = [row["error"] for row in found.values() if "error" in row]
    refused, skipped = (sum(kind in row for row in found.values()) for kind in ("refused", "skipped"))
    leaves = sum(row.get("leaves", 0) for row in found.values() if "error" in row)
    yield (
        f"{len(errors)} cases, {sum(error > 1 for error in errors)} above 1, {leaves:,} leaves compared; {refused} "
        f"refused; {skipped} need more layers than their model has."
    )
