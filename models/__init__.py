"""Models to plan and train, in plain Flax NNX, written as for one device: no mesh, no sharding, no annotation.

`get(name)` finds a model; its `ModelSpec` knows published sizes and builds a training step with its arguments, either
concrete (`build`) or as shapes alone (`abstract`), which costs no memory and works for the largest sizes anywhere.
"""

from __future__ import annotations

from . import bert, gpt, llama, mlp, moe, unet, vit, wide_resnet
from .spec import Field, ModelSpec

MODELS: dict[str, ModelSpec] = {
    module.SPEC.name: module.SPEC for module in (mlp, gpt, llama, bert, moe, vit, wide_resnet, unet)
}


def get(name: str) -> ModelSpec:
    """Returns the model called `name`.

    Raises:
      ValueError: if there is none; the message lists the names there are.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


__all__ = ["MODELS", "Field", "ModelSpec", "get"]
