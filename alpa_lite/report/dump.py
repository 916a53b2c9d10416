"""The value after each pass as a text file, for bug reports: 01_tracing.txt, 02_factors.txt, ... in a directory.

Programs and factor rules have a notation of their own, in which an operation is a line and values are `%number:type`.
Any other value that does not fit a line has its short parts in the first one, and the others below it. A value that was
printed before is named, not repeated.
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
from alpa_lite.ir import units
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.strategy import Factor, Rule

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
        file.write_text("\n".join(printed.lines(value, file.stem)) + "\n", encoding="utf-8")

    yield write


class _Listing:
    """Prints values, each that takes several lines once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[object, str]] = {}  # by `id`, with the value, which keeps it from being reused
        self._unnamed: dict[type, dict[int, object]] = {}  # objects without a text, by type and `id`

    def lines(self, value: Any, name: str) -> list[str]:
        """Returns the lines of a value, in which no later value repeats a part; such parts are called by `name`."""
        if id(value) in self._seen:
            return [f"{type(value).__name__}: see {self._seen[id(value)][1]}"]
        if (text := self._text(value)) is not None:
            return text.split("\n")
        self._seen[id(value)] = value, name
        if isinstance(value, Traced | Graph):
            return [type(value).__name__, *_indented(_traced(value), 2)]
        is_record, parts = _is_record(value), _parts(value)
        keys = [
            f"{' '.join(self.lines(key, name))[:_MAX_INLINE]}: " if isinstance(value, Mapping) else key
            for key, _ in parts
        ]
        children = [(key, self.lines(item, name)) for key, (_, item) in zip(keys, parts[:_MAX_ITEMS], strict=False)]
        short = [f"{key}{own[0]}" for key, own in children if len(own) == 1]
        start, end = ("{", "}") if isinstance(value, Mapping) else (f"{type(value).__name__ * is_record}(", ")")
        inline = f"{start}{', '.join(short)}{end}"
        if len(short) == len(parts) and len(inline) <= _MAX_INLINE and not isinstance(value, programs.Program):
            del self._seen[id(value)]
            return [inline]
        if len(short) == len(parts) and max(map(len, short)) <= _SHORT:
            return textwrap.wrap(inline, _MAX_INLINE, subsequent_indent="  ")
        if is_record:
            head, below = f"{type(value).__name__} {', '.join(short)}".strip(), [c for c in children if len(c[1]) > 1]
        else:
            head, below = units.count_of(len(parts), "item"), children
        lines = [head]
        for number, (key, (first, *rest)) in enumerate(below):
            lines += _indented([f"{key or f'{number}: '}{first}", *rest], 2)
        lines += [f"  and {len(parts) - _MAX_ITEMS} more"] if len(parts) > _MAX_ITEMS else []
        return [*lines, *(programs.text(value).split("\n") if isinstance(value, programs.Program) else [])]

    def _text(self, value: Any) -> str | None:
        """Returns the text of a value without parts, or with a notation of its own; None of others."""
        match value:
            case Rule():
                return _rule_text(value)
            case Lit():
                return _literal(value)
            case Op():
                return f"{value.name} @ {_jax.describe_location(value.source)}".removesuffix(" @ ")
            case Factor():
                return f"{value.size} {value.kind}"
            case np.ndarray():
                return _array(value)
            case str():
                return value
        if _is_record(value) or isinstance(value, Mapping | Sequence | Set):
            return None
        if type(value).__repr__ is not object.__repr__ or type(value).__str__ is not object.__str__:
            return str(value)
        known = self._unnamed.setdefault(type(value), {})
        known.setdefault(id(value), value)
        return f"{type(value).__name__} {list(known).index(id(value))}"


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a record without its functions, of a mapping, or of another container, with their labels or keys."""
    if _is_record(value):
        names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
        return [(f"{name}=", item) for name in names if not callable(item := getattr(value, name))]
    return [*value.items()] if isinstance(value, Mapping) else [("", item) for item in value]


def _rule_text(rule: Rule) -> str:
    """Returns a rule, such as "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"."""

    def dims(value: tuple[tuple[int, ...], ...]) -> str:
        return "[" + " ".join("*".join(map(str, factors)) or "1" for factors in value) + "]"

    sides = " -> ".join(" ".join(map(dims, side)) for side in (rule.operands, rule.results))
    factors = ", ".join(f"{i}={factor.size} {factor.kind}" for i, factor in enumerate(rule.factors)) or "no factors"
    return f"{sides}  {factors} ({rule.source}{f': {rule.reason}' if rule.reason else ''})"


def _literal(literal: Lit) -> str:
    return " ".join(str(literal.value).split())[:40]


def _array(array: np.ndarray) -> str:
    """Returns the elements of a small array; of a large one type, shape and range."""
    if array.size <= _MAX_ELEMENTS:
        return " ".join(np.array2string(array, precision=4, separator=" ").split())
    ends = f" of {array.min():.4g} to {array.max():.4g}" if array.dtype.kind in "fiu" else ""
    return f"{units.type_name(str(array.dtype), array.shape)}{ends}"


def _traced(value: Traced | Graph) -> Iterator[str]:
    """Yields a program, of a traced one its arguments too."""
    if isinstance(value, Traced):
        for argument, number in zip(value.arguments, value.graph.block.inputs, strict=False):
            yield f"%{number} {format_path(argument.path)} ({argument.role})"
        yield from (*(f"note: {note}" for note in value.notes), "")
        value = value.graph
    yield from _block(value, value.block)


def _block(graph: Graph, block: Block) -> Iterator[str]:
    """Yields a program, with nested bodies indented below the operation that carries them."""

    def kind(number: int) -> str:
        value = graph.values[number]
        return units.type_name(str(value.dtype), value.shape)

    def atoms(some: Iterable[Atom]) -> str:
        return ", ".join(_literal(a) if isinstance(a, Lit) else f"%{a}:{kind(a)}" for a in some)

    yield f"inputs {atoms(block.inputs)}"
    for op in block.ops:
        where = _jax.describe_location(op.source)
        yield f"{atoms(op.results)} = {op.name} {atoms(op.operands)}{f'  # {where}' if where else ''}"
        for number, body in enumerate(op.bodies):
            yield f"  body {number}:"
            yield from _indented(_block(graph, body), 4)
    yield f"outputs {atoms(block.outputs)}"


def _indented(lines: Iterable[str], spaces: int) -> Iterator[str]:
    return (" " * spaces + line for line in lines)


def _is_record(value: Any) -> bool:
    """Returns whether a value has fields, and no text of its own."""
    named = hasattr(value, "_fields") or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return (named and type(value).__str__ is object.__str__) or isinstance(value, Traced | Graph)
