"""The cases of `planning`: models from outside this project, and its own models at sizes from a toy's to 175B."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from alpa_lite import models
from benchmarks.gallery import deep, habits, hugging_face, linen, unusual
from benchmarks.gallery.steps import Case, case

_LLAMA: dict[str, Any] = {"seq": 8192, "layers": 32, "remat": True}
_SCANNED: dict[str, Any] = {"scan": True, "remat": True}
_HALF: dict[str, Any] = {"dtype": jnp.float16}
_ALL_MESHES, _SQUARE, _PIPELINE = ("Sharded", ()), ("Sharded", ((8, 8),)), ("Pipeline", ())


def own(model: str, size: str, batch: int, on: str, method: Any = ("Auto", ()), of: str = "own", **sizes: Any) -> Case:
    """A case of a model of this project."""
    return case(on, lambda: models.get(model).abstract(size, batch, **sizes)[:2], method=method, of=of)


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
        "gpt", "175B", 1600, "frontier x 384", _PIPELINE, "issue", layers=128, hidden=25600, heads=160, seq=2048
    ),
    "gpt-small": own("gpt", "small", 64, "a100", _ALL_MESHES),
    "gpt-small-auto": own("gpt", "small", 64, "a100"),
    "gpt-24-layers": own("gpt", "small", 64, "a100", _ALL_MESHES, layers=24),
    "gpt-48-layers": own("gpt", "small", 64, "a100", _ALL_MESHES, layers=48),
    "llama-8B": own("llama", "8B", 64, "h100 x 8", _SQUARE, **_LLAMA),
    "llama-8B-scan": own("llama", "8B", 64, "h100 x 8", _SQUARE, **_LLAMA, scan=True),
    "gpt-175B": own("gpt", "175B", 64, "h100 x 8", _ALL_MESHES, remat=True),
    "gpt-175B-auto": own("gpt", "175B", 64, "h100 x 8", remat=True),
    "gpt-175B-scan": own("gpt", "175B", 64, "h100 x 8", _ALL_MESHES, **_SCANNED),
    # where a pipeline pays, and where it does not
    "gpt-small, fits one node": own("gpt", "small", 64, "a100"),
    "gpt-small, fits, fast links": own("gpt", "small", 256, "h100 x 2"),
    "gpt-small, slow links": own("gpt", "small", 64, "p3.16xlarge x 2", **_HALF),
    "gpt-1.3B, slow links, large": own("gpt", "1.3B", 256, "p3.16xlarge x 2", **_HALF),
    "gpt-2.6B, little memory": own("gpt", "2.6B", 256, "p3.16xlarge", **_HALF),
    "gpt-39B, pipeline": own("gpt", "39B", 1024, "p3.16xlarge x 8", **_HALF),
    "gpt-39B, no other method": own("gpt", "39B", 1024, "p3.16xlarge x 8", _PIPELINE, **_HALF),
    **{
        f"{name}, {8 * nodes} devices": own(model, size, batch, f"h100 x {nodes}", **sizes)
        for name, (model, size, batch, sizes) in _TEXTBOOK.items()
        for nodes in (1, 2, 8)
    },
}
