"""The values between passes as text, for dump directories and bug reports.

Programs and factor rules have a notation of their own, in which an operation is a line and values are `%number:type`.
Any other record is a line with its short fields, and below it its other fields. A record that was printed before is
named, not repeated.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite import program as programs
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Traced
from alpa_lite.paths import shown
from alpa_lite.report import units
from alpa_lite.strategy import Factor, Rule

_MAX_INLINE = 160  # characters of a field in a line
_SHORT = 24  # characters of items of which many go into a line
_MAX_ITEMS = 2000  # items of a sequence
_MAX_ELEMENTS = 12  # of an array


class Listing:
    """Prints values, each record once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, str]] = {}  # by `id`, with the record, which keeps it from being reused
        self._unnamed: dict[type, dict[int, object]] = {}  # objects without a text, by type and `id`

    def text(self, value: Any, name: str = "above") -> str:
        """Any value that a pass returns; records that later values share with it are called by `name`."""
        return "\n".join(self._lines(value, name))

    def _lines(self, value: Any, name: str) -> Iterator[str]:
        if id(value) in self._seen:
            yield f"{type(value).__name__}: see {self._seen[id(value)][1]}"
        elif isinstance(value, Rule):
            yield rule_text(value)
        elif isinstance(value, str):
            yield value
        elif _is_record(value):
            self._seen[id(value)] = value, name
            yield from self._program(value) if isinstance(value, Traced | Graph) else self._record(value, name)
        elif (short := self._inline(value)) is not None:
            yield short
        elif isinstance(value, Mapping | Sequence | Set) and (short := self._short_items(value)):
            yield from textwrap.wrap(", ".join(short), _MAX_INLINE)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield " ".join((self._inline(key) or str(key)).split())[:_MAX_INLINE]
                yield from _indented(_indented(self._lines(item, name)))
        elif isinstance(value, Sequence | Set):
            yield from self._items(list(value), name)
        else:
            yield str(value)

    def _short_items(self, value: Mapping[Any, Any] | Sequence[Any] | Set[Any]) -> list[str]:
        """The items of a container, if all of them are so short that many go into a line."""
        texts = [(self._inline(item) or "", item) for item in value]
        if isinstance(value, Mapping):
            texts = [(f"{text}: {self._inline(value[key]) or '?' * _MAX_INLINE}", key) for text, key in texts]
        return [text for text, _ in texts] if all(0 < len(text) <= _SHORT for text, _ in texts) else []

    def _items(self, items: list[Any], name: str) -> Iterator[str]:
        """The items of a sequence by their numbers."""
        places = {self._seen[id(item)][1] for item in items if id(item) in self._seen}
        if len(places) == 1 and all(id(item) in self._seen for item in items):
            yield f"{len(items)} items: see {places.pop()}"
            return
        for number, item in enumerate(items[:_MAX_ITEMS]):
            first, *rest = self._lines(item, name)
            yield f"{number}: {first}"
            yield from _indented(rest)
        if len(items) > _MAX_ITEMS:
            yield f"and {len(items) - _MAX_ITEMS} more"

    def _program(self, value: Traced | Graph) -> Iterator[str]:
        """A program, of a traced one its arguments too."""
        if isinstance(value, Traced):
            for argument, number in zip(value.arguments, value.graph.block.inputs, strict=False):
                yield f"%{number} {shown(argument.path)} ({argument.role})"
            yield from (f"note: {note}" for note in value.notes)
            yield ""
            value = value.graph
        yield from _block(value, value.block, "")

    def _record(self, value: Any, name: str) -> Iterator[str]:
        """The type and the short fields in a line, and the other fields below it."""
        fields = _fields(value)
        short = {key: text for key, item in fields.items() if (text := self._inline(item)) is not None}
        yield f"{type(value).__name__} {', '.join(f'{key}={text}' for key, text in short.items())}".strip()
        for key, item in fields.items():
            if key not in short:
                yield f"  {key}"
                yield from _indented(_indented(self._lines(item, name)))
        if isinstance(value, programs.Program):
            yield from programs.text(value).splitlines()

    def _inline(self, value: Any) -> str | None:
        """A value in a few characters; None if it needs more."""
        match value:
            case Traced() | Graph() | Rule() | programs.Program():
                return None
            case Lit():
                return literal_text(value)
            case Op():
                return f"{value.name} @ {_jax.where(value.source)}".removesuffix(" @ ")
            case Factor():
                return f"{value.size} {value.kind}"
            case np.ndarray():
                return array_text(value)
        parts: list[str | None]
        if _is_record(value):
            parts = [text and f"{key}={text}" for key, item in _fields(value).items() for text in [self._inline(item)]]
            start, end = f"{type(value).__name__}(", ")"
        elif isinstance(value, Mapping):
            parts = [text and f"{key}: {text}" for key, item in value.items() for text in [self._inline(item)]]
            start, end = "{", "}"
        elif isinstance(value, tuple | list | Set):
            parts, start, end = list(map(self._inline, value)), "(", ")"
        else:
            text = self._name(value) if type(value).__repr__ is object.__repr__ else str(value)
            return text if len(text) <= _MAX_INLINE and "\n" not in text else None
        text = f"{start}{', '.join(part for part in parts if part is not None)}{end}"
        return text if None not in parts and len(text) <= _MAX_INLINE else None

    def _name(self, value: Any) -> str:
        """The type of an object without a text, and its number among those of the type."""
        known = self._unnamed.setdefault(type(value), {})
        known.setdefault(id(value), value)
        return f"{type(value).__name__} {list(known).index(id(value))}"


def text(value: Any) -> str:
    """Any value that a pass returns, as text."""
    return Listing().text(value)


def rule_text(rule: Rule) -> str:
    """A rule, such as "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"."""
    sides = (" ".join(_dims(dims) for dims in side) for side in (rule.operands, rule.results))
    factors = ", ".join(f"{i}={factor.size} {factor.kind}" for i, factor in enumerate(rule.factors)) or "no factors"
    reason = f": {rule.reason}" if rule.reason else ""
    return f"{' -> '.join(sides)}  {factors} ({rule.source}{reason})"


def literal_text(literal: Lit) -> str:
    """A literal in a program."""
    return " ".join(str(literal.value).split())[:40]


def array_text(array: np.ndarray) -> str:
    """The elements of a small array; of a large one type, shape and range."""
    if array.size <= _MAX_ELEMENTS:
        return " ".join(np.array2string(array, precision=4, separator=" ").split())
    ends = f" of {array.min():.4g} to {array.max():.4g}" if array.dtype.kind in "fiu" else ""
    return f"{units.type_name(str(array.dtype), array.shape)}{ends}"


def _dims(dims: tuple[tuple[int, ...], ...]) -> str:
    return "[" + " ".join("*".join(map(str, factors)) or "1" for factors in dims) + "]"


def _block(graph: Graph, block: Block, indent: str) -> Iterator[str]:
    """A program, with nested bodies indented below the operation that carries them."""

    def atoms(some: Iterable[Atom]) -> str:
        return ", ".join(literal_text(a) if isinstance(a, Lit) else f"%{a}:{kind(a)}" for a in some)

    def kind(number: int) -> str:
        value = graph.values[number]
        return units.type_name(str(value.dtype), value.shape)

    yield f"{indent}inputs {atoms(block.inputs)}"
    for op in block.ops:
        where = _jax.where(op.source)
        yield f"{indent}{atoms(op.results)} = {op.name} {atoms(op.operands)}{f'  # {where}' if where else ''}"
        for number, body in enumerate(op.bodies):
            yield f"{indent}  body {number}:"
            yield from _block(graph, body, f"{indent}    ")
    yield f"{indent}outputs {atoms(block.outputs)}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _is_record(value: Any) -> bool:
    """Whether a value has fields, and no text of its own."""
    named = hasattr(value, "_fields") or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return (named and type(value).__str__ is object.__str__) or isinstance(value, Traced | Graph)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a record by name, without functions."""
    names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names}
    return {name: item for name, item in fields.items() if not callable(item)}
