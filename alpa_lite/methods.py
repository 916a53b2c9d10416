"""Methods: the plans of a step that are allowed. All are frozen and hash by value."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir import paths

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
        """Returns the method in a few words, as plans print it."""
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
        """Returns the method in a few words."""
        remat = "" if self.remat == "auto" else f", remat {self.remat}"
        return ("sharded" if self.mesh_shape is None else f"sharded on {format_shape(self.mesh_shape)}") + remat


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
        """Returns the method in a few words."""
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
        """Returns the method in a few words."""
        shapes = self.mesh_shapes
        parts = [f"{self.num_stages} stages"] if self.num_stages is not None else []
        parts += [self.schedule] if self.schedule != "auto" else []
        parts += ["on " + ", ".join(map(format_shape, shapes))] if shapes is not None else []
        parts += [f"remat {self.remat}"] if self.remat != "auto" else []
        parts += [f"slices of {', '.join(map(str, self.lengths))} tokens"] if self.lengths else []
        parts += ["slices of the sequence: auto"] if self.token_slices == "auto" else []
        return "pipeline" + (": " + ", ".join(parts) if parts else "")


def _check_remat(method: str, remat: str) -> None:
    """Raises OptionError if there is no such rematerialisation."""
    if remat not in ("auto", "none", "layer", "selective"):
        raise OptionError(f'{method} remat={remat!r}: use "auto", "none", "layer" or "selective"')


def checked_shape(value: Any, what: str) -> MeshShape:
    """Returns a mesh shape as a tuple."""
    items = (value,) if isinstance(value, int) else value
    if isinstance(items, list | tuple) and items and all(type(size) is int and size >= 1 for size in items):
        return tuple(items)
    raise OptionError(f"{what}={value!r}: give the devices along each axis, such as (4, 2)")


def format_shape(shape: MeshShape) -> str:
    """Returns a mesh shape in words: 4 x 2."""
    return " x ".join(map(str, shape))


REGEX = "re:"
"""The prefix of keys that are regular expressions."""

NAMES = ("x", "y", "z")
"""The names of the axes of searched meshes, major to minor."""

Dims = tuple[tuple[str, ...] | None, ...]
"""The axes of each dim of a spec; None where it is unconstrained."""


@dataclass(frozen=True, init=False)
class Manual(Method):
    """Some arguments sharded by hand, everything else left to another method.

    A key of `specs` is one of

    - a path, as plans print it (`state/params/w`) or as `jax.tree_util.keystr` writes it (`state['params']['w']`), of
      one argument, or of a subtree, whose leaves all get the spec;
    - a glob on printed paths, `"*/h_0/Dense_*/kernel"`: `*` stands for any text, slashes included, `?` for one
      character, `[ab]` for one of some. A match of a subtree gives the spec to its leaves;
    - a regular expression: `re.compile(r"h_\\d+/Dense_0/kernel$")` or the same text after `"re:"`, which is searched
      for anywhere in printed paths.

    A value is a `PartitionSpec`, or a pytree of them like the subtree at that path or a prefix of it; None in it leaves
    leaves to the rest. `PartitionSpec.UNCONSTRAINED` leaves a dim to the rest.

    Where several entries match a leaf, the last one wins; the path of exactly this leaf wins over all. State that has
    the shape of a parameter and its path from the root of the parameters on (optimizer moments, averages) follows the
    parameter, unless an entry matches it. An entry that matches nothing is an error.

    Attributes:
      specs: (key, spec) in the order given, pytrees flattened to paths, regular expressions after "re:".
      mesh_shape: devices along each axis, major to minor. Without it, every shape of the cluster with as many axes as
        there are names is tried; with one name that is all devices along it.
      axis_names: one name an axis; without them the names in `specs`, in their order there; if all of these are among
        x, y and z, the names of searched meshes, then x, y, z as far as needed.
      rest: of everything else: `Sharded()`, which is the default, `DataParallel()`, `Zero()`, `TensorParallel()` or
        `Pipeline()`. Data parallelism and ZeRO use the axes that no spec names, or all axes if each is named. In a
        pipeline each stage's submesh has the axes.
    """

    specs: tuple[tuple[str, PartitionSpec], ...]
    mesh_shape: MeshShape | None
    axis_names: tuple[str, ...] | None
    rest: Method

    def __init__(
        self,
        specs: Mapping[Any, Any],
        mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        rest: Method | None = None,
    ) -> None:
        """Takes the specs as a mapping.

        Raises:
          OptionError: if a key or a spec is of another kind, a spec names an unknown axis or one axis twice, if the
            mesh shape and the names do not match, or `rest` is not a method for the other arguments.
        """
        rest = Sharded() if rest is None else rest
        if not isinstance(rest, Sharded | DataParallel | Zero | TensorParallel | Pipeline):
            raise OptionError(
                f"Manual rest={rest!r}: give Sharded(), DataParallel(), Zero(stage), TensorParallel() or Pipeline(...)"
            )
        if not isinstance(specs, Mapping):
            raise OptionError(f"Manual specs={specs!r}: give a mapping from paths to PartitionSpecs")
        entries = tuple(entry for key, value in specs.items() for entry in _entries(key, value))
        names = None if axis_names is None else tuple(axis_names)
        shape = None if mesh_shape is None else checked_shape(mesh_shape, "Manual mesh_shape")
        other = rest.mesh_shape if isinstance(rest, Sharded) else None
        if shape is not None and isinstance(rest, Pipeline):
            raise OptionError(f"Manual mesh_shape={shape}: a pipeline has submeshes; give Pipeline(submesh_shapes=...)")
        if shape is not None and other not in (None, shape):
            raise OptionError(f"Manual mesh_shape={shape}, rest={rest!r}: give one mesh shape")
        shape = other if shape is None else shape
        if names is not None and not all(isinstance(name, str) and name for name in names):
            raise OptionError(f"Manual axis_names={names!r}: give names, such as ('data', 'model')")
        if names is not None and (not names or len(set(names)) != len(names)):
            raise OptionError(f"Manual axis_names={names!r}: give distinct names, such as ('data', 'model')")
        if names is not None and shape is not None and len(shape) != len(names):
            raise OptionError(f"Manual axis_names={names!r}: give one name for each axis of mesh_shape={shape}")
        for key, spec in entries:
            check_spec("Manual specs", key, spec, names)
        vars(self).update(specs=entries, mesh_shape=shape, axis_names=names, rest=rest)
        if shape is not None and len(self.names) != len(shape):
            raise OptionError(
                f"Manual mesh_shape={shape}: the specs name the axes {', '.join(self.names)}; give axis_names, one "
                "for each axis"
            )
        for some in rest.mesh_shapes or () if isinstance(rest, Pipeline) else ():
            if len(some) > max(1, len(self.names)):
                raise OptionError(
                    f"Manual axis_names={self.names}: the submesh {format_shape(some)} of the pipeline has more axes; "
                    "name each"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes that the mesh has, given or derived; of a mesh without any, none."""
        if self.axis_names is not None:
            return self.axis_names
        used = tuple(dict.fromkeys(a for _, spec in self.specs for axes in dims_of(spec) for a in axes or ()))
        if not set(used) <= set(NAMES):
            return used
        least = max([NAMES.index(a) + 1 for a in used], default=0)
        given = (self.mesh_shape or (), *(self.rest.mesh_shapes or () if isinstance(self.rest, Pipeline) else ()))
        return NAMES[: max(least, *map(len, given))]

    def describe(self) -> str:
        """Returns the method in a few words."""
        mesh = "" if self.mesh_shape is None else f" on {format_shape(self.mesh_shape)}"
        names = f" ({', '.join(self.names)})" if self.names else ""
        rest = "" if self.rest in (Sharded(), Sharded(self.mesh_shape)) else f", the rest {self.rest.describe()}"
        return f"manual: {len(self.specs)} specs{mesh}{names}{rest}"


def dims_of(spec: PartitionSpec) -> Dims:
    """Returns the axes of each dim of a spec."""
    return _jax.spec_dims(spec, len(spec))


def matches(key: str, path: str) -> bool:
    """Returns whether a key names a leaf, by its printed path: the leaf itself, or a subtree that it is in."""
    if key.startswith(REGEX):
        return re.search(key.removeprefix(REGEX), path) is not None
    parts = path.split("/")
    above = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    forms = paths.spellings(key)
    return any(form == one or fnmatch.fnmatchcase(one, form) for form in forms for one in above)


def _entries(key: Any, value: Any) -> Iterator[tuple[str, PartitionSpec]]:
    """Yields the entries of one key: itself, or one for each spec of a pytree."""
    if isinstance(key, re.Pattern):
        if key.flags & ~re.UNICODE:
            raise OptionError(f"Manual specs key {key!r}: write flags into the expression, as in (?i)")
        key = REGEX + key.pattern
    if not isinstance(key, str) or not key:
        raise OptionError(f"Manual specs key {key!r}: give a path, a glob or a compiled regular expression")
    if key.startswith(REGEX):
        try:
            re.compile(key.removeprefix(REGEX))
        except re.error as error:
            raise OptionError(
                f"Manual specs key {key!r} is not a regular expression ({error}); write one for re.compile"
            ) from error
    if isinstance(value, PartitionSpec):
        yield key, value
        return
    leaves = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, PartitionSpec))[0]
    if not leaves or not all(isinstance(spec, PartitionSpec) for _, spec in leaves) or key.startswith(REGEX):
        raise OptionError(
            f"Manual specs[{key!r}]={value!r}: give a jax.sharding.PartitionSpec, or for a path a pytree of them"
        )
    for path, spec in leaves:
        inner = paths.format_path(jax.tree_util.keystr(path))
        yield (f"{paths.spellings(key)[-1]}/{inner}" if inner else key), spec


def check_spec(option: str, key: str, spec: Any, names: tuple[str, ...] | None = None) -> None:
    """Raises OptionError unless `spec` is a partition spec, and over `names` if these are given."""
    if not isinstance(spec, PartitionSpec):
        raise OptionError(f"{option}[{key!r}]={spec!r}: give a jax.sharding.PartitionSpec")
    used = [axis for axes in dims_of(spec) for axis in axes or ()]
    for axis in used:
        if names is not None and axis not in names:
            raise OptionError(f"{option}[{key!r}]={spec}: no axis is named {axis!r}; use those of axis_names={names}")
    if len(set(used)) != len(used):
        raise OptionError(f"{option}[{key!r}]={spec}: an axis may shard one dim only; use it once")
