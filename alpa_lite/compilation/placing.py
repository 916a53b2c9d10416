"""Where a plan has its leaves, and which of them a leaf of another pytree stands for.

Leaves are compared by shape, dtype, and the longest common end of their paths, key by key, so that
`params['dense']['kernel']` matches `state.params['dense']['kernel']` rather than
`state.opt_state[0].mu['dense']['kernel']`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import NamedSharding

from alpa_lite.errors import PlanError
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.paths import format_path, keys
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.plan import pins
from alpa_lite.plan.pins import Piece, Pin, pin_of
from alpa_lite.plan.records import PlanRecord
from alpa_lite.runtime.meshes import available, mesh_of

T = TypeVar("T")

Kind = tuple[tuple[int, ...], str]
"""Shape, and the dtype's name."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a plan has one leaf that is not part of the batch.

    Attributes:
      path: its stored path.
      kind: its shape and dtype.
      where: its pin, or the parts of a stacked leaf that several submeshes have.
      role: "state", "frozen" or "other", as in `records.Leaf`.
    """

    path: str
    kind: Kind
    where: Pin | tuple[Piece, ...]
    role: str


class PathSuffixIndex(Generic[T]):
    """Leaves by the ends of their paths: where each is, for leaves of other pytrees that stand for the same."""

    def __init__(self, leaves: Iterable[tuple[str, Kind, T]]) -> None:
        """Args:
        leaves: path, kind, and where each leaf is; of equal paths and kinds the first counts.
        """
        self._ends: dict[tuple[Kind, tuple[str, ...]], tuple[T, ...]] = {}  # several: no place can be told
        whole: dict[tuple[Kind, tuple[str, ...]], T] = {}
        for path, kind, where in leaves:
            last_first = _last_first(keys(path))
            if (kind, last_first) in whole:
                continue
            whole[kind, last_first] = where
            for length in range(1, len(last_first) + 1):
                end = kind, last_first[:length]
                known = self._ends.get(end, ())
                self._ends[end] = known if where in known else (*known, where)
        self._ends.update((end, (where,)) for end, where in whole.items())

    def find(self, path: Sequence[str], kind: Kind) -> T | None:
        """Where the leaf is that some keys most likely stand for; None if there is none, or if there are several."""
        found = self.candidates(path, kind)
        return found[0] if len(found) == 1 else None

    def candidates(self, path: Sequence[str], kind: Kind) -> tuple[T, ...]:
        """Returns all places that the longest common end of a path leads to."""
        last_first = _last_first(path)
        for length in range(len(last_first), 0, -1):
            found = self._ends.get((kind, last_first[:length]))
            if found is not None:
                return found
        return ()


def _last_first(path: Sequence[str]) -> tuple[str, ...]:
    """Returns the keys of a path from its end.

    Flax writes the array of a Variable as its `value` in some pytrees alone.
    """
    kept = path[:-1] if len(path) > 1 and path[-1] == "value" else path
    return tuple(reversed(kept))


def places_of(plan: PlanRecord, why: str) -> list[Place]:
    """Returns where a plan has the leaves of the arguments that are no batch."""
    leaves = {leaf.path: leaf for stage in plan.stages for leaf in stage.arguments}
    out = []
    for path, where in pins.places(plan, why).items():
        if isinstance(where, Pin):
            leaf = leaves[path]
            out.append(Place(path, (tuple(leaf.shape), leaf.dtype), where, leaf.role))
        else:
            first = leaves[f"{path}[{where[0].low}:{where[0].high}]"]
            out.append(Place(path, ((where[-1].high, *first.shape[1:]), first.dtype), where, first.role))
    return out


def kind_of(leaf: Any) -> Kind | None:
    """Shape and dtype of a leaf; None if it is not an array."""
    try:
        shape, dtype, *_ = calls.leaf_type(leaf)
    except (TypeError, OverflowError):
        return None
    return shape, str(dtype)


def planned_shardings(plan: PlanRecord, tree: Any, devices: Sequence[Any] | None) -> Any:
    """Returns where a plan has the leaves of a pytree: as `Plan.shardings`."""
    devices = available() if devices is None else list(devices)
    leaves, _ = pytrees.flatten_nnx(tree)
    kinds = list(map(kind_of, leaves))
    # Only the ends of paths are compared, so any name stands for the pytree itself.
    paths = [f"tree{jax.tree_util.keystr(path.keys)}{path.inner}" for path in pytrees.leaf_paths(tree)]
    meshes: dict[Any, NamedSharding] = {}

    def sharding(pin: Pin) -> NamedSharding:
        if pin not in meshes:
            own = devices[pin.first_device : pin.first_device + pin.mesh.size]
            if len(own) < pin.mesh.size:
                raise PlanError(
                    f"the plan is for {plan.num_devices} devices, but there are {len(devices)}; give that many, or "
                    "plan for these"
                )
            meshes[pin] = NamedSharding(mesh_of(pin.mesh, own), spec_of(pin.layout))
        return meshes[pin]

    batches = [
        (leaf.path, (tuple(leaf.shape), leaf.dtype), pin_of(stage, plan.division.first_devices[mesh], leaf, ""))
        for stage, mesh in zip(plan.stages, plan.division.submeshes, strict=True)
        for leaf in stage.arguments
        if leaf.role == "batch"
    ]
    ends = PathSuffixIndex([*((place.path, place.kind, place.where) for place in places_of(plan, "")), *batches])
    stage = plan.stages[0]
    first = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names)), plan.division.first_devices[0]
    found = []
    for path, kind in zip(paths, kinds, strict=True):
        where = () if kind is None else ends.candidates(keys(path)[1:], kind)
        if len(where) > 1 or (where and not isinstance(where[0], Pin)):
            what = f"{len(where)} leaves with different placements match" if len(where) > 1 else "submeshes share it"
            raise PlanError(
                f"the plan has no single sharding for {format_path(path)}: {what}; give a tree with more of its path, "
                "or use "
                "step.shardings(...)"
            )
        found.append(sharding(where[0] if where and isinstance(where[0], Pin) else Pin(*first, Layout(()), "")))
    return pytrees.replace_arrays(tree, lambda _: found)
