"""Models from outside this project, and its own: small ones, toys, and sizes up to a trillion parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from alpa_lite import models
from gallery.outside import deep, habits, hugging_face, small, tutorials, unusual
from gallery.outside.hugging_face import TABLE, sizes_of
from gallery.registry import Built, Case, parse_tags, published_fields


def own(model: str, size: str, batch: int, **sizes: Any) -> Built:
    """A model of this project."""
    return models.get(model).abstract(size, batch, **sizes)[:2]


def builder_of(row: Mapping[str, Any]) -> str:
    """The name of the builder that a row has the arguments of."""
    return next(key for key in row if key == "own" or callable(getattr(hugging_face, key, None)))


def built(row: Mapping[str, Any]) -> Built:
    """The step of a row of the table, by the builder that it names."""
    rest, builder = dict(row), builder_of(row)
    arguments = rest.pop(builder)
    return (own if builder == "own" else getattr(hugging_face, builder))(*arguments, **sizes_of(rest))


def _fields(row: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The fields of a planned case."""
    rest = {key: value for key, value in row.items() if key not in ("on", "method", "of")}
    fields = published_fields(row["on"], built, rest, of=row.get("of", of), method=row.get("method", "Auto()"))
    return fields | {"tags": fields["tags"] | parse_tags(TABLE["tags"][builder_of(row)])}


_TEXTBOOK: dict[str, dict[str, Any]] = {
    **{f"{model}-tiny": {"own": [model, "tiny", 64]} for model in models.MODELS},
    "mlp-wide": {"own": ["mlp", "wide", 1024]},
    "gpt-1.3B": {"own": ["gpt", "1.3B", 64], "scan": True, "remat": True},
    "llama-8B-seq": {"own": ["llama", "8B", 64], "scan": True, "remat": True},
}
_PLANNED: dict[str, dict[str, Any]] = {
    **tutorials.PLANNED,
    **{name: _fields(row, of) for of in ("issue", "published", "toy") for name, row in TABLE[of].items()},
    **habits.PLANNED,
    **deep.PLANNED,
    **unusual.PLANNED,
    **{name: _fields(row, "own") for name, row in TABLE["own"].items()},
    **{
        f"{name}, {8 * nodes} devices": _fields({"on": f"h100 x {nodes}", **row}, "own")
        for name, row in _TEXTBOOK.items()
        for nodes in (1, 2, 8)
    },
}
_SMALL = {name: functools.partial(built, row) for name, row in TABLE["small"].items()} | dict(small.SMALL)


def _case(name: str) -> Case:
    fields = dict(_PLANNED.get(name, {}))
    row = TABLE["small"].get(name)
    tags = TABLE["tags"].get(name, "") if row is None else TABLE["tags"][builder_of(row)]
    return Case(name, _SMALL.get(name), **fields | {"tags": fields.get("tags", frozenset()) | parse_tags(tags)})


CASES = [_case(name) for name in dict.fromkeys((*_SMALL, *_PLANNED))]
