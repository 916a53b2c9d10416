"""What an executable compares of a call: its part of the signature (`tracing.calls`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from alpa_lite.errors import AlpaLiteError
from alpa_lite.passes.tracing.calls import is_weak, leaf_type


class NewSignature(AlpaLiteError):
    """The arguments do not have the signature that the step was planned for (`tracing.calls`).

    `ParallelStep` then plans for theirs, so that no caller of it sees this error.
    """

    def __init__(self, what: str):
        super().__init__(f"this executable was planned for another signature: {what}")


FORM = "the number of arguments, the keywords or a static argument"
STRUCTURE = "the structure of the arguments"
WEAK = "whether a dtype is weak"


def check_leaf(leaf: Any, aval: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raises NewSignature unless a leaf has the shape (or a given one) and dtype of an abstract value."""
    wanted = (aval.shape if shape is None else shape, aval.dtype)
    try:
        have = leaf_type(leaf)[:2]
    except TypeError:
        raise NewSignature(f"a {type(leaf).__name__} in place of an array") from None
    if have != wanted:
        raise NewSignature(f"an argument's (shape, dtype) is {have} and was {wanted}")


class WeakTypes:
    """Which of the flat arguments may have a weak dtype.

    A step that was traced with a Python number, and with an array of the same dtype, is usually the same program: a
    *pattern*, one flag for each argument, is accepted once tracing has shown that.

    Attributes:
      planned: the pattern that the step was planned for.
    """

    def __init__(self, planned: Iterable[bool]) -> None:
        self.planned = list(planned)
        self._accepted = {tuple(self.planned)}

    def accept(self, pattern: Sequence[bool]) -> None:
        """Takes another pattern that makes the same program."""
        self._accepted.add(tuple(pattern))

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless the pattern of these leaves is accepted."""
        if tuple(map(is_weak, leaves)) not in self._accepted:
            raise NewSignature(WEAK)

    def with_returned(self, numbers: Sequence[int], returned: Sequence[bool]) -> bool:
        """Whether the planned pattern is accepted with other flags for the arguments with these numbers."""
        pattern = list(self.planned)
        for number, weak in zip(numbers, returned, strict=False):
            pattern[number] = weak
        return tuple(pattern) in self._accepted


def weak_of(aval: Any) -> bool:
    """Whether an abstract value has a weak dtype."""
    return bool(getattr(aval, "weak_type", False))
