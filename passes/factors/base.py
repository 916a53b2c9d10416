"""Common parts of the factor rules: an equation as the tables see it, and a collector of factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from alpa_lite.ir.strategy import Factor, FactorKind, Rule

Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """An equation without its value numbers.

    Attributes:
      primitive, params: as in `Op`.
      operands, results: abstract values; typed keys have their logical shape.
      literals: which operands are literals.
    """

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    literals: tuple[bool, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name


def shape(aval: Any) -> tuple[int, ...]:
    """Returns the shape of an abstract value; () for one without a shape, such as a token."""
    return tuple(getattr(aval, "shape", ()))


def is_number(aval: Any) -> bool:
    """Returns whether values of this type can be added: no bools, keys or tokens."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.number)


def is_complex(aval: Any) -> bool:
    """Returns whether values of this type are complex."""
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def make_opaque_rule(call: Call, reason: str) -> Rule:
    """Returns the rule of an operation that nothing describes."""
    operands, results = (tuple(((),) * len(shape(a)) for a in side) for side in (call.operands, call.results))
    return Rule((), operands, results, "opaque", reason)


@dataclass
class Rules:
    """Collects the factors of one rule."""

    factors: list[Factor] = field(default_factory=list)

    def dim(self, size: int, kind: FactorKind) -> Dim:
        """Returns a dim of one new factor; () if there is nothing to split."""
        if size <= 1:
            return ()
        self.factors.append(Factor(int(size), kind))
        return (len(self.factors) - 1,)

    def dims(self, sizes: tuple[int, ...], kind: FactorKind) -> Dims:
        """Returns one new factor for each dim."""
        return tuple(self.dim(size, kind) for size in sizes)

    def match_dims(self, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Dims, Dims]:
        """The dims of two tensors: one parallel factor where their sizes are equal, else a whole one for each."""
        pairs = list(zip(before, after, strict=True))
        left = tuple(self.dim(b, "parallel" if a == b else "replicate") for b, a in pairs)
        return left, tuple(dim if a == b else self.dim(a, "replicate") for dim, (b, a) in zip(left, pairs, strict=True))

    def rule(self, operands: list[Dims], results: list[Dims]) -> Rule:
        """Returns the rule of these tensors."""
        return Rule(tuple(self.factors), tuple(operands), tuple(results))
