from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from alpa_lite.report import units

TEXTS: dict[Callable[..., str], dict[Any, str]] = {
    units.seconds: {
        0.0: "0 s", 1.0: "1.00 s", 0.9999: "1.00 s", 0.0413: "41.3 ms", 8.2e-4: "820 µs", 3e-9: "3.00 ns",
        1234.5: "1,234 s", -0.002: "-2.00 ms", float("inf"): "inf",
    },
    units.nbytes: {0: "0 B", 1023: "1023 B", 2**20: "1.00 MiB", 3_389_050_880: "3.16 GiB", 2**41: "2.00 TiB"},
    units.exact_bytes: {1000: "1000 B", 2**30: "1.00 GiB (1,073,741,824 bytes)", 1536.0: "1.50 KiB (1,536 bytes)"},
    units.spec: {
        P(): "replicated", P(None, ()): "replicated", P("a", None): "P('a')", P(None, "a"): "P(None, 'a')",
        P(("a", "b"), None, "c"): "P(('a', 'b'), None, 'c')", P((), "a"): "P(None, 'a')",
    },
}  # fmt: skip


@pytest.mark.parametrize(("function", "value"), [(function, value) for function in TEXTS for value in TEXTS[function]])
def test_text(function: Callable[..., str], value: Any) -> None:
    assert function(value) == TEXTS[function][value]


def test_types_and_percent() -> None:
    types = {"float32": "f32", "bfloat16": "bf16", "int8": "i8", "uint32": "u32", "complex64": "c64", "bool": "bool"}
    for dtype, text in {**types, "key<fry>": "key<fry>", "float8_e4m3fn": "f8_e4m3fn"}.items():
        assert units.type_name(dtype, (2, 3)) == f"{text}[2,3]"
    for part, text in {0: "0 %", 0.001: "<1 %", 0.5: "50 %", 1: "100 %"}.items():
        assert units.percent(part, 1.0) == text


@given(st.floats(0, 2), st.integers(1, 60))
def test_bars_fit_and_show_what_is_not_zero(part: float, width: int) -> None:
    bar = units.bar(part, 1.0, width)
    assert len(bar) <= width and bool(bar) == (part > 0)
    assert part < 1 or bar == "█" * width
