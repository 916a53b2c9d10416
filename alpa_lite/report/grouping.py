"""Similar paths as one row: twelve layers that differ in an index read `h_{0-11}`, x 12.

Two steps. Paths that differ only in numbers, and agree in everything shown, become one row; the numbers that vary are
written as a range. Then rows that differ in one key (`q`, `k`, `v`) become one row, `{q,k,v}`. Paths come in as they
are stored and go out as they are printed (`alpa_lite.ir.paths`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from alpa_lite.ir.paths import format_path, tokens
from alpa_lite.plan.records import Leaf

_NUMBER = re.compile(r"\d+")
_KEY = re.compile(r"(\['|\.)(.*?)('\]|$)", re.DOTALL)  # the key of a mapping, or an attribute
_SHOWN = 5  # names in braces before the rest is only counted
_NAME = 40  # characters of a name that fit its column
_HEADING = 42  # characters of a line of a heading
_BRANCH = 3  # rows that are worth a heading

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Row:
    """Several paths in one.

    Attributes:
      tokens: the keys of the path as they are stored, with ranges and braces where members differ.
      members: the stored paths, in their order.
    """

    tokens: tuple[str, ...]
    members: tuple[str, ...]

    @property
    def path(self) -> str:
        """The row as it is printed, such as "state/params/h_{0-11}/w"."""
        return format_path(self.tokens)


def group_by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items of each key, in order of first appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def group_by_numbers(items: Iterable[T], key: Callable[[T], tuple[str, Hashable]]) -> list[tuple[str, list[T]]]:
    """Groups items whose texts differ in numbers alone, each group with its text; numbers that vary are ranges there.

    Args:
      key: the text of an item, and the attributes that must agree.
    """
    found = group_by_key(((*key(item), item) for item in items), lambda row: (_NUMBER.sub("#", row[0]), row[1]))
    return [(_template([text for text, *_ in same]), [item for *_, item in same]) for same in found.values()]


def group(items: Iterable[tuple[str, Hashable]]) -> list[Row]:
    """Groups (path, attributes that must agree) pairs into rows, in order of first appearance."""
    alike = group_by_numbers(items, lambda item: item)
    rows = [(Row(tokens(text), tuple(path for path, _ in same)), same[0][1]) for text, same in alike]
    for position in range(max((len(row.tokens) for row, _ in rows), default=0)):
        rows = _merge(rows, position)
    return [row for row, _ in rows]


def group_leaves(leaves: Iterable[Leaf]) -> list[Row]:
    """Groups arguments that agree in shape, dtype, role and sharding."""
    return group((leaf.path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for leaf in leaves)


def _template(texts: list[str]) -> str:
    columns = list(zip(*(map(int, _NUMBER.findall(text)) for text in texts), strict=True))
    ranges = iter([_numbers(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), texts[0]) if len(texts) > 1 else texts[0]


def format_heading(prefix: Iterable[str]) -> str:
    """Returns the beginning of the paths below a heading; a long one is broken after a slash."""
    lines = [""]
    for part in re.findall(r"[^/]*/?", format_path(prefix)):
        if len(lines[-1]) + len(part.rstrip("/")) > _HEADING:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


@dataclass(frozen=True)
class Section:
    """Rows whose paths have a common beginning.

    Attributes:
      prefix: the tokens that all begin with; at least one token of each row is left.
      rows: the rows.
    """

    prefix: tuple[str, ...]
    rows: list[Row]


def sections(rows: Iterable[Row]) -> list[Section]:
    """Returns rows by the tree that they belong to: the parameters, the moments, the batch.

    A tree is told apart by the first key in which the paths of one argument differ. Where names are longer than a
    column, its larger branches (the layers) become separate sections.
    """
    roots = group_by_key(rows, lambda row: row.tokens[0]).values()
    return [section for members in roots for tree in _branches(members).values() for section in _split(tree)]


def _common(rows: list[Row]) -> tuple[str, ...]:
    """Returns the tokens that all paths begin with, without their last ones."""
    columns = zip(*(row.tokens[:-1] for row in rows), strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _branches(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns rows by their first key after their common ones; rows that end there are apart, under the empty key."""
    at = len(_common(rows))
    return group_by_key(rows, lambda row: row.tokens[at] if len(row.tokens) > at + 1 else "")


def _split(rows: list[Row]) -> list[Section]:
    """Returns one section, or several if a name would be too long."""
    prefix = _common(rows)
    if all(len(format_path(row.tokens[len(prefix) :])) <= _NAME for row in rows):
        return [Section(prefix, rows)]
    rest, inner = list[Row](), list[Section]()
    for key, branch in _branches(rows).items():
        if key and _BRANCH <= len(branch) < len(rows):
            inner += _split(branch)
        else:
            rest += branch
    return [*([Section(prefix, rest)] if rest else []), *inner]


def _numbers(values: list[int]) -> str:
    first, last = values[0], values[-1]
    if first == last:
        return str(first)
    if last - first == len(values) - 1 > 1:
        return f"{{{first}-{last}}}"
    return f"{{{','.join(map(str, values)) if len(values) <= _SHOWN else f'{first}..{last}'}}}"


def _merge(rows: list[tuple[Row, Hashable]], position: int) -> list[tuple[Row, Hashable]]:
    """Joins rows whose tokens differ at `position` alone, where all are keys, or all attributes."""

    def key(item: tuple[Row, Hashable]) -> Hashable:
        """Returns all but the name at the position; of a row without a name there, the row itself."""
        parts = item[0].tokens
        match = _KEY.fullmatch(parts[position]) if 0 < position < len(parts) else None
        return (parts[:position], parts[position + 1 :], match[1], item[1]) if match else id(item)

    return [_joined(same, position) if len(same) > 1 else same[0] for same in group_by_key(rows, key).values()]


def _joined(rows: list[tuple[Row, Hashable]], position: int) -> tuple[Row, Hashable]:
    (first, attributes), tokens_there = rows[0], [row.tokens[position] for row, _ in rows]
    names = [_KEY.sub(r"\2", token) for token in tokens_there]
    names[_SHOWN - 1 :] = names[_SHOWN - 1 :] if len(names) <= _SHOWN else [f"+{len(names) - _SHOWN + 1}"]
    token = _KEY.sub(lambda match: f"{match[1]}{{{','.join(names)}}}{match[3]}", tokens_there[0])
    merged = (*first.tokens[:position], token, *first.tokens[position + 1 :])
    return Row(merged, tuple(path for row, _ in rows for path in row.members)), attributes
