"""The cases of `planning.py`: models from outside this project, and its own models at sizes from a toy's to 175B."""

from __future__ import annotations

import functools
from typing import Any

import pipelines
from outside_cases import Case, own
from outside_unusual import CASES as OUTSIDE

from alpa_lite import models

_LLAMA: dict[str, Any] = {"seq": 8192, "layers": 32, "remat": True}
_SCANNED: dict[str, Any] = {"scan": True, "remat": True}


def _own(
    model: str, size: str, batch: int, cluster: str, nodes: int, method: tuple[str, tuple[Any, ...]] = ("Auto", ()),
    **overrides: Any,
) -> Case:  # fmt: skip
    return Case(functools.partial(own, model, size, batch, **overrides), cluster, nodes, method, of="own")


_ALL_MESHES, _SQUARE = ("Sharded", ()), ("Sharded", ((8, 8),))
_TEXTBOOK: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    **{f"{model}-tiny": (model, "tiny", 64, {}) for model in models.MODELS},
    "mlp-wide": ("mlp", "wide", 1024, {}),
    "gpt-1.3B": ("gpt", "1.3B", 64, _SCANNED),
    "llama-8B-seq": ("llama", "8B", 64, _SCANNED),
}

CASES: dict[str, Case] = {
    **OUTSIDE,
    "gpt-small": _own("gpt", "small", 64, "a100", 1, _ALL_MESHES),
    "gpt-small-auto": _own("gpt", "small", 64, "a100", 1),
    "gpt-24-layers": _own("gpt", "small", 64, "a100", 1, _ALL_MESHES, layers=24),
    "gpt-48-layers": _own("gpt", "small", 64, "a100", 1, _ALL_MESHES, layers=48),
    "llama-8B": _own("llama", "8B", 64, "h100", 8, _SQUARE, **_LLAMA),
    "llama-8B-scan": _own("llama", "8B", 64, "h100", 8, _SQUARE, **_LLAMA, scan=True),
    "gpt-175B": _own("gpt", "175B", 64, "h100", 8, _ALL_MESHES, remat=True),
    "gpt-175B-auto": _own("gpt", "175B", 64, "h100", 8, remat=True),
    "gpt-175B-scan": _own("gpt", "175B", 64, "h100", 8, _ALL_MESHES, **_SCANNED),
    **{
        f"{c.model}-{c.size}, {name}": _own(c.model, c.size, c.batch, c.cluster, c.nodes, **c.overrides)
        for name, c in (pipelines.CASES | {"pipeline": pipelines.LARGE}).items()
    },
    **{
        f"{name}, {8 * nodes} devices": _own(model, size, batch, "h100", nodes, **overrides)
        for name, (model, size, batch, overrides) in _TEXTBOOK.items()
        for nodes in (1, 2, 8)
    },
}
