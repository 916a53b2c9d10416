"""Numbers as text: seconds, bytes, ratios and shardings, short and with units."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

Format = Callable[[Any], str]
"""A number as text."""

EQUAL = 1e-3
"""The relative difference of seconds that is within the gap of a solution."""


def _scaled(value: float, scales: dict[str, float]) -> str:
    """Formats three significant digits and the first unit, from the largest, that gives at least 1; else empty."""
    found = (f"{digits(value / scale)} {unit}" for unit, scale in scales.items() if abs(value) >= 0.9995 * scale)
    return next(found, "")


def seconds(value: float) -> str:
    """Formats seconds with three significant digits and a fitting unit, such as "41.3 ms"."""
    if value == 0 or not math.isfinite(value):
        return "0 s" if value == 0 else str(value)
    return _scaled(value, {"s": 1.0, "ms": 1e-3, "µs": 1e-6}) or f"{digits(value / 1e-9)} ns"


def nbytes(value: float) -> str:
    """Formats bytes with three significant digits and a binary unit, such as "3.38 MiB"."""
    return _scaled(value, {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}) or f"{value:.0f} B"


def flops(value: float) -> str:
    """Formats FLOPs with three significant digits and a unit, such as "81.3 T"."""
    return _scaled(value, {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}) or f"{digits(value)} "


def exact_bytes(value: float) -> str:
    """Formats bytes for messages: with a unit, and the exact number behind it, such as "3.38 MiB (3,543,348 bytes)"."""
    short = nbytes(value)
    return short if abs(value) < 1023.5 else f"{short} ({value:,.0f} bytes)"


def runs(numbers: Iterable[int], between: str) -> str:
    """Formats ascending numbers, consecutive ones by their first and last: "3, 5-9" with "-" between."""
    alike = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    found = [[number for _, number in run] for _, run in alike]
    return ", ".join(between.join(map(str, dict.fromkeys((run[0], run[-1])))) for run in found)


def digits(value: float) -> str:
    """Formats three significant digits without an exponent; integers above a hundred get thousands separators."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def times(count: int) -> str:
    """Formats a number of identical things, such as "x 24"."""
    return f"x {count:,}"


def count_of(count: int, noun: str) -> str:
    """Formats a number of things, such as "3 meshes"."""
    ending = "" if count == 1 else "es" if noun.endswith(("sh", "ch")) else "s"
    return f"{count} {noun}{ending}"


def first(lines: Sequence[str], most: int) -> list[str]:
    """Returns the first lines, and one with the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def percent(part: float, whole: float) -> str:
    """Formats `part` of `whole` in percent; "<1 %" for a share that is small but not zero."""
    if whole <= 0:
        return "0 %"
    share = 100 * part / whole
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def pace(seconds: float, best: float) -> str:
    """Formats how a step compares with the chosen one, such as "slower by 7.5 %"; gaps of a solver do not count."""
    more = seconds / best - 1 if best else 0.0
    if abs(more) <= EQUAL:
        return "equally fast"
    share = f"{100 * abs(more):.2g}" if abs(more) < 0.095 else f"{100 * abs(more):,.0f}"
    return f"{'slower' if more > 0 else 'faster'} by {share} %"


def factor(value: float) -> str:
    """Formats a ratio, such as "2.5 times"."""
    return f"{digits(value)} times" if value >= 0.01 else f"{value:.1g} times"


def spec(value: PartitionSpec) -> str:
    """Formats a sharding as the user would write it, such as "P(None, 'model')"; "replicated" where no axis is used."""

    def entry(names: object) -> str:
        if isinstance(names, tuple) and len(names) < 2:
            return repr(names[0] if names else None)
        return repr(names)

    entries = list(value)
    while entries and not entries[-1]:
        entries.pop()
    return f"P({', '.join(map(entry, entries))})" if entries else "replicated"


def type_name(dtype: str, shape: tuple[int, ...]) -> str:
    """Formats dtype and shape as JAX prints them in programs, such as "f32[768,3072]"."""
    short = re.sub("^(b?f)loat|^(i)nt|^(u)int|^(c)omplex", r"\1\2\3\4", dtype)
    return f"{short}[{','.join(map(str, shape))}]"


def mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> str:
    """Formats a mesh, such as "data=4 model=2"."""
    axes = list(zip(axis_names, shape, strict=True))
    return " ".join(f"{name}={size}" for name, size in [axis for axis in axes if axis[1] > 1] or axes[:1])


def shape(sizes: tuple[int, ...]) -> str:
    """Formats the shape of a mesh without axes of one device, such as "4x2"."""
    return "x".join([str(size) for size in sizes if size > 1] or ["1"])


def axes(names: tuple[str, ...]) -> str:
    """Formats mesh axes, such as "data+model"."""
    return "+".join(names) or "none"


def bar(part: float, whole: float, width: int) -> str:
    """Returns a horizontal bar of at most `width` characters, in eighths of a character."""
    eighths = round(8 * width * min(1.0, part / whole)) if whole > 0 else 0
    if part > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
