"""Binds the flat arguments of a call to the buffers of a program.

An argument of a pipeline is read from a buffer on each submesh that needs it; on one mesh each argument is a buffer.
An array that is placed as the plan reads it is taken as it is. Others are put there, and copied where a run overwrites
the buffer. A leaf of another type than planned raises `NewSignature`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.errors import AlpaLiteError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import shown
from alpa_lite.passes.tracing.calls import is_weak, leaf_type
from alpa_lite.report import units
from alpa_lite.runtime import placement
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.placement import DeviceCopies, is_placed

logger = logging.getLogger(__name__)


class NewSignature(AlpaLiteError):
    """The arguments do not have the signature that the step was planned for (`tracing.calls`).

    `ParallelStep` then plans for theirs, so that no caller of it sees this error.
    """

    def __init__(self, what: str):
        super().__init__(f"this executable was planned for another signature: {what}")


def check_leaf(leaf: Any, aval: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raises NewSignature unless a leaf has the shape (or a given one) and dtype of an abstract value."""
    wanted = (aval.shape if shape is None else shape, aval.dtype)
    try:
        have = leaf_type(leaf)[:2]
    except TypeError:
        raise NewSignature(f"a {type(leaf).__name__} in place of an array") from None
    if have != wanted:
        raise NewSignature(f"an argument's (shape, dtype) is {have} and was {wanted}")


def weak_flags(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Returns for each leaf whether its dtype is weak."""
    plain = _jax.PlainArray
    return tuple([leaf.aval.weak_type if type(leaf) is plain else is_weak(leaf) for leaf in leaves])


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
    """

    inputs: Sequence[Sequence[int]]
    sharding: Callable[[int], NamedSharding]
    donated: frozenset[int]
    in_place: Mapping[int, int]
    takes_uncommitted: bool = False


@dataclass(eq=False)
class Slot:
    """An argument of a program in one of the buffers that it is read from.

    Attributes:
      argument: its number.
      buffer: the number of the buffer.
      sharding: of the buffer.
      donated: whether a run overwrites the buffer.
      last: of the last call, the leaf and the array that stands for it, if the leaf cannot change: a call with the same
        leaf takes the same array.
    """

    argument: int
    buffer: int
    sharding: NamedSharding
    donated: bool
    last: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


class ArgumentBinder:
    """The slots of a program's arguments."""

    def __init__(self, traced: Traced, buffers: Buffers, steady: Collection[int], copies: DeviceCopies) -> None:
        """Args: `steady` are the arguments that need no look when the state is that which the last call returned."""
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
          leaves: the arguments of the program.
          steady: whether the buffers of steady state are filled.

        Raises:
          NewSignature: a leaf has another shape or dtype.
        """
        if not steady:
            self._check(leaves)
            self._warn_if_resharded(leaves)
        for n in self._unread:
            check_leaf(leaves[n], self._avals[n])
        missing: dict[Callable[..., Any], list[Slot]] = {_put: [], placement.copies: []}
        for slot in self._rest if steady else self._slots:
            leaf, last = leaves[slot.argument], slot.last
            array = last[1]() if last is not None and last[0]() is leaf else None
            if array is None:
                check_leaf(leaf, self._avals[slot.argument])
                if not slot.donated:
                    array = self._placed(slot, leaf)
                elif may_overwrite(leaf) and is_placed(leaf, slot.sharding):
                    array = leaf
                if array is None:
                    missing[placement.copies if slot.donated else _put].append(slot)
            buffers[slot.buffer] = array
        for make, slots in missing.items():
            if slots:
                arrays = make([leaves[slot.argument] for slot in slots], [slot.sharding for slot in slots])
                for slot, array in zip(slots, arrays, strict=True):
                    buffers[slot.buffer] = array

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
            slot.last = weakref.ref(leaf), weakref.ref(array)
        return array

    def _warn_if_resharded(self, leaves: Sequence[Any]) -> None:
        """Logs a warning with the bytes of state that a call has to move to where the plan reads it.

        The first call has to place arrays of the host and of one device: of it only those on several devices count.
        """
        first, self._called = not self._called, True
        moved = [
            (leaf.nbytes, argument.path)
            for n, (leaf, argument) in enumerate(zip(leaves, self._arguments, strict=True))
            if argument.role == "state" and n in self._first and hasattr(leaf, "nbytes")
            and not is_placed(leaf, self._first[n])
            and (not first or (isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1))
        ]  # fmt: skip
        if moved:
            size, path = max(moved)
            logger.warning(
                "%s moves %s of state in this call: %s leaves are not sharded as planned, the largest of them "
                "%s of %s. Pass on what the last call returned, or what step.place or step.init returned",
                self._name, units.exact_bytes(sum(size for size, _ in moved)), len(moved), shown(path),
                units.nbytes(size),
            )  # fmt: skip

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless the leaves have the planned shapes and dtypes."""
        for leaf, aval in zip(leaves, self._avals, strict=True):
            check_leaf(leaf, aval)


def _put(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    return global_array.put(placement.snapshot(leaves), shardings)
