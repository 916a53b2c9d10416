"""State stays where a plan has it: a step that reads the state of another, or its own in other shapes, is planned so.

Evaluation after training (`state_from=train_step`), the short last batch and another sequence length get *pins*
(`alpa_lite.plan.pins`) for the flat arguments that a plan already has on its devices:

1. An array on a mesh of that plan keeps its sharding, which is read from the array.
2. Any other leaf (abstract, on the host, on one device) is matched with the leaf of the plan that has the longest
   common end of its path, and the same shape and dtype. Leaves that tie must have one place, or nothing is pinned.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.cluster import Cluster
from alpa_lite.compilation.placing import PathSuffixIndex, kind_of, places_of
from alpa_lite.compiler import Compiled, compile_step
from alpa_lite.errors import InfeasibleError, OptionError, PlanError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import keys
from alpa_lite.options import Auto, Options, Sharded
from alpa_lite.passes.tracing import calls
from alpa_lite.plan.pins import Piece, Pin, Pins, layout_of_spec
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.meshes import available

logger = logging.getLogger(__name__)


class ExistingPlacement:
    """Where some plans have their state."""

    def __init__(self, plans: Sequence[Plan], why: str) -> None:
        """Args:
        plans: of the steps that have the state.
        why: for `Pin.why`.
        """
        self.why = why
        self._plans = plans
        self.places = [place for plan in plans for place in places_of(plan, why)]
        self._ends = PathSuffixIndex((place.path, place.kind, place.where) for place in self.places)

    def pins(self, flat: Sequence[tuple[str, Any]], *, state_alone: bool = False) -> Pins:
        """Returns the pins of a call.

        Args:
          flat: path and leaf of each flat argument.
          state_alone: whether only what is state of the plans is pinned, not batches on their mesh, too.
        """
        meshes = self._meshes()
        found: dict[int, Pin] = {}
        pieces: dict[int, tuple[Piece, ...]] = {}
        state = set()
        for number, (path, leaf) in enumerate(flat):
            kind = kind_of(leaf)
            where = None if kind is None else self._ends.find(keys(path), kind)
            if where is not None:
                state.add(number)
            elif state_alone:
                continue
            where = _pin_of_array(leaf, meshes, self.why) or where
            if isinstance(where, Pin):
                found[number] = where
            elif where is not None:
                pieces[number] = where
        return Pins(found, pieces, frozenset(state))

    def covers(self, flat: Sequence[tuple[str, Any]]) -> bool:
        """Returns whether a call has all state of the plans, in the same shapes; arguments of each batch may differ."""
        here = {(path, kind_of(leaf)) for path, leaf in flat}
        state = [place for place in self.places if place.kind[0] and place.role != "other"]
        return bool(state) and all((place.path, place.kind) in here for place in state)

    def _meshes(self) -> Mapping[Any, tuple[LogicalMesh, int]]:
        """Returns the meshes of the plans, by the devices that they are here."""
        devices, out = available(), {}
        for plan in self._plans:
            for stage, submesh in zip(plan.stages, plan.division.submeshes, strict=True):
                mesh = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
                first = plan.division.first_devices[submesh]
                ids = tuple(device.id for device in devices[first : first + mesh.size])
                out[mesh.axis_names, mesh.shape, ids] = mesh, first
        return out


def _pin_of_array(leaf: Any, meshes: Mapping[Any, tuple[LogicalMesh, int]], why: str) -> Pin | None:
    """Returns the pin of an array on one of some meshes."""
    sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        return None
    mesh, grid = sharding.mesh, np.array(sharding.mesh.devices)
    found = meshes.get((tuple(mesh.axis_names), grid.shape, tuple(device.id for device in grid.flat)))
    return None if found is None else Pin(*found, layout_of_spec(sharding.spec, leaf.ndim), why)


def plans_of(like: Sequence[Any], given: Mapping[str, Any]) -> tuple[Plan, ...]:
    """Returns the plans of the option `like`. A step that has none yet is planned from the shapes at hand.

    Args:
      like: steps and plans.
      given: the arguments of the call, by name.

    Raises:
      OptionError: a step has no plan yet, and cannot be planned from these arguments.
    """
    out: list[Plan] = []
    for one in like:
        plans = (one,) if isinstance(one, Plan) else one.plans
        if not plans and not isinstance(one, Plan):
            name, found = _name(one), _arguments_for(one, given)
            failure = f"it cannot be planned from {', '.join(given)}"
            if found is not None:
                try:
                    plans = (one.plan(*found[0], **found[1]),)
                except Exception as error:  # what the step raises for arguments that may not be its own
                    failure += f" ({type(error).__name__}: {error})"
            if not plans:
                raise OptionError(
                    f"state_from={name}: {name} has no plan yet, and {failure}, so it is not known where its state is "
                    f"placed; call it first, or {name}.plan(...) with its arguments or their shapes"
                )
        out += plans
    return tuple(out)


def _arguments_for(step: Any, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a step that has not been called: those of its parameters' names, else all in their order."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    named = [p for p in parameters if p.name in given]
    if all(p in named or p.default is not p.empty for p in parameters):
        keywords = {p.name: given[p.name] for p in named if p.kind == p.KEYWORD_ONLY}
        return [given[p.name] for p in named if p.kind != p.KEYWORD_ONLY], keywords
    needed = [p for p in parameters if p.default is p.empty]
    return (list(given.values()), {}) if len(needed) == len(given) else None


def compile_with_placement(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    cluster: Cluster,
    own: Sequence[Plan],
    *,
    why: str = "requested",
    shared: bool = False,
) -> Compiled:
    """Plans a step whose state may have a place already: that of the steps `options.state_from`, or of its own plans.

    Args:
      fun, args, kwargs, options, cluster: as for `compile_step`.
      own: plans of the step for other signatures, the first one first.
      why: the reason that is logged.
      shared: whether all processes call this, and take the plan of process 0.
    """
    planned = functools.partial(compile_step, fun, args, kwargs, cluster=cluster, why=why, shared=shared)
    if options.plan is not None:
        try:
            return planned(options=options)
        except PlanError:
            if not own:
                raise
            options = replace(options, plan=None)  # the plan is for another batch, but says where the state is
    call = calls.describe_calling(fun, args, kwargs, options.static_argnums, options.static_argnames)
    flat = calls.leaves_with_paths(call, args, kwargs)
    if options.state_from:
        names = ", ".join(getattr(one, "__name__", "the plan") for one in options.state_from)
        plans = plans_of(options.state_from, {**dict(zip(call.names, args, strict=True)), **kwargs})
        found = ExistingPlacement(plans, f"the state is kept where {names} has it").pins(flat)
        if not found:
            logger.warning(
                "%s: no argument has a leaf of state_from=%s: it is planned independently", _name(fun), names
            )
        return planned(options=options, pins=found)
    kept = f"the state is kept where {_name(fun)} has it for other shapes"
    alike = ((plan, ExistingPlacement([plan], kept)) for plan in own if plan.cluster == cluster)
    like, placement = next(((plan, one) for plan, one in alike if one.covers(flat)), (None, None))
    if like is None or placement is None:
        return planned(options=options)
    found = placement.pins(flat, state_alone=True)
    try:
        try:
            return planned(options=options, pins=found, like=like)
        except OptionError as error:  # such as a short last batch that does not divide over the devices
            if like.is_pipelined or isinstance(options.method, Auto | Sharded):
                raise
            logger.info("%s is sharded freely for these shapes, its state where it is: %s", _name(fun), error)
            return planned(options=replace(options, method=Sharded()), pins=found, like=like)
    except InfeasibleError as error:
        logger.warning("%s is planned again for these shapes, and moves its state: %s", _name(fun), error)
        return planned(options=options)


def _name(fun: Any) -> str:
    return getattr(fun, "__name__", "the step")
