"""All that the user says of where arguments lie and of the mesh: `Manual`, annotations, arrays, and the context.

Every entry of `Manual` names arguments, and state that belongs to a parameter follows it.

State follows a parameter that has its shape and the longest end of its path: `state/opt_state/0/mu/Dense_0/kernel` has
the end `Dense_0/kernel` of `state/params/Dense_0/kernel`. If several parameters have it, they must agree.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir import paths
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import format_path, tokens
from alpa_lite.methods import NAMES, REGEX, Auto, Manual, Method, Sharded, dims_of, matches
from alpa_lite.passes.ir.primitives import CONSTRAINT
from alpa_lite.passes.sharding.kinds import state_kinds
from alpa_lite.passes.sharding.space import describe_mesh
from alpa_lite.passes.sharding.textbook import Textbook
from alpa_lite.passes.tracing.placements import Annotation, logical_mesh
from alpa_lite.plan.pins import Wish, Wishes


def manual(traced: Traced, method: Manual) -> dict[str, Wish]:
    """Returns the wish of each argument that the method names, by stored path, with the state that follows a parameter.

    Raises:
      OptionError: an entry names no argument, or a path is that of several, or two paths are those of one argument.
    """
    known = [argument.path for argument in traced.arguments]
    shapes = _shapes(traced)
    exact: dict[str, str] = {}
    found: dict[str, Wish] = {}
    own: dict[str, Wish] = {}
    for key, spec in method.specs:
        wish = Wish(dims_of(spec), f"Manual specs[{key!r}]={spec}")
        same = [] if key.startswith(REGEX) else paths.find(key, known)
        if len(same) > 1:
            raise OptionError(f"Manual names {key!r}, which is any of {', '.join(same)}; write one of these.")
        if same:
            other = exact.setdefault(same[0], key)
            if other != key:
                raise OptionError(
                    f"Manual gives {format_path(same[0])!r} two specs, as {other!r} and {key!r}; give one."
                )
            if not shapes[same[0]] and any(wish.dims):
                raise OptionError(f"Manual gives a spec for {format_path(same[0])!r}, which is a scalar; leave it out.")
            own[same[0]] = wish
            continue
        some = [path for path in known if matches(key, format_path(path))]
        if not some:
            raise OptionError(_nothing(key, known))
        found.update(dict.fromkeys(some, wish))
    return _followers(traced, found | own)


def collect_wishes(
    traced: Traced, method: Method, num_devices: int, said: Sequence[Annotation] = (), *,
    context: Any = None, forbidden: frozenset[str] = frozenset(), placed: Mapping[str, Wish] = MappingProxyType({}),
    placed_on: LogicalMesh | None = None,
) -> Wishes:  # fmt: skip
    """Returns all that the user says of a step.

    The mesh is that of the context, of the constraints in the step, of annotations, or of arrays that arrive sharded,
    whichever of these is the first to have one of all devices. Arrays give way to a method that asks for another mesh
    or fixes arguments itself.

    Args:
      said: what the arguments say of themselves.
      context: the JAX mesh of the context; None without one.
      forbidden: names of strategies.
      placed: stored path of an argument -> what `in_shardings` and `out_shardings` say of it.
      placed_on: their mesh, which comes before all others.

    Raises:
      OptionError: an entry of `Manual` names no argument, or a path is ambiguous.
    """
    found = (manual(traced, method) if isinstance(method, Manual) else {}) | dict(placed)
    names = method.names if isinstance(method, Manual) else ()
    notes: list[str] = []
    mesh, why = None, ""
    first = {} if placed_on is None else {placed_on: _SHARDINGS}
    for candidate, source in (first | _meshes(traced, said, context)).items():
        if candidate.size != num_devices:
            notes.append(f"{source} has a mesh of {candidate.size} devices, and the plan {num_devices}: not applied")
        elif mesh is None and (source != _ARRAYS or _admits(method, candidate, names)):
            mesh, why = candidate, source
        elif candidate != mesh:
            notes.append(
                f"{source} has the mesh {describe_mesh(candidate)}: not applied with {why or method.describe()}"
            )
    leaves: dict[str, Wish] = {}
    for one in said:
        path = traced.arguments[one.number].path
        if one.dims is None:
            notes.append(f"{one.why}: not applied")
        elif path in found or one.mesh not in (None, mesh):
            continue
        elif isinstance(method, Textbook):
            notes.append(f"{one.why} ({format_path(path)}): the method {method.describe()} comes before it")
        else:
            leaves[path] = Wish(one.dims, one.why)
    spoken = dict.fromkeys(a for wish in leaves.values() for axes in wish.dims for a in axes or ())
    if mesh is None and len(spoken) > MAX_BARE_NAMES:
        notes.append(
            f"annotations name {len(spoken)} axes ({', '.join([*spoken][:MAX_BARE_NAMES])}, ...) without a mesh and "
            "without rules (nnx.logical_axis_rules): not applied; plan under jax.set_mesh(mesh), or give rules"
        )
        leaves = {}
    scopes = [op.params["dims"] for op in traced.graph.ops() if op.name == CONSTRAINT and op.params["mesh"] is None]
    dims = [*scopes, *(wish.dims for wish in (*leaves.values(), *placed.values()))]
    more = mesh is None and not names and bool(dims)
    if more and not (isinstance(method, Sharded) and method.mesh_shape is not None):
        names = tuple(dict.fromkeys(a for some in dims for axes in some for a in axes or ()))
        more = not set(names) <= set(NAMES)
    return Wishes(mesh, names, more, why, leaves | found, frozenset(found), tuple(dict.fromkeys(notes)), forbidden)


MAX_BARE_NAMES = 3
"""The most names of axes that annotations without a mesh may have: as many as a searched mesh has axes. A model with
more names layers and not axes: without rules they say nothing of a mesh."""

_ARRAYS = "an array that arrives sharded"
_SHARDINGS = "in_shardings or out_shardings"


def _meshes(traced: Traced, said: Sequence[Annotation], context: Any) -> dict[LogicalMesh, str]:
    """Returns the distinct meshes that the user names, with their sources, the most binding first."""
    found: dict[LogicalMesh, str] = {}
    if context is not None:
        found[logical_mesh(context)] = "the context (jax.set_mesh)"
    for op in traced.graph.ops():
        if op.name == CONSTRAINT and op.params["mesh"] is not None:
            mesh = LogicalMesh(*op.params["mesh"])
            if mesh not in found and mesh.size > 1:
                found[mesh] = f"{op.params['why']} at {_jax.source_line(op.source)}"
    for one in sorted(said, key=lambda one: one.array):
        if one.mesh is not None:
            found.setdefault(one.mesh, _ARRAYS if one.array else one.why)
    return found


def _admits(method: Method, mesh: LogicalMesh, names: Sequence[str]) -> bool:
    """Returns whether a method can be planned on the mesh of some arrays."""
    other = isinstance(method, Manual | Sharded) and method.mesh_shape not in (None, mesh.shape)
    return not other and isinstance(method, Auto | Sharded | Manual) and set(names) <= set(mesh.axis_names)


def _followers(traced: Traced, named: Mapping[str, Wish]) -> dict[str, Wish]:
    """Returns the same with the state that follows a named parameter."""
    shapes = _shapes(traced)
    kinds = {traced.arguments[number].path: kind for number, kind in state_kinds(traced).items()}
    ends: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path in kinds:
        if kinds[path] == "params":
            ends.setdefault((shapes[path], tokens(path)[-1]), []).append(path)
    out = dict(named)
    for path in kinds:
        if kinds[path] == "params" or path in named or not shapes[path]:
            continue
        like = ends.get((shapes[path], tokens(path)[-1]), [])
        pairs = {one: zip(tokens(one)[::-1], tokens(path)[::-1], strict=False) for one in like}
        common = {one: len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs[one])]) for one in like}
        best = [one for one in like if common[one] == max(common.values())]
        wishes = {named.get(one) for one in best}
        if len(wishes) == 1 and (wish := wishes.pop()) is not None:
            out[path] = Wish(wish.dims, f"{wish.why}, which it follows as state of {format_path(best[0])},")
    return out


def _shapes(traced: Traced) -> dict[str, tuple[int, ...]]:
    values, inputs = traced.graph.values, traced.graph.block.inputs
    return {a.path: values[v].shape for a, v in zip(traced.arguments, inputs, strict=False)}


def _nothing(key: str, known: list[str]) -> str:
    """Returns the message for an entry that names nothing."""
    printed = list(map(format_path, known))
    wanted = key.removeprefix(REGEX) if key.startswith(REGEX) else paths.spellings(key)[-1]
    close = difflib.get_close_matches(wanted, printed, n=3, cutoff=0.3)
    hint = f"similar arguments are {', '.join(close)}" if close else f"its arguments are {', '.join(printed[:5])}"
    return f"Manual names {key!r}, which is not an argument of the step; {hint}."
