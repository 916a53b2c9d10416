from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from alpa_lite.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (1.0, "1.00 s"), (0.9999, "1.00 s"), (0.0413, "41.3 ms"), (8.2e-4, "820 µs"), (3e-9, "3.00 ns"),
     (1234.5, "1,234 s"), (-0.002, "-2.00 ms"), (float("inf"), "inf")],
)  # fmt: skip
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (512, "512 B"),
        (2**20, "1.00 MiB"),
        (3_389_050_880, "3.16 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_bytes(value: int, text: str) -> None:
    assert units.nbytes(value) == text


@pytest.mark.parametrize(
    ("spec", "text"),
    [(P(), "replicated"), (P(None, ()), "replicated"), (P("a", None), "P('a')"), (P(None, "a"), "P(None, 'a')"),
     (P(("a", "b"), None, "c"), "P(('a', 'b'), None, 'c')"), (P((), "a"), "P(None, 'a')")],
)  # fmt: skip
def test_specs(spec: P, text: str) -> None:
    assert units.spec(spec) == text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [("float32", "f32[2,3]"), ("bfloat16", "bf16[2,3]"), ("int8", "i8[2,3]"), ("uint32", "u32[2,3]"),
     ("complex64", "c64[2,3]"), ("bool", "bool[2,3]"), ("key<fry>", "key<fry>[2,3]"),
     ("float8_e4m3fn", "f8_e4m3fn[2,3]")],
)  # fmt: skip
def test_types(dtype: str, text: str) -> None:
    assert units.type_name(dtype, (2, 3)) == text


@pytest.mark.parametrize(("part", "text"), [(0, "0 %"), (0.001, "<1 %"), (0.5, "50 %"), (1, "100 %")])
def test_percent(part: float, text: str) -> None:
    assert units.percent(part, 1.0) == text


@given(st.floats(0, 2), st.integers(1, 60))
def test_bars_fit_and_show_what_is_not_zero(part: float, width: int) -> None:
    bar = units.bar(part, 1.0, width)
    assert len(bar) <= width
    assert bool(bar) == (part > 0)
    if part >= 1:
        assert bar == "█" * width


@pytest.mark.parametrize(
    ("value", "text"), [(1000, "1000 B"), (2**30, "1.00 GiB (1,073,741,824 bytes)"), (1536.0, "1.50 KiB (1,536 bytes)")]
)
def test_exact_bytes(value: float, text: str) -> None:
    assert units.exact_bytes(value) == text
