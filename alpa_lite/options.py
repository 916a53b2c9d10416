"""The options of `parallelize`, validated once, and the methods that choose a plan.

A method says which plans are allowed; the options say everything else. Both are frozen and hash by value, so that a
step's plans can be cached under them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from alpa_lite.plan import Plan

MeshShape = tuple[int, ...]


@dataclass(frozen=True)
class Method:
    """Which plans are allowed. Use one of the subclasses."""

    def describe(self) -> str:
        """The method in a few words, as plans print it."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """JSON values that `method_from_json` reads."""
        return {"method": type(self).__name__}


@dataclass(frozen=True)
class Auto(Method):
    """The fastest plan found, of any kind: one mesh or a pipeline."""

    def describe(self) -> str:
        """The method in a few words."""
        return "auto"


@dataclass(frozen=True)
class Off(Method):
    """Plain `jax.jit` through the same interface, to find out whether an error comes from the plan."""

    def describe(self) -> str:
        """The method in a few words."""
        return "off: plain jit"


@dataclass(frozen=True)
class Sharded(Method):
    """The fastest plan found on one mesh, by the integer program.

    Attributes:
      mesh_shape: the shape of the mesh, major to minor; None tries every shape of the cluster.
      remat: what the backward pass computes again, as in `Pipeline`; "auto" is the least that fits the memory, and
        nothing where micro-batches suffice. The compiler for CPU merges what is computed again with the first time, so
        there only "none" is planned.
    """

    mesh_shape: MeshShape | None = None
    remat: str = "auto"

    def __post_init__(self) -> None:
        if self.mesh_shape is not None:
            object.__setattr__(self, "mesh_shape", _mesh_shape(self.mesh_shape, "Sharded mesh_shape"))
        _check_remat("Sharded", self.remat)

    def describe(self) -> str:
        """The method in a few words."""
        remat = "" if self.remat == "auto" else f", remat {self.remat}"
        return ("sharded" if self.mesh_shape is None else f"sharded on {_by(self.mesh_shape)}") + remat

    def to_json(self) -> dict[str, Any]:
        """JSON values that `method_from_json` reads."""
        shape = None if self.mesh_shape is None else list(self.mesh_shape)
        return super().to_json() | {"mesh_shape": shape, "remat": self.remat}


@dataclass(frozen=True)
class DataParallel(Method):
    """The textbook plan: the batch is sharded, the state is on every device, gradients are all-reduced."""

    def describe(self) -> str:
        """The method in a few words."""
        return "data parallel"


@dataclass(frozen=True)
class Zero(Method):
    """The textbook plan with a sharded training state.

    Attributes:
      stage: 1 shards the optimizer's state, 2 also the gradients, 3 also the parameters.
    """

    stage: Literal[1, 2, 3]

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise OptionError(
                f"Zero stage={self.stage!r}: use 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
            )

    def describe(self) -> str:
        """The method in a few words."""
        return f"ZeRO-{self.stage}"

    def to_json(self) -> dict[str, Any]:
        """JSON values that `method_from_json` reads."""
        return super().to_json() | {"stage": self.stage}


@dataclass(frozen=True)
class TensorParallel(Method):
    """The textbook plan that shards pairs of matrices by columns, then by rows, and all-reduces after the second."""

    def describe(self) -> str:
        """The method in a few words."""
        return "tensor parallel"


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
    """

    num_stages: int | None = None
    schedule: str = "auto"
    submesh_shapes: tuple[int | MeshShape, ...] | None = None
    remat: str = "auto"

    def __post_init__(self) -> None:
        from alpa_lite.schedules import NAMES

        stages = self.num_stages
        if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
            raise OptionError(f"Pipeline num_stages={stages!r}: give a positive number, or None to search for it")
        if self.schedule not in ("auto", *NAMES):
            raise OptionError(f'Pipeline schedule={self.schedule!r}: use "auto" or one of {", ".join(NAMES)}')
        _check_remat("Pipeline", self.remat)
        if self.submesh_shapes is not None:
            if not isinstance(self.submesh_shapes, list | tuple) or not self.submesh_shapes:
                raise OptionError(
                    f"Pipeline submesh_shapes={self.submesh_shapes!r}: give the devices of each stage, such as (4, 4)"
                )
            shapes = tuple(_mesh_shape(shape, "Pipeline submesh_shapes") for shape in self.submesh_shapes)
            object.__setattr__(self, "submesh_shapes", shapes)
            if stages is not None and len(shapes) != stages:
                raise OptionError(
                    f"Pipeline num_stages={stages}, but submesh_shapes has {len(shapes)} entries; leave one of them out"
                )

    @property
    def mesh_shapes(self) -> tuple[MeshShape, ...] | None:
        """`submesh_shapes`, numbers as shapes of one axis."""
        shapes = self.submesh_shapes
        return None if shapes is None else tuple(_mesh_shape(shape, "Pipeline submesh_shapes") for shape in shapes)

    def describe(self) -> str:
        """The method in a few words."""
        shapes = self.mesh_shapes
        parts = [f"{self.num_stages} stages"] if self.num_stages is not None else []
        parts += [self.schedule] if self.schedule != "auto" else []
        parts += ["on " + ", ".join(map(_by, shapes))] if shapes is not None else []
        parts += [f"remat {self.remat}"] if self.remat != "auto" else []
        return "pipeline" + (": " + ", ".join(parts) if parts else "")

    def to_json(self) -> dict[str, Any]:
        """JSON values that `method_from_json` reads."""
        shapes = None if self.mesh_shapes is None else [list(shape) for shape in self.mesh_shapes]
        fields = {"num_stages": self.num_stages, "schedule": self.schedule, "submesh_shapes": shapes}
        return super().to_json() | fields | {"remat": self.remat}


@dataclass(frozen=True, init=False)
class Manual(Method):
    """Some arguments sharded by hand, everything else left to the integer program.

    Attributes:
      specs: (path, spec) pairs in order of path. A path is that of one argument, as plans print it
        (`state/params/w`) or as `jax.tree_util.keystr` writes it (`state['params']['w']`); see `alpa_lite.paths`.
      mesh_shape: devices along each axis, major to minor.
      axis_names: the names that the specs use, one an axis.
    """

    specs: tuple[tuple[str, PartitionSpec], ...]
    mesh_shape: MeshShape
    axis_names: tuple[str, ...]

    def __init__(
        self, specs: Mapping[str, PartitionSpec], mesh_shape: Sequence[int], axis_names: Sequence[str]
    ) -> None:
        """Takes the specs as a mapping from path to `PartitionSpec`.

        Raises:
          OptionError: if a spec is not a `PartitionSpec`, names an unknown axis or one axis twice, or if the mesh shape
            and the names do not match.
        """
        names = tuple(axis_names)
        shape = _mesh_shape(mesh_shape, "Manual mesh_shape")
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
            raise OptionError(f"Manual axis_names={names!r}: give distinct names, such as ('data', 'model')")
        if len(shape) != len(names):
            raise OptionError(f"Manual axis_names={names!r}: give one name for each axis of mesh_shape={shape}")
        for path, spec in specs.items():
            _check_spec(path, spec, names)
        object.__setattr__(self, "specs", tuple(sorted(specs.items(), key=lambda item: item[0])))
        object.__setattr__(self, "mesh_shape", shape)
        object.__setattr__(self, "axis_names", names)

    def describe(self) -> str:
        """The method in a few words."""
        return f"manual: {len(self.specs)} arguments fixed on {_by(self.mesh_shape)} ({', '.join(self.axis_names)})"

    def to_json(self) -> dict[str, Any]:
        """JSON values that `method_from_json` reads."""
        specs = {path: [list(e) if isinstance(e, tuple) else e for e in spec] for path, spec in self.specs}
        mesh = {"mesh_shape": list(self.mesh_shape), "axis_names": list(self.axis_names)}
        return super().to_json() | {"specs": specs} | mesh


_BY_NAME: Mapping[str, type[Method]] = {
    cls.__name__: cls for cls in (Auto, Off, Sharded, DataParallel, Zero, TensorParallel, Pipeline, Manual)
}


def _check_remat(method: str, remat: str) -> None:
    """Raises OptionError if there is no such rematerialisation."""
    if remat not in ("auto", "none", "layer", "selective"):
        raise OptionError(f'{method} remat={remat!r}: use "auto", "none", "layer" or "selective"')


def method_from_json(data: Mapping[str, Any]) -> Method:
    """The method that `Method.to_json` wrote.

    Raises:
      OptionError: if there is no such method, or its fields are missing, unknown or impossible.
    """
    fields = dict(data)
    name = fields.pop("method", None)
    if name not in _BY_NAME:
        raise OptionError(f"method={name!r}: use one of {', '.join(_BY_NAME)}")
    if name == "Manual" and isinstance(fields.get("specs"), Mapping):
        from jax.sharding import PartitionSpec

        fields["specs"] = {
            path: PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))
            for path, entries in fields["specs"].items()
        }
    try:
        return _BY_NAME[name](**fields)
    except TypeError as error:
        raise OptionError(f"method={name!r} with fields {sorted(fields)}: {error}; write it with to_json()") from error


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `parallelize`. Sequences become tuples, and numbers tuples of one, on construction.

    Attributes:
      method: a `Method`; "auto" and "off" stand for `Auto()` and `Off()`.
      cluster: the devices to plan for, or the name of a preset; None stands for `Cluster.local()`.
      memory_per_device: bytes that a plan may use on each device; None stands for the cluster's usable memory.
      num_microbatches: the number of equal parts of the batch that are computed one after another. "auto" chooses: on
        one mesh 1, or if that does not fit the memory, the least power of two that does.
      allow_inexact: whether micro-batches may change the result if a value needs the whole batch (batch norm,
        contrastive losses). Such a value is then computed within each micro-batch, and the plan's notes list it.
      batch_argnums, batch_argnames: the arguments that are the batch; "auto" finds them.
      static_argnums, static_argnames: the arguments that are constants of the program; they must be hashable.
      donate_argnums: the arguments whose buffers the step may reuse; "auto" stands for the state.
      communication: "explicit" writes every collective out; "compiler" gives shardings and leaves the rest to XLA.
      plan: a plan, or the path of one, to run without solving.
      verify: "shardy" checks each plan against the partitioner, "hlo" also the compiled program, "off" neither.
      solver_time_limit: wall-clock seconds for solving the integer programs of one step, all mesh shapes together; of a
        pipeline, of one stage, or of one layer at one price of memory. Another number of micro-batches, or other
        rematerialisation, is another step. Tracing, building the programs and verification are not counted.
      dump_dir: a directory for the value after each pass, as text; None writes nothing.

    Raises:
      OptionError: naming the argument, the value and the remedy.
    """

    method: Method | str = "auto"
    cluster: Cluster | str | None = None
    memory_per_device: int | None = None
    num_microbatches: int | Literal["auto"] = "auto"
    allow_inexact: bool = False
    batch_argnums: tuple[int, ...] | Literal["auto"] = "auto"
    batch_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] | Literal["auto"] = "auto"
    communication: Literal["explicit", "compiler"] = "explicit"
    plan: Plan | str | os.PathLike[str] | None = None
    verify: Literal["shardy", "hlo", "off"] = "shardy"
    solver_time_limit: float = 60.0
    dump_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("method", _method(self.method))
        put("cluster", Cluster.preset(self.cluster) if isinstance(self.cluster, str) else self.cluster)
        for name in ("batch_argnums", "static_argnums", "donate_argnums"):
            put(name, _numbers(name, getattr(self, name), auto=name != "static_argnums"))
        for name in ("batch_argnames", "static_argnames"):
            put(name, _names(name, getattr(self, name)))
        _validate(self)


def _validate(options: Options) -> None:
    """Raises OptionError for what the conversions of `Options` let through."""

    def refuse(name: str, remedy: str) -> None:
        raise OptionError(f"{name}={getattr(options, name)!r}: {remedy}")

    if options.cluster is not None and not isinstance(options.cluster, Cluster):
        refuse("cluster", "give a Cluster, the name of a preset, or None for the devices here")
    memory = options.memory_per_device
    if memory is not None and (not _is_number(memory) or memory <= 0):
        refuse("memory_per_device", "give bytes above 0, such as 16 * 2**30, or None for the device's memory")
    count = options.num_microbatches
    if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        refuse("num_microbatches", 'give a positive number, or "auto"')
    if isinstance(options.method, Off) and count not in ("auto", 1):
        refuse("num_microbatches", 'method="off" runs the step as it is; leave one of the two out')
    if not isinstance(options.allow_inexact, bool):
        refuse("allow_inexact", "give True or False")
    if options.communication not in ("explicit", "compiler"):
        refuse("communication", 'use "explicit" or "compiler"')
    if options.verify not in ("shardy", "hlo", "off"):
        refuse("verify", 'use "shardy", "hlo" or "off"')
    if not _is_number(options.solver_time_limit) or not options.solver_time_limit > 0:
        refuse("solver_time_limit", "give seconds above 0")
    if options.dump_dir is not None and not isinstance(options.dump_dir, str | os.PathLike):
        refuse("dump_dir", "give the path of a directory, or None")
    for kind, join in (("argnums", set(options.static_argnums)), ("argnames", set(options.static_argnames))):
        batch = getattr(options, f"batch_{kind}")
        both = join.intersection(batch) if batch != "auto" else set()
        if both:
            refuse(f"static_{kind}", f"{sorted(both)} cannot be static and the batch; leave them out of one of the two")
    if options.donate_argnums != "auto" and set(options.donate_argnums) & set(options.static_argnums):
        refuse("donate_argnums", "a static argument has no buffer to donate; leave it out")


def _method(value: object) -> Method:
    """The method that a value of `method=` stands for."""
    if isinstance(value, str) and value in ("auto", "off"):
        return Auto() if value == "auto" else Off()
    if isinstance(value, Method) and type(value) is not Method:
        return value
    choices = (
        '"auto", "off", Auto(), Sharded(), DataParallel(), Zero(stage=2), TensorParallel(), Pipeline() or Manual(...)'
    )
    hint = f"; {value.__name__} is a class, call it" if isinstance(value, type) else ""
    raise OptionError(f"method={value!r}: use {choices}{hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(name: str, value: Any, auto: bool) -> tuple[int, ...] | Literal["auto"]:
    """Argument numbers as a tuple."""
    if auto and isinstance(value, str) and value == "auto":
        return "auto"
    items = (value,) if isinstance(value, int) else value
    if isinstance(items, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        if any(i < 0 for i in items) or len(set(items)) != len(items):
            raise OptionError(f"{name}={value!r}: count arguments from 0, each at most once")
        return tuple(items)
    choices = "an argument number, a tuple of them" + (' or "auto"' if auto else "")
    raise OptionError(f"{name}={value!r}: give {choices}")


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Argument names as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(isinstance(i, str) and i.isidentifier() for i in items):
        return tuple(items)
    raise OptionError(f"{name}={value!r}: give the name of a parameter or a tuple of such names")


def _mesh_shape(value: Any, what: str) -> MeshShape:
    """A mesh shape as a tuple."""
    items = (value,) if isinstance(value, int) else value
    if isinstance(items, list | tuple) and items and all(type(size) is int and size >= 1 for size in items):
        return tuple(items)
    raise OptionError(f"{what}={value!r}: give the devices along each axis, such as (4, 2)")


def _by(shape: MeshShape) -> str:
    return " x ".join(map(str, shape))


def _check_spec(path: str, spec: PartitionSpec, names: tuple[str, ...]) -> None:
    """Raises OptionError unless `spec` is a partition spec over `names`."""
    from jax.sharding import PartitionSpec

    if not isinstance(spec, PartitionSpec):
        raise OptionError(f"Manual specs[{path!r}]={spec!r}: give a jax.sharding.PartitionSpec")
    used = [axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    for axis in used:
        if axis not in names:
            raise OptionError(f"Manual specs[{path!r}]={spec}: no axis is named {axis!r}; axis_names={names}")
    if len(set(used)) != len(used):
        raise OptionError(f"Manual specs[{path!r}]={spec}: an axis may shard one dim only")
