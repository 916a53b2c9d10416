"""Binds the flat arguments of a call to the buffers of a program.

An argument of a pipeline is read from a buffer on each submesh that needs it; on one mesh each argument is a buffer.
An array that is placed as the plan reads it is taken as it is. Others are put there, and copied where a run overwrites
the buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite.graph import Traced
from alpa_lite.runtime import global_array, placement
from alpa_lite.runtime.placement import DeviceCopies, is_placed
from alpa_lite.runtime.signatures import check_leaf


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers from which a back-end reads the flat arguments of its program.

    Attributes:
      inputs: for each argument the buffers that it is placed in; the first is that which is read first.
      sharding: of a buffer.
      donated: the buffers that a run overwrites.
      in_place: argument -> buffer of the state that comes back where the next call reads it.
      takes_uncommitted: whether the executable itself puts NumPy arrays, numbers and arrays on no certain device, which
        takes it 4 us where `jax.device_put` takes 95.
      absent: argument -> the array that stands for state that other processes have, which every call returns.
    """

    inputs: Sequence[Sequence[int]]
    sharding: Callable[[int], NamedSharding]
    donated: frozenset[int]
    in_place: Mapping[int, int]
    takes_uncommitted: bool = False
    absent: Mapping[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Slot:
    """An argument of a program in one of the buffers that it is read from.

    An array that cannot change is looked at once: the next call with the same array takes what stands for it.

    Attributes:
      argument: its number.
      buffer: the number of the buffer.
      sharding: of the buffer.
      donated: whether a run overwrites the buffer.
    """

    argument: int
    buffer: int
    sharding: NamedSharding
    donated: bool
    _last: tuple[weakref.ref[Any], weakref.ref[Any]] | None = field(default=None, init=False)

    def recall(self, leaf: Any) -> Any:
        """Returns the array that stands for a leaf, which was the leaf of the last call; else None."""
        last = self._last
        return last[1]() if last is not None and last[0]() is leaf else None

    def remember(self, leaf: Any, array: Any) -> None:
        """Records the array that stands for a leaf which cannot change."""
        self._last = weakref.ref(leaf), weakref.ref(array)

    def concerns_this_process(self, leaf: Any) -> bool:
        """Returns whether a device of this process reads the leaf, or has to send it to those that do."""
        if global_array.is_addressable(self.sharding):
            return True
        return not is_placed(leaf, self.sharding) and global_array.is_global(leaf)


class ArgumentBinder:
    """The slots of a program's arguments."""

    def __init__(self, traced: Traced, buffers: Buffers, steady: Collection[int], copies: DeviceCopies) -> None:
        """Args:
        traced: the step.
        buffers: of its program.
        steady: the arguments that need no look when the state is what the last call returned.
        copies: of frozen weights.
        """
        self._name, self._arguments, self._copies = traced.name, traced.arguments, copies
        self._avals = [traced.graph.values[v].aval for v in traced.graph.block.inputs[: len(traced.arguments)]]
        self._takes_uncommitted = buffers.takes_uncommitted
        self._slots = [
            Slot(n, b, buffers.sharding(b), b in buffers.donated)
            for n, group in enumerate(buffers.inputs)
            for b in group
        ]
        self._rest = [slot for slot in self._slots if slot.argument not in steady]
        self._first = {slot.argument: slot.sharding for slot in reversed(self._slots)}  # where each is read first
        self._unread = [n for n in range(len(self._avals)) if n not in self._first]
        self._called = False

    def bind(
        self, buffers: list[Any], leaves: Sequence[Any], may_overwrite: Callable[[Any], bool], steady: bool
    ) -> None:
        """Fills the buffers. Puts and copies what is not placed as planned; logs if it has to move state.

        Args:
          buffers: of the program.
          leaves: the arguments of the program.
          may_overwrite: of an array.
          steady: whether the buffers of steady state are filled.

        Raises:
          NewSignature: a leaf has another shape or dtype.
        """
        if not steady:
            self._check(leaves)
            state = {n: one for n, one in self._first.items() if self._arguments[n].role == "state"}
            paths = [self._arguments[n].path for n in state]
            taken, first = [leaves[n] for n in state], not self._called
            placement.warn_if_resharded(self._name, taken, list(state.values()), paths, first=first)
            self._called = True
        for n in self._unread:
            check_leaf(leaves[n], self._avals[n])
        moved: list[Slot] = []
        donated: list[Slot] = []
        for slot in self._rest if steady else self._slots:
            leaf = leaves[slot.argument]
            array = slot.recall(leaf)
            if array is None:
                check_leaf(leaf, self._avals[slot.argument])
                if not slot.concerns_this_process(leaf):
                    continue
                array = None if slot.donated else self._placed(slot, leaf)
                if array is None:
                    (donated if slot.donated else moved).append(slot)
            buffers[slot.buffer] = array
        _fill(buffers, moved, leaves, lambda taken, where: global_array.put(placement.snapshot(taken), where))
        _fill(buffers, donated, leaves, lambda taken, where: placement.prepare_donation(taken, where, may_overwrite))

    def copy_all(self, leaves: list[Any]) -> list[Any]:
        """Replaces the leaves by copies where the program reads them first, and returns the copies.

        Leaves that it never reads stay as they are.
        """
        self._check(leaves)
        copied = placement.copies([leaves[n] for n in self._first], list(self._first.values()))
        for n, array in zip(self._first, copied, strict=True):
            leaves[n] = array
        return copied

    def _placed(self, slot: Slot, leaf: Any) -> Any:
        """The array that stands for a leaf, or None if it has to be put by this call."""
        if self._arguments[slot.argument].role == "frozen":
            array = self._copies.get(leaf, slot.sharding)
        else:
            array = leaf if is_placed(leaf, slot.sharding, own_mesh=False) else None
        if array is None and self._takes_uncommitted and not getattr(leaf, "committed", isinstance(leaf, jax.Array)):
            if not isinstance(leaf, jax.Array):
                return placement.snapshot([leaf])[0]
            array = leaf
        if array is not None:
            slot.remember(leaf, array)
        return array

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless the leaves have the planned shapes and dtypes."""
        for leaf, aval in zip(leaves, self._avals, strict=True):
            check_leaf(leaf, aval)


def _fill(
    buffers: list[Any], slots: Sequence[Slot], leaves: Sequence[Any], put: Callable[[list[Any], list[Any]], Any]
) -> None:
    arrays = put([leaves[slot.argument] for slot in slots], [slot.sharding for slot in slots]) if slots else ()
    for slot, array in zip(slots, arrays, strict=True):
        buffers[slot.buffer] = array
