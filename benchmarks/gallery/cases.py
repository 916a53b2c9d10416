"""The cases of `planning`: models from outside this project, and its own models at sizes from a toy's to 175B."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from alpa_lite import models
from benchmarks.gallery import deep, habits, hugging_face, linen, unusual
from benchmarks.gallery.steps import Case

_LLAMA: dict[str, Any] = {"seq": 8192, "layers": 32, "remat": True}
_SCANNED: dict[str, Any] = {"scan": True, "remat": True}
_HALF: dict[str, Any] = {"dtype": jnp.float16}
_ALL_MESHES, _SQUARE = ("Sharded", ()), ("Sharded", ((8, 8),))


def own(
    model: str, size: str, batch: int, cluster: str, nodes: int, method: tuple[str, tuple[Any, ...]] = ("Auto", ()),
    of: str = "own", **overrides: Any,
) -> Case:  # fmt: skip
    """A case of a model of this project."""
    return Case(lambda: models.get(model).abstract(size, batch, **overrides)[:2], cluster, nodes, method, of=of)


PIPELINES: dict[str, Case] = {
    "fits one node": own("gpt", "small", 64, "a100", 1),
    "fits, fast links": own("gpt", "small", 256, "h100", 2),
    "slow links": own("gpt", "small", 64, "p3.16xlarge", 2, **_HALF),
    "slow links, large": own("gpt", "1.3B", 256, "p3.16xlarge", 2, **_HALF),
    "little memory": own("gpt", "2.6B", 256, "p3.16xlarge", 1, **_HALF),
}
"""Where a pipeline pays, and where it does not."""
_SIZES = ("small", "small", "small", "1.3B", "2.6B")
_TEXTBOOK: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    **{f"{model}-tiny": (model, "tiny", 64, {}) for model in models.MODELS},
    "mlp-wide": ("mlp", "wide", 1024, {}),
    "gpt-1.3B": ("gpt", "1.3B", 64, _SCANNED),
    "llama-8B-seq": ("llama", "8B", 64, _SCANNED),
}

CASES: dict[str, Case] = {
    **linen.CASES,
    **hugging_face.CASES,
    **habits.CASES,
    **deep.CASES,
    **unusual.CASES,
    "frontier-1t": own(
        "gpt", "175B", 1600, "frontier", 384, ("Pipeline", ()), "issue", layers=128, hidden=25600, heads=160, seq=2048
    ),
    "gpt-small": own("gpt", "small", 64, "a100", 1, _ALL_MESHES),
    "gpt-small-auto": own("gpt", "small", 64, "a100", 1),
    "gpt-24-layers": own("gpt", "small", 64, "a100", 1, _ALL_MESHES, layers=24),
    "gpt-48-layers": own("gpt", "small", 64, "a100", 1, _ALL_MESHES, layers=48),
    "llama-8B": own("llama", "8B", 64, "h100", 8, _SQUARE, **_LLAMA),
    "llama-8B-scan": own("llama", "8B", 64, "h100", 8, _SQUARE, **_LLAMA, scan=True),
    "gpt-175B": own("gpt", "175B", 64, "h100", 8, _ALL_MESHES, remat=True),
    "gpt-175B-auto": own("gpt", "175B", 64, "h100", 8, remat=True),
    "gpt-175B-scan": own("gpt", "175B", 64, "h100", 8, _ALL_MESHES, **_SCANNED),
    **{f"gpt-{size}, {name}": case for size, (name, case) in zip(_SIZES, PIPELINES.items(), strict=True)},
    "gpt-39B, pipeline": own("gpt", "39B", 1024, "p3.16xlarge", 8, **_HALF),
    "gpt-39B, no other method": own("gpt", "39B", 1024, "p3.16xlarge", 8, ("Pipeline", ()), **_HALF),
    **{
        f"{name}, {8 * nodes} devices": own(model, size, batch, "h100", nodes, **overrides)
        for name, (model, size, batch, overrides) in _TEXTBOOK.items()
        for nodes in (1, 2, 8)
    },
}
