"""Keys tell apart what is not equal, though it prints alike."""

from __future__ import annotations

import pytest

from alpa_lite.passes.ir.keys import Keys


class Rate:
    """A parameter whose `repr` does not say its value."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __repr__(self) -> str:
        return "Rate()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rate) and other.rate == self.rate

    def __hash__(self) -> int:
        return hash(self.rate)


class Plain:
    """A parameter that compares by identity and prints the same for all."""

    def __repr__(self) -> str:
        return "Plain()"


def test_objects_of_equal_repr_that_are_not_equal_have_keys_of_their_own():
    keys = Keys()
    first, second = keys.text(Rate(0.1)), keys.text(Rate(0.2))
    assert first == "Rate()" != second
    assert keys.text(Rate(0.1)) == first and keys.text(Rate(0.2)) == second


@pytest.mark.parametrize("make", [Plain, lambda: Rate(0.5)])
def test_equal_objects_share_a_key(make):
    keys = Keys()
    assert keys.text(make()) == keys.text(make())
