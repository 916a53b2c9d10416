"""The cases of `planning`: models from outside this project, and its own models at sizes from a toy's to 175B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_lite import models
from benchmarks.gallery import deep, habits, hugging_face, linen, unusual
from benchmarks.gallery.hugging_face import TABLE, sizes_of
from benchmarks.gallery.steps import Built, Case, case


def own(model: str, size: str, batch: int, **sizes: Any) -> Built:
    """A model of this project."""
    return models.get(model).abstract(size, batch, **sizes)[:2]


def built(row: Mapping[str, Any]) -> Built:
    """The step of a row of the table, by the builder that it names."""
    rest = dict(row)
    builder = next(key for key in row if key == "own" or callable(getattr(hugging_face, key, None)))
    arguments = rest.pop(builder)
    return (own if builder == "own" else getattr(hugging_face, builder))(*arguments, **sizes_of(rest))


def _case(row: Mapping[str, Any], of: str) -> Case:
    said = ("on", "method", "of")
    rest = {key: value for key, value in row.items() if key not in said}
    return case(row["on"], built, rest, of=row.get("of", of), method=row.get("method", "Auto()"))


_TEXTBOOK: dict[str, dict[str, Any]] = {
    **{f"{model}-tiny": {"own": [model, "tiny", 64]} for model in models.MODELS},
    "mlp-wide": {"own": ["mlp", "wide", 1024]},
    "gpt-1.3B": {"own": ["gpt", "1.3B", 64], "scan": True, "remat": True},
    "llama-8B-seq": {"own": ["llama", "8B", 64], "scan": True, "remat": True},
}

CASES: dict[str, Case] = {
    **linen.CASES,
    **{name: _case(row, of) for of in ("issue", "published", "toy") for name, row in TABLE[of].items()},
    **habits.CASES,
    **deep.CASES,
    **unusual.CASES,
    **{name: _case(row, "own") for name, row in TABLE["own"].items()},
    **{
        f"{name}, {8 * nodes} devices": _case({"on": f"h100 x {nodes}", **row}, "own")
        for name, row in _TEXTBOOK.items()
        for nodes in (1, 2, 8)
    },
}
