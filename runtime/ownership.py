"""Donation tracking: a step may overwrite the arrays that it made for its caller, and no others.

A donated buffer is overwritten by the new state, so it must be the step's own: an array that a call returned as state,
or that `place` or `init` made to be given away. Any other array is copied, however it is placed: another reference to
it may be used again. One `Owned` serves all executables of a step, and the steps that share its state.

In the ordinary loop the state is, leaf for leaf, what the last call returned. Only this is remembered by strong
references (`Owned.last`), so that a call costs one comparison of identities; it is forgotten when its last leaf is
garbage, so that a state that the user has dropped is not kept alive. When a call is given anything else, what the last
call returned becomes one of the arrays that are known weakly, by id.

*Aliases.* The same buffer may reach a step twice: an array as state and as a reference (a target network), twice in
one pytree, or as a view of the state, such as one of its shards. JAX 0.10 ends the process where a donated buffer is
another argument too, JAX 0.12 raises. So such state is copied, the copy is donated, and the array is its holder's from
then on. Arrays that a step made have buffers of their own, and only arrays that are committed to devices can be views
of them: a call looks at those of these that it has not seen, and compares addresses where the blocks have the same
type. Memory that NumPy or DLPack has imported needs no look: XLA does not overwrite it.

A *deleted* array that is given again is an error (`errors.DonatedError`), before anything runs: JAX 0.10 ends the
process where an executable on several devices is given one, and a pipeline that met one would have donated others.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import DonatedError
from alpa_lite.ir.graph import Argument, Traced
from alpa_lite.ir.paths import shown
from alpa_lite.ir.program import Program, Run


class Owned:
    """The arrays that a step made and its caller holds. Threads replace `last` as one value.

    Attributes:
      last: of the state that the last call returned: a reference to its last leaf, the other leaves, and the owner that
        recorded it; None if that leaf is garbage by now.
    """

    def __init__(self) -> None:
        self.last: tuple[weakref.ref[Any], Sequence[Any], object] | None = None
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def remember(self, canary: Any, others: Sequence[Any], owner: object) -> None:
        """Records the state that a call of an owner returned: its last leaf and the others."""
        self.last = weakref.ref(canary, self._forget), others, owner

    def is_last(self, state: Sequence[Any], owner: object) -> bool:
        """Returns whether a state is, leaf for leaf, the last one that was recorded, by the same owner."""
        last = self.last
        if last is None or last[2] is not owner:
            return False
        return last[0]() is state[-1] and all(map(operator.is_, last[1], state))

    def add(self, arrays: Iterable[Any]) -> None:
        """Records arrays that were made to be given to the step. Only a `jax.Array` has a buffer to overwrite."""
        for array in arrays:
            if isinstance(array, jax.Array):
                self._known[id(array)] = array

    def flush(self) -> None:
        """Forgets the order of the last call's results: its arrays become known by id."""
        last, self.last = self.last, None
        if last is not None:
            self.add((last[0](), *last[1]))

    def has(self, array: Any) -> bool:
        """Returns whether the step made this array."""
        return self._known.get(id(array)) is array

    def unshared(self, leaves: Sequence[Any], ours: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Returns which arrays a call may overwrite. Those whose buffers it is given twice become their holder's.

        Args:
          leaves: of the call, none of them deleted.
          ours: whether an array may be overwritten if it is given once.
        """
        arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
        foreign = {_view_type(leaf) for leaf in arrays.values() if not self.has(leaf)} - {None}
        holders: defaultdict[Any, set[int]] = defaultdict(set)
        for i, array in arrays.items():
            if foreign and _view_type(array) in foreign:
                for buffer in _buffers(array):
                    holders[buffer].add(i)
        shared = {i for i, count in Counter(map(id, leaves)).items() if count > 1}
        shared.update(*(found for found in holders.values() if len(found) > 1))
        for i in shared:
            self._known.pop(i, None)
        return (lambda array: id(array) not in shared and ours(array)) if shared else ours

    def _forget(self, canary: weakref.ref[Any]) -> None:
        if self.last is not None and self.last[0] is canary:
            self.last = None


class Disjoint:
    """Tests that arguments that are kept share no buffer with the state that the last call returned, which is donated.

    An array that shared none when it was first given shares none with the state that was computed since.
    """

    def __init__(self, donated: Iterable[tuple[Any, Any]], has: Callable[[Any], bool]) -> None:
        """Args: sharding and abstract value of the donated arguments, and whether the step made an array."""
        self._has = has
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._places: defaultdict[Any, list[int]] = defaultdict(list)  # by the type of the blocks
        for n, (sharding, aval) in enumerate(donated):
            block, dtype = sharding.shard_shape(aval.shape), aval.dtype
            if jnp.issubdtype(dtype, jax.dtypes.extended):
                block, dtype = (*block, *_jax.key_kind(dtype)[1]), np.dtype(np.uint32)
            self._places[block, dtype].append(n)

    def __call__(self, kept: Sequence[Any], donated: Sequence[Any]) -> bool:
        """Returns whether they are disjoint; looks at those of `kept` that were not seen yet."""
        seen = self._seen
        for key, leaf in zip(map(id, kept), kept, strict=True):
            if key in seen or (kind := _view_type(leaf)) is None:
                continue
            rivals = [donated[n] for n in self._places.get(kind, ())]
            looked_at = rivals and not self._has(leaf)
            if any(leaf is rival for rival in rivals) or (
                looked_at and not set(_buffers(leaf)).isdisjoint(b for r in rivals for b in _buffers(r))
            ):
                return False
            seen[key] = weakref.ref(leaf, lambda _, key=key: seen.pop(key, None))
        return True


def _view_type(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype of an array's blocks; None for a leaf that shares no buffer with an array that a step made."""
    plain = _plain(leaf) if isinstance(leaf, jax.Array) else None
    if plain is None or not plain.committed or not plain.size:
        return None
    return plain.sharding.shard_shape(plain.shape), plain.dtype


def _buffers(array: Any) -> list[tuple[Any, int]]:
    """Device and address of each block that is here; none of a deleted array."""
    plain = None if array.is_deleted() else _plain(array)
    return [] if plain is None else [(block.device, block.unsafe_buffer_pointer()) for block in _jax.blocks_of(plain)]


def _plain(array: Any) -> Any:
    """The array that has the buffers of keys, or of one that is made when it is read; None if it was not."""
    if type(array) is _jax.PlainArray:
        return array
    return array.made if isinstance(array, _jax.LazyArray) else _jax.data_of_keys(array)


def check_alive(leaves: Sequence[Any], arguments: Sequence[Argument], name: str) -> None:
    """Raises DonatedError if a leaf of a call of the step `name` was donated or deleted."""
    try:
        if not any(map(_jax.is_deleted, leaves)):  # 8 us for 300 arrays, where none has random keys
            return
    except (TypeError, AttributeError):
        pass
    for leaf, argument in zip(leaves, arguments, strict=True):
        if not (hasattr(leaf, "is_deleted") and leaf.is_deleted()):
            continue
        path = shown(argument.path)
        if argument.role != "state":
            raise DonatedError(
                f"{path} was deleted before this call of {name}: other code donated its buffer or called `delete` on "
                "it. Pass an array that still has its buffer"
            )
        raise DonatedError(
            f"{path} was deleted before this call: an earlier call of {name} donated its buffer to the new state, or "
            "other code deleted it. Pass on the state that the last call returned, or keep old states with "
            "donate_argnums=()"
        )


# -- of a pipeline ----------------------------------------------------------------------------------------------------


def owned_inputs(program: Program) -> frozenset[int]:
    """Returns the argument buffers that some run consumes, or that are results: these must not be the caller's."""
    given = {b for group in program.inputs for b in group}
    runs = (item for items in program.lists for item in items if isinstance(item, Run))
    return frozenset(given & {*program.outputs, *(b for item in runs for b in program.consumed(item))})


def in_place_state(program: Program, traced: Traced) -> dict[int, int]:
    """Returns argument -> its buffer of the state that comes back where the next call reads it."""
    found = {}
    for output, argument in traced.state:
        group, result = program.inputs[argument], program.buffers[program.outputs[output]]
        read = [program.buffers[b] for b in group]
        if len(group) == 1 and (read[0].mesh, read[0].layout) == (result.mesh, result.layout):
            found[argument] = group[0]
    return found


def shared_outputs(program: Program, traced: Traced) -> list[int]:
    """Returns the results whose buffers are also state that was given or is returned: later calls may donate these.

    Of equal results, new state keeps the buffer.
    """
    state = dict(traced.state)
    held = {b for argument in state.values() for b in program.inputs[argument]}
    found = []
    for n in sorted(range(len(program.outputs)), key=lambda n: n not in state):
        buffer = program.outputs[n]
        if buffer in held and not (n in state and buffer in program.inputs[state[n]]):
            found.append(n)
        if n in state:
            held.add(buffer)
    return sorted(found)
