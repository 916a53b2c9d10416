"""Whether planned steps compute what plain `jit` computes: errors in shares of what is allowed, and random programs.

An error of 1 is what is allowed: ||a - b|| = 1e-5 * max(||b||, 1e-3 * ||all gradients||) for each leaf in float32, of
steps with Adam the first moment in place of what Adam makes of it; `tests/comparing.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness import Row, Rows, by_variant
from tests import comparing


def largest(got: Iterable[Any], want: Iterable[Any]) -> Row:
    """The largest error of some steps as a share of what is allowed, and its leaf."""
    errors = {
        f"step {number} {name}": error
        for number, (one, other) in enumerate(zip(got, want, strict=True))
        for name, error in comparing.errors(one, other).items()
    }
    leaf = max(errors, key=errors.__getitem__)
    return {"error": round(float(errors[leaf]), 4), "leaf": leaf, "leaves": len(errors)}


def by_model(rows: Rows, models: Iterable[str], model_of: Callable[[str], str]) -> Row:
    """By model and variant of rows how many cases were run, and the largest error; and counts by variant."""
    variants = by_variant(rows)
    errors = {
        model: [
            [row["error"] for name, row in found.items() if model_of(name) == model and "error" in row]
            for found in variants.values()
        ]
        for model in models
    }
    cells = {model: [(len(some), max(some, default=None)) for some in found] for model, found in errors.items()}
    return {"by_model": {"models": cells, "counts": {name: _counts(found) for name, found in variants.items()}}}


def _counts(found: Rows) -> Row:
    good = [row for row in found.values() if "error" in row]
    kinds = {kind: sum(kind in row for row in found.values()) for kind in ("refused", "skipped")}
    above = sum(row["error"] > 1 for row in good)
    return kinds | {"cases": len(good), "above": above, "leaves": sum(row.get("leaves", 0) for row in good)}
