"""Binds the flat arguments of a call to the buffers of a program.

An argument of a pipeline is read from a buffer on each submesh that needs it, a stacked one in the parts that stages
own; on one mesh each argument is a buffer. An array that is placed as the plan reads it is taken as it is. Others are
put there, and copied where a run overwrites the buffer. A leaf of another type than planned raises `NewSignature`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.errors import AlpaLiteError
from alpa_lite.ir import units
from alpa_lite.ir.graph import Argument, Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing.calls import is_weak, leaf_type
from alpa_lite.runtime import placement
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.placement import DeviceCopies, is_placed
from alpa_lite.runtime.stacked import StackedLeaf, leaves_of

logger = logging.getLogger(__name__)


class NewSignature(AlpaLiteError):
    """The arguments do not have the signature that the step was planned for (`tracing.calls`).

    `ParallelStep` then plans for theirs, so that no caller of it sees this error.
    """

    def __init__(self, what: str):
        super().__init__(f"this executable was planned for another signature: {what}")


def weak_flags(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Returns for each leaf whether its dtype is weak."""
    plain = _jax.PlainArray
    return tuple([leaf.aval.weak_type if type(leaf) is plain else is_weak(leaf) for leaf in leaves])


@dataclass(eq=False)
class Slot:
    """An argument of the user's step, or a part of a stacked one, in one of the buffers that it is read from.

    A call with the leaf of the `last` one takes the same array, if the leaf cannot change.
    """

    argument: int
    part: int | None  # its number; None of an argument that is whole
    rows: slice | None  # of the part, in dim 0
    buffer: int
    sharding: NamedSharding
    is_donated: bool  # whether a run overwrites the buffer
    last: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None  # of the last call the leaf, and its array


class ArgumentBinder:
    """The slots of a step's arguments.

    Attributes:
      arguments: what each argument of the user's step is; of a stacked one, its first part.
      in_place: the slots of arguments that need no look where the state is that which the last call returned.
    """

    def __init__(
        self, traced: Traced, buffers: ProgramBuffers, in_place: Collection[int], copies: DeviceCopies,
        *, takes_uncommitted: bool,
    ) -> None:  # fmt: skip
        """Args:
        in_place: the arguments whose slots are `in_place`.
        copies: of frozen weights.
        takes_uncommitted: whether the executable itself puts NumPy arrays, numbers and arrays on no certain device,
          which takes it 4 us where `jax.device_put` takes 95.
        """
        values, inputs = traced.graph.values, traced.graph.block.inputs
        self._name, self._copies, self._takes_uncommitted = traced.name, copies, takes_uncommitted
        self.arguments: list[Argument] = []
        self._slots: list[Slot] = []
        self._types: list[tuple[tuple[int, ...], Any]] = []
        self.stacked: dict[int, StackedLeaf] = {}
        for n, one in enumerate(leaves_of(traced).arguments):
            self.arguments.append(traced.arguments[one.numbers[0]])
            aval = values[inputs[one.numbers[0]]].aval
            self._types.append(((one.bounds[-1], *aval.shape[1:]) if one.bounds else aval.shape, aval.dtype))
            groups = [buffers.program.inputs[number] for number in one.numbers]
            if one.bounds and all(groups):  # what is read in part has no sharding
                self.stacked[n] = StackedLeaf(one.bounds, [group[0] for group in groups], buffers)
            for part, group in enumerate(groups):
                place = (n, part, slice(*one.bounds[part : part + 2])) if one.bounds else (n, None, None)
                self._slots += [Slot(*place, b, buffers.sharding(b), b in buffers.donated) for b in group]
        self.in_place = [slot for slot in self._slots if slot.argument in in_place]
        self._rest = [slot for slot in self._slots if slot.argument not in in_place]
        self._first = {(slot.argument, slot.part): slot for slot in reversed(self._slots)}  # where each is read first
        self._unread = sorted(set(range(len(self._types))) - {slot.argument for slot in self._slots})
        self._called = False

    def bind(
        self, buffers: list[Any], leaves: Sequence[Any], may_overwrite: Callable[[Any], bool],
        may_share: Callable[[Any], bool] | None = None,
    ) -> bool:  # fmt: skip
        """Fills the buffers. Puts and copies what is not placed as planned; logs if it has to move state.

        Args:
          may_share: whether an argument may share memory with those in place, whose buffers are filled; None if all
            are to be.

        Returns:
          Whether none may. Those of the last call do not, and are not looked at again.

        Raises:
          NewSignature: a leaf has another shape or dtype.
        """
        if may_share is None:
            self._check(leaves)
            self._warn_if_resharded(leaves)
        for n in self._unread:
            self._check_leaf(n, leaves[n])
        missing: dict[Callable[..., Any], list[tuple[Slot, Any]]] = {_put: [], placement.copies: []}
        for slot in self._slots if may_share is None else self._rest:
            leaf, last = leaves[slot.argument], slot.last
            array = last[1]() if last is not None and last[0]() is leaf else None
            if array is None:
                if may_share is not None:
                    self._check_leaf(slot.argument, leaf)
                    if may_share(leaf):
                        return False
                given = self._given(slot, leaf)
                if not slot.is_donated:
                    array = self._placed(slot, leaf, given)
                elif may_overwrite(leaf) and is_placed(given, slot.sharding):
                    array = given
                if array is None:
                    missing[placement.copies if slot.is_donated else _put].append((slot, given))
            buffers[slot.buffer] = array
        for make, found in missing.items():
            if found:
                arrays = make([given for _, given in found], [slot.sharding for slot, _ in found])
                for (slot, _), array in zip(found, arrays, strict=True):
                    buffers[slot.buffer] = array
        return True

    def copies(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns copies of the leaves where the program reads them first; those that it never reads as they are."""
        self._check(leaves)
        slots = [self._first[place] for place in sorted(self._first)]
        given = [self._given(slot, leaves[slot.argument]) for slot in slots]
        copied = placement.copies(given, [slot.sharding for slot in slots])
        parts: dict[int, list[Any]] = {}
        for slot, array in zip(slots, copied, strict=True):
            parts.setdefault(slot.argument, []).append(array)
        out = list(leaves)
        for n, arrays in parts.items():
            if n in self.stacked:
                out[n] = self.stacked[n].array_of(arrays)
            else:  # of one that is read in part, no part is all of it
                out[n] = arrays[0] if (n, None) in self._first else jnp.copy(leaves[n])
        return out

    def first_sharding(self, argument: int) -> NamedSharding | None:
        """Returns the sharding with which an argument is read first; None for one that is not read."""
        if argument in self.stacked:
            return self.stacked[argument].whole
        slot = self._first.get((argument, None))
        return None if slot is None else slot.sharding

    def _given(self, slot: Slot, leaf: Any) -> Any:
        """Returns the argument of a slot, or its part of a stacked one; it may share the memory of the leaf."""
        if slot.part is None:
            return leaf
        own = self.stacked[slot.argument].parts_of(leaf) if slot.argument in self.stacked else None
        return leaf[slot.rows] if own is None else own[slot.part]

    def _placed(self, slot: Slot, leaf: Any, given: Any) -> Any:
        """Returns the array that stands for an argument, or None if it has to be put by this call."""
        if self.arguments[slot.argument].role == "frozen":
            array = self._copies.get(given, slot.sharding)
        else:
            array = given if is_placed(given, slot.sharding, own_mesh=False) else None
        if array is None and self._takes_uncommitted and not getattr(given, "committed", isinstance(given, jax.Array)):
            if not isinstance(given, jax.Array):
                return placement.snapshot([given])[0]
            array = given
        if array is not None:
            slot.last = weakref.ref(leaf), weakref.ref(array)
        return array

    def _warn_if_resharded(self, leaves: Sequence[Any]) -> None:
        """Logs a warning with the bytes of state that a call has to move to where the plan reads it.

        The first call has to place arrays of the host and of one device: of it only those on several devices count.
        """
        first, self._called = not self._called, True
        moved = [
            (leaf.nbytes, argument.path)
            for n, (leaf, argument) in enumerate(zip(leaves, self.arguments, strict=True))
            if argument.role == "state" and (n, None) in self._first and hasattr(leaf, "nbytes")
            and not is_placed(leaf, self._first[n, None].sharding)
            and (not first or (isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1))
        ]  # fmt: skip
        if moved:
            size, path = max(moved)
            logger.warning(
                "%s moves %s of state in this call: %s leaves are not sharded as planned, the largest of them "
                "%s of %s. Pass on what the last call returned, or what step.place or step.init returned",
                self._name, units.exact_bytes(sum(size for size, _ in moved)), len(moved), format_path(path),
                units.nbytes(size),
            )  # fmt: skip

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless the leaves have the planned shapes and dtypes."""
        if len(leaves) != len(self._types):
            raise NewSignature("the structure of the arguments")
        for n, leaf in enumerate(leaves):
            self._check_leaf(n, leaf)

    def _check_leaf(self, argument: int, leaf: Any) -> None:
        """Raises NewSignature unless a leaf has the planned shape and dtype."""
        try:
            have = leaf_type(leaf)[:2]
        except TypeError:
            raise NewSignature(f"a {type(leaf).__name__} in place of an array") from None
        if have != self._types[argument]:
            raise NewSignature(f"an argument's (shape, dtype) is {have} and was {self._types[argument]}")


def _put(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return global_array.put(placement.snapshot(leaves), shardings)
