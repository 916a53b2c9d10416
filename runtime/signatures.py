"""The parts of a signature that each call compares, from its form to its weak types (`tracing.calls`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alpa_lite import _jax
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
SETTINGS = "JAX's settings"


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
