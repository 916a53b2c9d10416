"""Which arrays a step may overwrite: those that it made for its caller, and no others.

A donated buffer is overwritten by the new state. It must be the step's own: an array that a call returned as state, or
that `place` or `init` made to be given away. An array that comes from elsewhere is copied, however it lies: another
reference to it may be used again. One `Owned` serves all executables of a step (training has one for the full and one
for the short last batch), and the steps that share its state.

In the ordinary loop the state is, leaf for leaf, what the last call returned. Only this is remembered by strong
references (`Owned.last`), so that a call costs one comparison of identities; it is forgotten when its last leaf is
garbage, so that a state that the user has dropped is not kept alive. When a call is given anything else, what the last
call returned becomes one of the arrays that are known weakly, by id.

A *deleted* array that is given again is an error (`errors.DonatedError`). JAX 0.12 raises before it runs or donates
anything, and its error is translated; JAX 0.10 checks what was deleted by `delete`, but an array that was donated ends
the process (`_jax.DIES_OF_DELETED`), so that there arrays are looked at before the call: 8 us for 300 of them on eight
devices, where a call takes 3,500.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import DonatedError
from alpa_lite.graph import Argument
from alpa_lite.paths import shown

Last = tuple[weakref.ref[Any], Sequence[Any], Any]
"""A reference to the last leaf of the state that a call returned, its other leaves, and the executable."""


class Owned:
    """The arrays that a step made and its caller holds. Threads replace `last` as a whole.

    Attributes:
      last: what the last call returned for the arguments that it donated; None if that is garbage by now.
    """

    def __init__(self) -> None:
        self.last: Last | None = None
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def remember(self, canary: Any, others: Sequence[Any], maker: Any) -> None:
        """Takes the state that a call of `maker` returned: its last leaf and the others."""
        self.last = weakref.ref(canary, self._forget), others, maker

    def add(self, arrays: Iterable[Any]) -> None:
        """Takes arrays that were made to be given to the step. What is no `jax.Array` has no buffer to overwrite."""
        for array in arrays:
            if isinstance(array, jax.Array):
                self._known[id(array)] = array

    def recall(self) -> None:
        """What the last call returned becomes known by id."""
        last, self.last = self.last, None
        if last is not None:
            self.add((last[0](), *last[1]))

    def has(self, array: Any) -> bool:
        """Whether the step made this array."""
        return self._known.get(id(array)) is array

    def _forget(self, canary: weakref.ref[Any]) -> None:
        if self.last is not None and self.last[0] is canary:
            self.last = None


def any_deleted(leaves: Iterable[Any]) -> bool:
    """Whether one of the leaves is an array that was donated or deleted."""
    leaves = list(leaves)
    try:
        return any(map(_jax.is_deleted, leaves))  # a third of the time, where all are arrays and none of random keys
    except (TypeError, AttributeError):
        return any(leaf.is_deleted() for leaf in leaves if hasattr(leaf, "is_deleted"))


def check_alive(leaves: Sequence[Any], arguments: Sequence[Argument], name: str) -> None:
    """Raises DonatedError if a leaf was donated or deleted.

    Args:
      leaves: of a call.
      arguments: what they are.
      name: of the step.
    """
    for leaf, argument in zip(leaves, arguments, strict=False):
        if not any_deleted((leaf,)):
            continue
        path = shown(argument.path)
        if argument.role == "state":
            raise DonatedError(
                f"{path} was deleted before this call: an earlier call of {name} donated its buffer to the new state, "
                "or other code deleted it. Pass on the state that the last call returned, or keep old states with "
                "donate_argnums=()"
            )
        raise DonatedError(
            f"{path} was deleted before this call of {name}: other code donated its buffer or called `delete` on it. "
            "Pass an array that still has its buffer"
        )


def says_deleted(error: BaseException) -> bool:
    """Whether JAX refused to start because an argument was donated or deleted."""
    text = str(error)
    return text.startswith("Array has been deleted") or "Buffer has been deleted or donated" in text
