"""What follows from a frozen value is worked out once for each value, and forgotten with it."""

import gc
import weakref
from dataclasses import dataclass

from alpa_lite.passes.ir.remembered import remembered


@dataclass(frozen=True, eq=False)
class Thing:
    number: int


def test_each_value_is_looked_at_once_and_is_not_kept_alive() -> None:
    seen = []

    @remembered
    def doubled(thing: Thing) -> list[int]:
        seen.append(thing.number)
        return [2 * thing.number]

    one, other = Thing(1), Thing(1)
    assert doubled(one) is doubled(one)
    assert doubled(one) is not doubled(other)
    assert seen == [1, 1]
    watched = weakref.ref(one)
    del one
    gc.collect()
    assert watched() is None
