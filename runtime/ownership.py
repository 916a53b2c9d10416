"""Donation tracking: a step may overwrite the arrays that it made for its caller, and no others (`docs/runtime.md`).

A donated buffer must be the step's own: an array that a call returned as state, or that `place` or `init` made to be
given away. Any other array is copied. One `DonationTracker` serves all executables of a step, and the steps that share
its state.

In the ordinary loop the state is, leaf for leaf, what the last call returned. Only this is remembered by strong
references (`DonationTracker.last`), and forgotten when its last leaf is garbage, so that a state that the user has
dropped is not kept alive. When a call is given anything else, it becomes some of the arrays that are known weakly, by
id.

*Aliases.* The same buffer may reach a step twice: an array as state and as a reference (a target network), twice in
one pytree, or as a view of the state, such as one of its shards. JAX 0.10 ends the process where a donated buffer is
another argument too, JAX 0.12 raises. So such state is copied, the copy is donated, and the array is its holder's from
then on. Arrays that a step made have buffers of their own, and only arrays that are committed to devices can be views
of them. Memory that NumPy or DLPack has imported needs no look: XLA does not overwrite it.

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
from alpa_lite.ir.graph import Argument
from alpa_lite.ir.paths import format_path


class DonationTracker:
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

    def owner_of(self, state: Sequence[Any]) -> Any:
        """Returns the owner of the last state that was recorded, if this is it, leaf for leaf; else None."""
        last = self.last
        if last is None or last[0]() is not state[-1] or not all(map(operator.is_, last[1], state)):
            return None
        return last[2]

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

    def find_overwritable(self, leaves: Sequence[Any], ours: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Returns which arrays a call may overwrite. Those whose buffers it is given twice become their holder's.

        Args:
          leaves: of the call, none of them deleted.
          ours: whether an array may be overwritten if it is given once.
        """
        arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
        foreign = {view_type(leaf) for leaf in arrays.values() if not self.has(leaf)} - {None}
        holders: defaultdict[Any, set[int]] = defaultdict(set)
        for i, array in arrays.items():
            if foreign and view_type(array) in foreign:
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


def block_type(sharding: Any, aval: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and the dtype of an array's blocks; of random keys, those of their integers."""
    block, dtype = sharding.shard_shape(aval.shape), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return (*block, *_jax.key_kind(dtype)[1]), np.dtype(np.uint32)
    return block, dtype


def view_type(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype of an array's blocks; None for a leaf that shares no buffer with an array that a step made."""
    plain = _plain(leaf) if isinstance(leaf, jax.Array) else None
    if plain is None or not plain.committed or not plain.size:
        return None
    return block_type(plain.sharding, plain)


def _buffers(array: Any) -> list[tuple[Any, int]]:
    """Device and address of each block that is here; none of a deleted array."""
    plain = None if array.is_deleted() else _plain(array)
    return [] if plain is None else [(block.device, block.unsafe_buffer_pointer()) for block in _jax.blocks_of(plain)]


def _plain(array: Any) -> Any:
    """Returns the array that has the buffers of keys, or of one that is made when it is read; None if it was not."""
    if type(array) is _jax.PlainArray:
        return array
    return array.made if isinstance(array, _jax.LazyArray) else _jax.data_of_keys(array)


def any_deleted(leaves: Sequence[Any]) -> bool:
    """Returns whether a leaf was donated or deleted."""
    try:
        return any(map(_jax.is_deleted, leaves))  # 6 us for 300 arrays
    except TypeError:  # NumPy arrays, numbers, random keys, stacked arrays
        return any(hasattr(leaf, "is_deleted") and leaf.is_deleted() for leaf in leaves)


def deleted_error(leaves: Sequence[Any], arguments: Sequence[Argument], name: str) -> DonatedError:
    """Returns the error of a call of the step `name` with a leaf that was donated or deleted."""
    given = zip(leaves, arguments, strict=True)
    gone = next(argument for leaf, argument in given if hasattr(leaf, "is_deleted") and leaf.is_deleted())
    path = format_path(gone.path)
    if gone.role != "state":
        return DonatedError(
            f"{path} was deleted before this call of {name}: other code donated its buffer or called `delete` on it. "
            "Pass an array that still has its buffer"
        )
    return DonatedError(
        f"{path} was deleted before this call: an earlier call of {name} donated its buffer to the new state, or "
        "other code deleted it. Pass on the state that the last call returned, or keep old states with "
        "donate_argnums=()"
    )
