"""Rules in the notation of users: an einsum-like string that describes the role of every dim in a function.

    "b s h d, b t h d, b t h d -> b s h d"

One name stands for one factor (`strategy.Factor`) wherever it occurs. `(h g)` is a dim that consists of two factors,
major to minor; `_` is a dim that no device may have a part of, and needs no name; `...` stands for any number of
leading dims, which are aligned at their ends. A tensor without dims is written as nothing: `"b d, -> b d"`.

The meaning of a name follows from its place:

    in operands and in every result    parallel: the function does the same on blocks, each block by itself
    missing from a result              `reduce` says how blocks make up that result: "sum", "max", "min"
    in `replicate`, or none of these   whole: each device needs all of it

An operand's dim of size one under a name of another size is the same for every block (broadcasting).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, cast

from alpa_lite.errors import RuleError
from alpa_lite.ir.strategy import Factor, FactorKind, Rule

Names = tuple[str, ...]
Tensor = tuple[Names, ...]
Reduction = Literal["sum", "max", "min"]

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|[A-Za-z][A-Za-z0-9_]*|_|1)")


@dataclass(frozen=True)
class Notation:
    """A rule in names.

    Attributes:
      operands, results: for each tensor, for each dim, the names that make it up; () for a dim that is whole.
      reduce: (name, how) for names that some result does not have.
      whole: names that must not be sharded.
      text: as the user wrote it, for messages.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    reduce: tuple[tuple[str, Reduction], ...] = ()
    whole: tuple[str, ...] = ()
    text: str = ""

    def kind(self, name: str) -> FactorKind:
        """Returns the kind of the factor of this name; in a result that has it, a "sum" factor is parallel."""
        if name in self.whole or name not in _names(*self.operands):
            return "replicate"
        if all(name in _names(tensor) for tensor in self.results):
            return "parallel"
        return dict[str, FactorKind](self.reduce).get(name, "replicate")

    def names(self) -> Names:
        """Returns every name, in order of appearance."""
        return tuple(dict.fromkeys(_names(*self.operands, *self.results)))


def _names(*tensors: Tensor) -> Names:
    """Returns the names in some tensors, as often as they occur."""
    return tuple(name for tensor in tensors for dim in tensor for name in dim)


def parse(
    text: str, reduce: str | Mapping[str, str] = MappingProxyType({}), replicate: str | Sequence[str] = (), *, who: str
) -> Notation:  # fmt: skip
    """Reads a rule.

    Args:
      text: the rule.
      reduce: how results are made up of blocks along a name that they do not have: one word for every such name, or
        name -> word.
      replicate: the names that must not be sharded: a string of names or a sequence.
      who: the function that it is a rule of, for messages.

    Raises:
      RuleError: the rule cannot be read, or mentions names that it does not have.
    """
    if not isinstance(text, str) or text.count("->") != 1:
        raise RuleError(
            f"register_rule({who}): the rule {text!r} has no single '->'; write the dims of every operand, '->' and "
            'those of every result, as in "b s h d, b t h d -> b s h d"'
        )
    operands, results = (tuple(_tensor(part, text, who) for part in side.split(",")) for side in text.split("->"))
    found = Notation(operands, results, text=text)
    whole = tuple(replicate.split()) if isinstance(replicate, str) else tuple(replicate)
    lost = [name for name in found.names() if any(name not in _names(tensor) for tensor in results)]
    how = {n: reduce for n in lost if n not in whole} if isinstance(reduce, str) else dict(reduce)
    for argument, names in (("replicate", whole), ("reduce", tuple(how))):
        for name in names:
            if name not in found.names():
                raise RuleError(
                    f"register_rule({who}): {argument} names {name!r}, which the rule {text!r} does not have; use "
                    f"its names, {', '.join(found.names())}"
                )
    for name, word in how.items():
        if word not in ("sum", "max", "min"):
            raise RuleError(f"register_rule({who}): reduce={{{name!r}: {word!r}}}: give 'sum', 'max' or 'min'")
        if name not in lost:
            raise RuleError(
                f"register_rule({who}): reduce names {name!r}, but every result of the rule {text!r} has it; only a "
                "name that a result lacks is reduced"
            )
    unknown = {*_names(*results)} - {*_names(*operands), *whole, ELLIPSIS}
    if unknown:
        raise RuleError(
            f"register_rule({who}): {', '.join(sorted(unknown))} is in the results of the rule {text!r} alone, so "
            "that no device could know its part of it; write _ for that dim, or list the name in replicate"
        )
    return replace(found, reduce=tuple(cast("list", sorted(how.items()))), whole=tuple(sorted(whole)))


def _tensor(part: str, text: str, who: str) -> Tensor:
    """Returns the dims of one tensor."""
    dims: list[Names] = []
    inside: list[str] | None = None
    position = 0
    part = part.rstrip()
    while position < len(part):
        match = _TOKEN.match(part, position)
        if match is None:
            raise RuleError(
                f"register_rule({who}): {part[position:].strip()!r} in the rule {text!r} cannot be read; write dims "
                "as names with blanks between them, (a b) for a dim of two, _ for a whole one, ... for leading dims"
            )
        token, position = match[1], match.end()
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            dims.append(tuple(inside))
            inside = None
        elif token in "()" or (inside is not None and token in (ELLIPSIS, "_", "1")):
            raise RuleError(
                f"register_rule({who}): the brackets in {part.strip()!r} of the rule {text!r} do not match; close each"
            )
        elif inside is not None:
            inside.append(token)
        else:
            dims.append(() if token in ("_", "1") else (token,))
    named = _names(tuple(dims))
    if inside is not None or len(named) != len(set(named)):
        remedy = "a bracket is open; close it" if inside is not None else "a name occurs twice; use a name for each dim"
        raise RuleError(f"register_rule({who}): in {part.strip()!r} of the rule {text!r} {remedy}")
    if (ELLIPSIS,) in dims[1:]:
        raise RuleError(f"register_rule({who}): in {part.strip()!r} of the rule {text!r} '...' must come first")
    return tuple(dims)


Shapes = Sequence[tuple[int, ...]]


def expand_rule(notation: Notation, operands: Shapes, results: Shapes, who: str) -> Notation:
    """Returns the rule for tensors of these ranks, without `...`, and without names on dims that broadcast.

    Raises:
      RuleError: number of tensors, ranks or sizes do not fit the rule.
    """
    sides: list[tuple[Tensor, ...]] = []
    for kind, tensors, shapes in (("operand", notation.operands, operands), ("result", notation.results, results)):
        if len(tensors) != len(shapes):
            raise RuleError(
                f"{who} has {len(shapes)} {kind}s of shapes {', '.join(map(str, shapes))}, but its rule "
                f"{notation.text!r} has {len(tensors)}; write the dims of every array that goes in and comes out"
            )
        sides.append(
            tuple(
                _ranked(tensor, shape, f"{kind} {number} of {who}", notation.text)
                for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
            )
        )
    leading = {name for name in _names(*sides[0], *sides[1]) if name.startswith(ELLIPSIS)}
    reduce: tuple[tuple[str, Reduction], ...] = (
        *((n, how) for n, how in notation.reduce if n != ELLIPSIS),
        *((n, how) for n in sorted(leading) for m, how in notation.reduce if m == ELLIPSIS),
    )
    whole = tuple(n for n in notation.whole if n != ELLIPSIS)
    whole += tuple(sorted(leading)) if ELLIPSIS in notation.whole else ()
    found = Notation(sides[0], sides[1], reduce, whole, notation.text)
    sizes = sizes_of(found, operands, results, who)
    plain = tuple(
        tuple(
            () if n == 1 and math.prod(sizes[name] for name in dim) > 1 else dim
            for dim, n in zip(tensor, shape, strict=True)
        )
        for tensor, shape in zip(sides[0], operands, strict=True)
    )
    return replace(found, operands=plain)


def _ranked(tensor: Tensor, shape: tuple[int, ...], where: str, text: str) -> Tensor:
    if tensor[:1] == ((ELLIPSIS,),):
        count = len(shape) - len(tensor) + 1
        if count >= 0:
            return (*((f"{ELLIPSIS}{count - i}",) for i in range(count)), *tensor[1:])
    elif len(tensor) == len(shape):
        return tensor
    raise RuleError(
        f"{where} has shape {shape}, of rank {len(shape)}, but the rule {text!r} gives it {len(tensor)} dims "
        f"({_shown(tensor)}); name every dim of it"
    )


def _shown(tensor: Tensor) -> str:
    return " ".join("_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in tensor)


def sizes_of(
    notation: Notation, operands: Shapes, results: Shapes, who: str, known: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, int]:
    """Returns the size of every name; `known` are given sizes.

    Raises:
      RuleError: a name has two sizes, or a dim of several names does not tell theirs.
    """
    rows = [(f"operand {i}", *pair) for i, pair in enumerate(zip(notation.operands, operands, strict=True))]
    rows += [(f"result {i}", *pair) for i, pair in enumerate(zip(notation.results, results, strict=True))]
    sizes: dict[str, int] = dict(known)
    for _, tensor, shape in rows:  # a size of one may be broadcasting: others come first
        for dim, n in zip(tensor, shape, strict=True):
            if len(dim) == 1 and (n != 1 or dim[0] not in sizes) and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = n
    for where, tensor, shape in rows:
        for dim, n in zip(tensor, shape, strict=True):
            unknown = [name for name in dim if name not in sizes]
            rest = math.prod(sizes.get(name, 1) for name in dim)
            if n == 1 and where.startswith("operand") and (not unknown or rest > 1):
                continue
            if len(unknown) == 1 and rest and n % rest == 0:
                sizes[unknown[0]] = n // rest
            elif unknown and n == 1:
                sizes.update(dict.fromkeys(unknown, 1))
            elif unknown:
                raise RuleError(
                    f"{where} of {who} has shape {shape}: the rule {notation.text!r} does not tell how large "
                    f"{' and '.join(unknown)} of ({' '.join(dim)}) = {n} are; name them as dims of another operand"
                )
            elif dim and rest != n:
                parts = ", ".join(f"{name} = {sizes[name]}" for name in dim)
                raise RuleError(
                    f"{where} of {who} has shape {shape}: its dim of size {n} is {' '.join(dim)} in the rule "
                    f"{notation.text!r}, but at another place {parts}; give dims of different sizes different names"
                )
    return sizes


def rule_of(
    notation: Notation, operands: Shapes, results: Shapes, who: str, known: Mapping[str, int] = MappingProxyType({})
) -> Rule:
    """Returns the rule of tensors of these shapes. Names of size one, and dims that broadcast, are no factors.

    Raises:
      RuleError: the shapes do not fit.
    """
    sizes = sizes_of(notation, operands, results, who, known)
    names = [name for name in notation.names() if sizes[name] > 1]
    number = {name: i for i, name in enumerate(names)}

    def dims(tensor: Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            () if n == 1 else tuple(number[name] for name in dim if name in number)
            for dim, n in zip(tensor, shape, strict=True)
        )

    return Rule(
        tuple(Factor(sizes[name], notation.kind(name)) for name in names),
        tuple(dims(*pair) for pair in zip(notation.operands, operands, strict=True)),
        tuple(dims(*pair) for pair in zip(notation.results, results, strict=True)),
        "registered",
    )
