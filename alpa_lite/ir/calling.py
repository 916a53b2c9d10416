"""How a step is called: which of its arguments are traced, and which are constants of the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Form = tuple[int, tuple[str, ...], tuple[tuple[int | str, type, Any], ...]]
"""The number of positional arguments, the dynamic keywords, (position or keyword, type, value) of static arguments."""


@dataclass(frozen=True, eq=False)
class CallingForm:
    """How a step's Python arguments become the pytree that is flattened.

    Attributes:
      names: for each positional argument the parameter's name.
      dynamic: the positions that are not static.
      keywords: the keyword arguments that are not static, sorted.
      static_positions, static_keywords: the rest, with their values.
      modules: whether an argument holds an NNX object.
      hide: takes leaves that are no arrays out of the arguments, into their structure; None if they have none.
      settings: of JAX, under which the step is called (`_jax.trace_context`).
    """

    names: tuple[str, ...]
    dynamic: tuple[int, ...]
    keywords: tuple[str, ...]
    static_positions: Mapping[int, Any]
    static_keywords: Mapping[str, Any]
    modules: bool = False
    hide: Callable[[Any], Any] | None = None
    settings: tuple[Any, ...] = ()

    @property
    def form(self) -> Form:
        """The form of the call."""
        static = (*self.static_positions.items(), *self.static_keywords.items())
        return len(self.names), self.keywords, tuple((place, type(value), value) for place, value in static)

    def drop_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments that are not static."""
        found = tuple([args[i] for i in self.dynamic]), {name: kwargs[name] for name in self.keywords}
        return found if self.hide is None else self.hide(found)

    def insert_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call from those that are traced, the static ones put in their places."""
        by_place = dict(zip(self.dynamic, args, strict=True)) | dict(self.static_positions)
        return tuple([by_place[i] for i in range(len(self.names))]), {**self.static_keywords, **kwargs}

    def call(self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the step with the traced arguments, the static ones put in their places."""
        positional, keywords = self.insert_static(args, kwargs)
        return fun(*positional, **keywords)

    def matches(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether another call has the same form."""
        if len(args) != len(self.names) or len(kwargs) != len(self.keywords) + len(self.static_keywords):
            return False
        return (
            all(name in kwargs for name in self.keywords)
            and all(is_same(args[i], value) for i, value in self.static_positions.items())
            and all(name in kwargs and is_same(kwargs[name], value) for name, value in self.static_keywords.items())
        )

    def roots(self) -> tuple[str, ...]:
        """Returns the names of the traced arguments: positional ones, then keywords."""
        return (*(self.names[i] for i in self.dynamic), *self.keywords)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two static values are the same."""
    return type(one) is type(other) and (one is other or one == other)
