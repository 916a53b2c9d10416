"""Tables that can be put back to what they were: a walk that took a wrong turn goes on from there, not from its start.

What is written into the tables of one journal is noted with what it replaces. Going back to a mark undoes what was
written since, the last first: the cost is that of what is undone, however large the tables are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()


class Journal:
    """What was written into some tables, in order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[..., None], Any, Any]] = []

    @property
    def mark(self) -> int:
        """A moment to go back to."""
        return len(self._undo)

    def note(self, undo: Callable[..., None], key: Any, before: Any) -> None:
        """`undo(key, before)` puts back what is now replaced."""
        self._undo.append((undo, key, before))

    def table(self) -> dict[Any, Any]:
        """A mapping whose changes are noted."""
        return Table(self)

    def members(self) -> set[Any]:
        """A set whose changes are noted."""
        return Members(self)

    def row(self) -> list[Any]:
        """A list whose additions are noted."""
        return Row(self)

    def back(self, mark: int) -> None:
        """Puts all tables back to what they were at the mark."""
        while len(self._undo) > mark:
            undo, key, before = self._undo.pop()
            undo(key, before)


class Unwritten(Journal):
    """The journal of a walk that never goes back: its tables are plain ones."""

    def table(self) -> dict[Any, Any]:
        """A mapping."""
        return {}

    def members(self) -> set[Any]:
        """A set."""
        return set()

    def row(self) -> list[Any]:
        """A list."""
        return []


class Table(dict[K, V]):
    """A mapping whose changes a journal notes: items are set, one by one or by `update`, and deleted."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def __setitem__(self, key: K, value: V) -> None:
        self._journal.note(self._put, key, self.get(key, _ABSENT))
        super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        self._journal.note(self._put, key, self[key])
        super().__delitem__(key)

    def update(self, items: Iterable[Any] = (), **_: Any) -> None:
        """Sets the items of a mapping, or pairs."""
        for key, value in dict(items).items():
            self[key] = value

    def _put(self, key: K, before: V) -> None:
        if before is _ABSENT:
            super().__delitem__(key)
        else:
            super().__setitem__(key, before)


class Members(set[K]):
    """A set whose changes a journal notes: members are added and discarded, one by one or several."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def add(self, element: K) -> None:
        """Adds one."""
        self._journal.note(self._put, element, element in self)
        super().add(element)

    def discard(self, element: K) -> None:
        """Removes one, if it is there."""
        self._journal.note(self._put, element, element in self)
        super().discard(element)

    def update(self, *others: Iterable[K]) -> None:
        """Adds all of some."""
        for element in (element for other in others for element in other):
            self.add(element)

    def difference_update(self, *others: Iterable[Any]) -> None:
        """Removes those of some that are there."""
        for element in (element for other in others for element in other):
            self.discard(element)

    def _put(self, element: K, before: bool) -> None:
        (super().add if before else super().discard)(element)


class Row(list[V]):
    """A list whose additions a journal notes: they are made at its end."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def append(self, item: V) -> None:
        """Adds one."""
        self._journal.note(self._cut, None, len(self))
        super().append(item)

    def _cut(self, _: None, before: int) -> None:
        del self[before:]
