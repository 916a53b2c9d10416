"""Methods: the plans of a step that are allowed. All are frozen and hash by value. `Manual` has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from alpa_lite.errors import OptionError

MeshShape = tuple[int, ...]


STRATEGIES: Mapping[str, str] = {
    "data parallel": "the examples of the batch are cut over devices",
    "fsdp": "parameters are stored in blocks and gathered for use (ZeRO-3)",
    "zero": "updates are cut over devices, and new parameters gathered after them (ZeRO-1 and 2)",
    "tensor parallel": "products work on blocks of parameters",
}
"""The strategies that `allow` and `forbid` name, each with a description."""


@dataclass(frozen=True)
class Method:
    """Which plans are allowed. Use one of the subclasses."""

    words: ClassVar[str] = ""

    def describe(self) -> str:
        """The method in a few words, as plans print it."""
        return self.words


@dataclass(frozen=True)
class Auto(Method):
    """The fastest plan found, of any kind: one mesh or a pipeline."""

    words: ClassVar[str] = "auto"


@dataclass(frozen=True)
class Off(Method):
    """Plain `jax.jit` through the same interface, to find out whether an error comes from the plan."""

    words: ClassVar[str] = "off: plain jit"


@dataclass(frozen=True)
class Sharded(Method):
    """The fastest plan found on one mesh, by the integer program.

    Attributes:
      mesh_shape: the shape of the mesh, major to minor; None tries every shape of the cluster.
      remat: what the backward pass computes again, as in `Pipeline`; "auto" is the fastest within the memory, of all
        layers or of the first of them. The compiler for CPU merges what is computed again with the first time, so
        there only "none" is planned.
    """

    mesh_shape: MeshShape | None = None
    remat: str = "auto"

    def __post_init__(self) -> None:
        if self.mesh_shape is not None:
            object.__setattr__(self, "mesh_shape", checked_shape(self.mesh_shape, "Sharded mesh_shape"))
        _check_remat("Sharded", self.remat)

    def describe(self) -> str:
        """The method in a few words."""
        remat = "" if self.remat == "auto" else f", remat {self.remat}"
        return ("sharded" if self.mesh_shape is None else f"sharded on {by(self.mesh_shape)}") + remat


@dataclass(frozen=True)
class DataParallel(Method):
    """The textbook plan: the batch is sharded, the state is on every device, gradients are all-reduced."""

    words: ClassVar[str] = "data parallel"


@dataclass(frozen=True)
class Zero(Method):
    """The textbook plan with a sharded training state.

    Attributes:
      stage: 1 shards the optimizer's state, 2 also the gradients, 3 also the parameters.
    """

    stage: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise OptionError(
                f"Zero stage={self.stage!r}: use 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
            )

    def describe(self) -> str:
        """The method in a few words."""
        return f"ZeRO-{self.stage}"


@dataclass(frozen=True)
class TensorParallel(Method):
    """The textbook plan that shards pairs of matrices by columns, then by rows, and all-reduces after the second."""

    words: ClassVar[str] = "tensor parallel"


@dataclass(frozen=True)
class Pipeline(Method):
    """A pipeline: stages on submeshes, each sharded by the integer program.

    Attributes:
      num_stages: the number of submeshes; None searches for it.
      schedule: "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b" or "zb-h1"; "auto" searches for it.
      submesh_shapes: the devices of each stage, first to last, as numbers or as logical mesh shapes; None searches for
        them.
      remat: the values that the backward pass computes again: "none", "layer" (all but those that cross layers),
        "selective" (all but the results of matrix products and convolutions), or "auto".
      token_slices: the tokens of each slice that the sequence is cut into, such as (768, 640, 640): later tokens are in
        earlier stages while earlier tokens are in later stages. For steps in which no token depends on later ones.
        None leaves sequences whole. "auto" takes the lengths and the number of micro-batches that are predicted to be
        fastest, or whole sequences where these are, or where a token depends on later ones; the plan's notes say which.
    """

    num_stages: int | None = None
    schedule: str = "auto"
    submesh_shapes: tuple[int | MeshShape, ...] | None = None
    remat: str = "auto"
    token_slices: tuple[int, ...] | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        from alpa_lite.ir.schedules import NAMES

        stages = self.num_stages
        if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
            raise OptionError(f"Pipeline num_stages={stages!r}: give a positive number, or None to search for it")
        if self.schedule not in ("auto", *NAMES):
            raise OptionError(f'Pipeline schedule={self.schedule!r}: use "auto" or one of {", ".join(NAMES)}')
        _check_remat("Pipeline", self.remat)
        if self.token_slices is not None and self.token_slices != "auto":
            given = self.token_slices
            if not isinstance(given, list | tuple) or not given or any(type(n) is not int or n < 1 for n in given):
                raise OptionError(
                    f"Pipeline token_slices={given!r}: give the tokens of each slice, such as (512, 512), "
                    '"auto", or None'
                )
            object.__setattr__(self, "token_slices", tuple(given))
            if self.schedule == "zb-h1":
                raise OptionError(
                    'Pipeline schedule="zb-h1" computes gradients of parameters apart, which slices of the sequence do '
                    'not: use "1f1b", or leave token_slices out'
                )
        if self.submesh_shapes is not None:
            if not isinstance(self.submesh_shapes, list | tuple) or not self.submesh_shapes:
                raise OptionError(
                    f"Pipeline submesh_shapes={self.submesh_shapes!r}: give the devices of each stage, such as (4, 4)"
                )
            shapes = tuple(checked_shape(shape, "Pipeline submesh_shapes") for shape in self.submesh_shapes)
            object.__setattr__(self, "submesh_shapes", shapes)
            if stages is not None and len(shapes) != stages:
                raise OptionError(
                    f"Pipeline num_stages={stages}, but submesh_shapes has {len(shapes)} entries; leave one of them out"
                )

    @property
    def lengths(self) -> tuple[int, ...]:
        """`token_slices` where they are given; none where they are chosen, or sequences are whole."""
        return self.token_slices if isinstance(self.token_slices, tuple) else ()

    @property
    def mesh_shapes(self) -> tuple[MeshShape, ...] | None:
        """`submesh_shapes`, numbers as shapes of one axis."""
        shapes = self.submesh_shapes
        return None if shapes is None else tuple(checked_shape(shape, "Pipeline submesh_shapes") for shape in shapes)

    def describe(self) -> str:
        """The method in a few words."""
        shapes = self.mesh_shapes
        parts = [f"{self.num_stages} stages"] if self.num_stages is not None else []
        parts += [self.schedule] if self.schedule != "auto" else []
        parts += ["on " + ", ".join(map(by, shapes))] if shapes is not None else []
        parts += [f"remat {self.remat}"] if self.remat != "auto" else []
        parts += [f"slices of {', '.join(map(str, self.lengths))} tokens"] if self.lengths else []
        parts += ["slices of the sequence: auto"] if self.token_slices == "auto" else []
        return "pipeline" + (": " + ", ".join(parts) if parts else "")


def _check_remat(method: str, remat: str) -> None:
    """Raises OptionError if there is no such rematerialisation."""
    if remat not in ("auto", "none", "layer", "selective"):
        raise OptionError(f'{method} remat={remat!r}: use "auto", "none", "layer" or "selective"')


def checked_shape(value: Any, what: str) -> MeshShape:
    """A mesh shape as a tuple."""
    items = (value,) if isinstance(value, int) else value
    if isinstance(items, list | tuple) and items and all(type(size) is int and size >= 1 for size in items):
        return tuple(items)
    raise OptionError(f"{what}={value!r}: give the devices along each axis, such as (4, 2)")


def by(shape: MeshShape) -> str:
    """A mesh shape in words: 4 x 2."""
    return " x ".join(map(str, shape))
