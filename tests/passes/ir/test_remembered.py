"""Methods with a cache by arguments: positional or by name, of each object, and without cycles."""

import gc
import weakref

from alpa_lite.passes.ir.remembered import memoise_method


class Base:
    """Counts the calls of a method."""

    calls = 0

    @memoise_method
    def scaled(self, value: int, factor: int = 1) -> int:
        self.calls += 1
        return value * factor


class Derived(Base):
    """Calls the method that it overrides."""

    @memoise_method
    def scaled(self, value: int, factor: int = 1) -> int:
        return 1 + super().scaled(value, factor)


def test_each_argument_counts_however_it_is_given() -> None:
    one, other = Base(), Base()
    assert [one.scaled(3), one.scaled(3, factor=2), one.scaled(3, factor=2), one.scaled(value=4)] == [3, 6, 6, 4]
    assert one.calls == 3 and other.calls == 0


def test_a_method_and_the_one_that_it_overrides_have_caches_of_their_own() -> None:
    one = Derived()
    assert [one.scaled(3, 2), Base.scaled(one, 3, 2)] == [7, 6]


def test_an_object_is_released_without_the_cycle_collector() -> None:
    gc.disable()
    try:
        one = Base()
        one.scaled(3)
        there = weakref.ref(one)
        del one
        assert there() is None
    finally:
        gc.enable()
