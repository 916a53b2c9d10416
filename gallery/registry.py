"""What the gallery knows of a train step: its name, its tags, and what builds it at which sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Built = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments."""
Build = Callable[..., Built]

TAGS = frozenset(
    (
        # of the library that it is written in
        "linen", "nnx", "plain", "haiku", "equinox", "hugging face", "own",
        # of its model
        "attention", "convolution", "mixture of experts", "recurrent", "perceptron", "embedding",
        # of how it is computed
        "scan", "loop", "branch", "rematerialisation", "custom derivative", "random", "mutable state", "half precision",
        "linear algebra", "across the batch",
        # of the step around the loss
        "train state", "optimizer", "accumulation", "several optimizers", "frozen weights",
        # of the size at which it is planned, and where it is from
        "issue", "published", "unusual", "toy",
        # of language models: whether tokens depend on later ones
        "causal", "both ways",
    )
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """A train step.

    Attributes:
      name: unique among the cases of its kind.
      small: builds the step with small arrays on the default device, the same at every call, or, if it is compiled and
        not run, with shapes.
      published: builds the step with the shapes of its published size.
      tags: some of `TAGS`.
      style: "functional" for `(state, batch, ...) -> (state, {"loss", "grads"})`, where `grads` has the tree of
        `state["params"]`; "train_state" for `(TrainState, batch) -> (TrainState, {"loss"})`; "optax" for
        `(params, opt_state, batch) -> (params, opt_state, loss)`; "nnx" for `(model, optimizer, batch) -> loss`, which
        updates its first two arguments in place.
      dtype: of the computation.
      notes: what the case is there for.
      reference: for a case in bfloat16, builds the same step in float32.
      on: the preset that the published size is planned for, such as "a100 x 2" for two nodes of it.
      method: a text that makes the method of planning.
      options: of planning, the method aside.
    """

    name: str
    small: Build | None = None
    published: Build | None = None
    tags: frozenset[str] = frozenset()
    style: str = "functional"
    dtype: str = "float32"
    notes: str = ""
    reference: Build | None = None
    on: str = ""
    method: str = "Auto()"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.tags <= TAGS, f"{self.name}: unknown tags {sorted(self.tags - TAGS)}"

    def make(self, **options: Any) -> Built:
        """The step and its small arguments; `options` are of its builder."""
        assert self.small is not None, f"{self.name} has no small size"
        return self.small(**options)

    def plan(self) -> Built:
        """The step and the shapes of its arguments at the published size."""
        assert self.published is not None, f"{self.name} has no published size"
        return self.published()


def published_fields(
    on: str, build: Build, *args: Any, of: str = "published", method: str = "Auto()",
    options: Mapping[str, Any] | None = None, **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    """What a case has whose published size is `build(*args, **sizes)`, with the preset that it is planned for."""
    return {
        "published": partial(build, *args, **sizes), "tags": parse_tags(of), "on": on, "method": method,
        "options": options or {},
    }  # fmt: skip


def parse_tags(tags: str) -> frozenset[str]:
    """Tags that a text lists, separated by commas."""
    return frozenset(tag for tag in tags.split(", ") if tag)
