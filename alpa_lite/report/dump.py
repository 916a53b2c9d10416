"""The value after each pass as a text file, for bug reports: 01_tracing.txt, 02_factors.txt, ... in a directory.

Programs and factor rules have a notation of their own, in which an operation is a line and values are `%number:type`.
Any other record is a line with its short fields, and below it its other fields. A record that was printed before is
named, not repeated.
"""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.ir import program as programs
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Traced
from alpa_lite.ir.paths import shown
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.report import units

_MAX_INLINE = 160  # characters of a field in a line
_SHORT = 24  # characters of items of which many go into a line
_MAX_ITEMS = 2000  # items of a sequence
_MAX_ELEMENTS = 12  # of an array

Write = Callable[[str, Any], None]


@contextmanager
def stages(directory: str | os.PathLike[str] | None) -> Iterator[Write]:
    """A function `write(name, value)` that writes one value into `directory`; it does nothing if that is None.

    Files are numbered in the order of writing. Numbers continue after the files in the directory, so that several plans
    can share it. Values are only turned into text if they are written, and a part that an earlier file has is named by
    that file.

    Args:
      directory: created if it does not exist.

    Raises:
      OSError: if the directory cannot be made or written.
    """
    if directory is None:
        yield lambda name, value: None
        return
    folder, printed = Path(directory), _Listing()
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, value: Any) -> None:
        number = 1 + max((int(m.group(1)) for f in folder.iterdir() if (m := re.match(r"(\d+)_", f.name))), default=0)
        file = folder / f"{number:02d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.txt"
        file.write_text("\n".join(printed.lines(value, file.stem)).rstrip("\n") + "\n", encoding="utf-8")

    yield write


class _Listing:
    """Prints values, each record once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, str]] = {}  # by `id`, with the record, which keeps it from being reused
        self._unnamed: dict[type, dict[int, object]] = {}  # objects without a text, by type and `id`

    def lines(self, value: Any, name: str) -> Iterator[str]:
        """The lines of a value; records that later values share with it are called by `name`."""
        if id(value) in self._seen:
            yield f"{type(value).__name__}: see {self._seen[id(value)][1]}"
        elif isinstance(value, Rule):
            yield rule_text(value)
        elif isinstance(value, str):
            yield value
        elif _is_record(value):
            self._seen[id(value)] = value, name
            yield from _traced(value) if isinstance(value, Traced | Graph) else self._record(value, name)
        elif (short := self._inline(value)) is not None:
            yield short
        elif isinstance(value, Mapping | Sequence | Set) and (short := self._short_items(value)):
            yield from textwrap.wrap(", ".join(short), _MAX_INLINE)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield " ".join((self._inline(key) or str(key)).split())[:_MAX_INLINE]
                yield from _indented(self.lines(item, name), 4)
        elif isinstance(value, Sequence | Set):
            yield from self._items(list(value), name)
        else:
            yield str(value)

    def _short_items(self, value: Mapping[Any, Any] | Sequence[Any] | Set[Any]) -> list[str]:
        """The items of a container, if all of them are so short that many go into a line."""
        texts = [self._inline(item) or "" for item in value]
        if isinstance(value, Mapping):
            items = [self._inline(item) or "?" * _MAX_INLINE for item in value.values()]
            texts = [f"{key}: {item}" for key, item in zip(texts, items, strict=True)]
        return texts if all(0 < len(text) <= _SHORT for text in texts) else []

    def _items(self, items: list[Any], name: str) -> Iterator[str]:
        """The items of a sequence by their numbers."""
        places = {self._seen[id(item)][1] if id(item) in self._seen else None for item in items}
        if len(places) == 1 and None not in places:
            yield f"{len(items)} items: see {places.pop()}"
            return
        for number, item in enumerate(items[:_MAX_ITEMS]):
            first, *rest = self.lines(item, name)
            yield f"{number}: {first}"
            yield from _indented(rest, 2)
        if len(items) > _MAX_ITEMS:
            yield f"and {len(items) - _MAX_ITEMS} more"

    def _record(self, value: Any, name: str) -> Iterator[str]:
        """The type and the short fields in a line, and the other fields below it."""
        fields = {key: (item, self._inline(item)) for key, item in _fields(value).items()}
        short = ", ".join(f"{key}={text}" for key, (_, text) in fields.items() if text is not None)
        yield f"{type(value).__name__} {short}".strip()
        for key, (item, text) in fields.items():
            if text is None:
                yield f"  {key}"
                yield from _indented(self.lines(item, name), 4)
        if isinstance(value, programs.Program):
            yield from programs.text(value).splitlines()

    def _inline(self, value: Any) -> str | None:
        """A value in a few characters; None if it needs more."""
        match value:
            case Traced() | Graph() | Rule() | programs.Program():
                return None
            case Lit():
                return _literal(value)
            case Op():
                return f"{value.name} @ {_jax.where(value.source)}".removesuffix(" @ ")
            case Factor():
                return f"{value.size} {value.kind}"
            case np.ndarray():
                return _array(value)
        if _is_record(value):
            items, start, end = [(f"{k}=", item) for k, item in _fields(value).items()], f"{type(value).__name__}(", ")"
        elif isinstance(value, Mapping):
            items, start, end = [(f"{key}: ", item) for key, item in value.items()], "{", "}"
        elif isinstance(value, tuple | list | Set):
            items, start, end = [("", item) for item in value], "(", ")"
        else:
            text = self._name(value) if type(value).__repr__ is object.__repr__ else str(value)
            return text if len(text) <= _MAX_INLINE and "\n" not in text else None
        texts = [self._inline(item) for _, item in items]
        if None in texts:
            return None
        text = f"{start}{', '.join(f'{label}{text}' for (label, _), text in zip(items, texts, strict=True))}{end}"
        return text if len(text) <= _MAX_INLINE else None

    def _name(self, value: Any) -> str:
        """The type of an object without a text, and its number among those of the type."""
        known = self._unnamed.setdefault(type(value), {})
        known.setdefault(id(value), value)
        return f"{type(value).__name__} {list(known).index(id(value))}"


def rule_text(rule: Rule) -> str:
    """A rule, such as "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"."""

    def dims(value: tuple[tuple[int, ...], ...]) -> str:
        return "[" + " ".join("*".join(map(str, factors)) or "1" for factors in value) + "]"

    sides = " -> ".join(" ".join(map(dims, side)) for side in (rule.operands, rule.results))
    factors = ", ".join(f"{i}={factor.size} {factor.kind}" for i, factor in enumerate(rule.factors)) or "no factors"
    return f"{sides}  {factors} ({rule.source}{f': {rule.reason}' if rule.reason else ''})"


def _literal(literal: Lit) -> str:
    return " ".join(str(literal.value).split())[:40]


def _array(array: np.ndarray) -> str:
    """The elements of a small array; of a large one type, shape and range."""
    if array.size <= _MAX_ELEMENTS:
        return " ".join(np.array2string(array, precision=4, separator=" ").split())
    ends = f" of {array.min():.4g} to {array.max():.4g}" if array.dtype.kind in "fiu" else ""
    return f"{units.type_name(str(array.dtype), array.shape)}{ends}"


def _traced(value: Traced | Graph) -> Iterator[str]:
    """A program, of a traced one its arguments too."""
    if isinstance(value, Traced):
        for argument, number in zip(value.arguments, value.graph.block.inputs, strict=False):
            yield f"%{number} {shown(argument.path)} ({argument.role})"
        yield from (*(f"note: {note}" for note in value.notes), "")
        value = value.graph
    yield from _block(value, value.block)


def _block(graph: Graph, block: Block) -> Iterator[str]:
    """A program, with nested bodies indented below the operation that carries them."""

    def kind(number: int) -> str:
        value = graph.values[number]
        return units.type_name(str(value.dtype), value.shape)

    def atoms(some: Iterable[Atom]) -> str:
        return ", ".join(_literal(a) if isinstance(a, Lit) else f"%{a}:{kind(a)}" for a in some)

    yield f"inputs {atoms(block.inputs)}"
    for op in block.ops:
        where = _jax.where(op.source)
        yield f"{atoms(op.results)} = {op.name} {atoms(op.operands)}{f'  # {where}' if where else ''}"
        for number, body in enumerate(op.bodies):
            yield f"  body {number}:"
            yield from _indented(_block(graph, body), 4)
    yield f"outputs {atoms(block.outputs)}"


def _indented(lines: Iterable[str], spaces: int) -> Iterator[str]:
    return (" " * spaces + line for line in lines)


def _is_record(value: Any) -> bool:
    """Whether a value has fields, and no text of its own."""
    named = hasattr(value, "_fields") or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return (named and type(value).__str__ is object.__str__) or isinstance(value, Traced | Graph)


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a record by name, without functions."""
    names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names}
    return {name: item for name, item in fields.items() if not callable(item)}
