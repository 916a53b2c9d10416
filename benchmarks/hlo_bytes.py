"""The bytes that a compiled program reads and writes, from the text of its optimised HLO.

Compilers for GPUs do not report bytes accessed away from the hardware, and those that do count a slice of an operand as
the whole operand, and the trips of a loop once. Here every instruction of the entry computation that is a kernel reads
its operands and writes its results, and

    an operand that a fusion only takes slices or rows of counts as these
    an update in place (`dynamic-update-slice`, `scatter` at the root) reads and writes what it updates
    the body of a loop counts as often as XLA says that it runs, the branches of a condition once
    tuples, bitcasts, constants and a library's workspace count nothing
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+)(?:e\d\w*)?\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_FREE = frozenset(
    ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id", "replica-id")
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_VIEWS = frozenset(("bitcast", "reshape", "convert", "copy"))


@dataclass
class _Instruction:
    name: str
    opcode: str
    shapes: list[float]
    operands: list[str]
    called: list[str]
    trips: int
    root: bool
    number: int
    target: str = ""


@dataclass
class _Computation:
    items: dict[str, _Instruction] = field(default_factory=dict)
    readers: dict[str, list[_Instruction]] = field(default_factory=dict)


def accessed(text: str) -> tuple[float, Counter[str]]:
    """Bytes of one execution of a module, and the same by opcode.

    A fusion is named after the opcode of its root.
    """
    entry, computations = _parse(text)
    by: Counter[str] = Counter()
    _walk(computations, entry, 1, by)
    return float(sum(by.values())), by


def _parse(text: str) -> tuple[str, dict[str, _Computation]]:
    computations: dict[str, _Computation] = {}
    entry, here = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            if head and line.strip() != "{" and not line.startswith("HloModule"):
                here = computations[head[2]] = _Computation()
                entry = head[2] if head[1] else entry
            continue
        found = _LINE.match(line)
        if found is None or here is None:
            continue
        root, name, shape, opcode, rest = found.groups()
        depth, end = 1, 0
        while depth and end < len(rest):
            depth += (rest[end] == "(") - (rest[end] == ")")
            end += 1
        inside, after = rest[: end - 1], rest[end:]
        trips = _TRIPS.search(after)
        target = re.search(r'custom_call_target="([^"]*)"', after)
        item = _Instruction(
            name, opcode, [_bytes(*s) for s in _SHAPE.findall(shape)], re.findall(r"%([\w.\-]+)", inside),
            [c.strip().lstrip("%") for many, one in _CALLED.findall(after) for c in (many or one).split(",")],
            int(trips[1]) if trips else 1, bool(root), int(inside) if opcode == "parameter" else -1,
            target[1] if target else "",
        )  # fmt: skip
        here.items[name] = item
        for operand in item.operands:
            here.readers.setdefault(operand, []).append(item)
    return entry, computations


def _bytes(kind: str, dims: str) -> float:
    bits = _BITS.get(kind) or int(kind[1:])
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def _walk(computations: dict[str, _Computation], name: str, times: int, by: Counter[str]) -> None:
    here = computations[name]
    for item in here.items.values():
        if item.opcode in ("while", "call", "conditional", "async-start"):
            for called in item.called:
                _walk(computations, called, times * item.trips, by)
        elif item.opcode in _FREE or item.opcode.endswith("-done"):
            continue
        elif item.opcode == "fusion":
            inner = computations[item.called[0]]
            root = next(i for i in inner.items.values() if i.root)
            by[f"fusion {root.opcode}"] += times * int(_fusion(here, item, inner, root))
        else:
            by[item.target or item.opcode] += times * int(_alone(here, item))


def _alone(here: _Computation, item: _Instruction) -> float:
    sizes = [sum(here.items[o].shapes) for o in item.operands]
    if item.opcode in _SLICES:
        return 2 * sum(item.shapes)
    if item.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if item.opcode == "scatter":
        return sum(sizes[1:]) + 2 * sizes[-1]
    if item.opcode == "copy-start":
        return 2 * item.shapes[0]
    results = item.shapes[:1] if item.opcode == "custom-call" else item.shapes  # the others are its workspace
    return sum(sizes) + sum(results)


def _fusion(here: _Computation, item: _Instruction, inner: _Computation, root: _Instruction) -> float:
    total = 0.0
    parameters = {i.number: i for i in inner.items.values() if i.opcode == "parameter"}
    for number, operand in enumerate(item.operands):
        total += _read(inner, parameters[number], sum(here.items[operand].shapes))
    ends = [inner.items[o] for o in root.operands] if root.opcode == "tuple" else [root]
    for end in ends:
        while end.opcode in _VIEWS and end.operands:
            end = inner.items[end.operands[0]]
        if end.opcode == "dynamic-update-slice":
            total += sum(inner.items[end.operands[1]].shapes)
        elif end.opcode == "scatter":
            total += 2 * sum(inner.items[end.operands[-1]].shapes)
        else:
            total += sum(end.shapes)
    return total


def _read(inner: _Computation, parameter: _Instruction, whole: float) -> float:
    """The bytes of a parameter that a fusion reads."""
    total, left = 0.0, [parameter]
    while left:
        item = left.pop()
        for reader in inner.readers.get(item.name, ()):
            if reader.opcode in _SLICES and reader.operands[0] == item.name:
                total += sum(reader.shapes)
            elif reader.opcode in ("dynamic-update-slice", "scatter") and reader.operands[0] == item.name:
                continue
            elif reader.opcode in _VIEWS:
                left.append(reader)
            else:
                return whole
    return min(total, whole)
