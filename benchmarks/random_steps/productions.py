"""The operations of random programs: the kinds of lines of `productions.toml`, which says how they are written."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_steps.program import Builder, Value

Scope = dict[str, Any]
DTYPES = {"FLOAT": ("float32",), "INT": ("int32",), "REAL": ("float32", "bfloat16"), "BITS": ("int32", "uint8", "int8")}


@dataclass(frozen=True)
class Production:
    """Lines of one kind.

    Attributes:
      kind: as coverage counts it.
      forms: of its lines.
      names: how what they read is chosen, in order.
      when: an expression that must hold. exact: whether the operations do not round.
    """

    kind: str
    forms: tuple[str, ...]
    names: Mapping[str, str]
    when: str = "True"
    exact: bool = False

    def __call__(self, b: Builder, **given: Value) -> Value | None:
        """Adds a line, unless no value fits."""
        scope: Scope = {"math": math, "rng": b.rng, "one": lambda *some: b.rng.choice(some), "dim": b.dim, **DTYPES}
        scope |= {"pick": functools.partial(pick, b), "leaf": functools.partial(leaf, b), **given}
        scope["square"] = lambda: square(b, scope["h"])
        for name, text in self.names.items():
            scope[name] = filled(text, scope) if "{" in text else eval(text, scope)
            if scope[name] is None:
                return None
            if isinstance(scope[name], Value) and scope[name].shape:
                scope.setdefault("axis", b.rng.randrange(len(scope[name].shape)))
        if not eval(self.when, scope):
            return None
        try:
            source = filled(b.rng.choice(self.forms), scope)
        except IndexError:  # a dim that the value does not have
            return None
        words = set(re.findall(r"\w+", source))
        reads = [value for value in scope.values() if isinstance(value, Value) and value.name in words]
        return b.add(self.kind, source, reads, self.exact)


def pick(b: Builder, *dtypes: str, like: Value | None = None, share: float = 1.0, **limits: Any) -> Value | None:
    """A value of some dtypes."""
    if like is None:
        return b.pick(dtypes, **limits)
    return b.pick(dtypes or (like.dtype,), shape=like.shape if b.rng.random() < share else None, **limits)


def leaf(b: Builder, shape: tuple[int, ...], dtype: str = "float32", where: str = "state") -> Value:
    """A new leaf."""
    return b.leaf(where, shape, dtype)


def square(b: Builder, h: Value) -> Value:
    """A matrix of the width of a layer; now and then one that is used before."""
    shape = h.shape[-1:] * 2
    known = [v for v in b.state if (v.shape, v.dtype) == (shape, "float32")]
    return b.rng.choice(known) if known and b.rng.random() < 0.15 else b.leaf("state", shape)


def filled(form: str, scope: Scope) -> str:
    """A form with the values of its braces."""
    return re.sub(r"\{([^{}]*)\}", lambda found: str(eval(found[1], scope)), form)


def _read(kind: str, forms: str, when: str = "True", exact: bool = False, **names: str) -> Production:
    return Production(kind, tuple(re.split(r"\n\s*|\s{2,}", forms.strip())), names, when, exact)


_TABLE = tomllib.loads((Path(__file__).parent / "productions.toml").read_text())
GENERAL, LAYERS = ([_read(**one) for one in _TABLE[name]] for name in ("general", "layers"))
"""Those of any values, and layers, of the hidden state, the integers of the examples, a key and a count."""
