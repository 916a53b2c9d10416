"""When a call needs no planning of its own, and in words why it does.

JAX traces a step again for every pattern of weak dtypes: `TrainState.step = 0` is a weak integer before the first call
and after it, a strong one once it was restored from a checkpoint. Nearly always the same program comes out. So where a
signature differs from a planned one in weak dtypes alone, the step is traced, which is cheap, and shares plan and
executable if that makes the same program with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alpa_lite import _jax
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import shown
from alpa_lite.passes.ir.keys import digest
from alpa_lite.passes.tracing.calls import Signature

LISTED = 4
"""How many differing arguments a message lists."""


def weak_types(signature: Signature) -> tuple[bool, ...]:
    """For each leaf whether its dtype is weak."""
    return tuple(isinstance(kind, tuple) and kind[2] for kind in signature.types)


def same_but_weak(one: Signature, other: Signature) -> bool:
    """Whether two signatures differ at most in which dtypes are weak."""
    alike = (one.form, one.tree, one.settings) == (other.form, other.tree, other.settings)
    return alike and _strong(one) == _strong(other)


def same_program(one: Traced, other: Traced) -> bool:
    """Whether two traces of one step compute the same results from their arguments; weak dtypes do not count."""
    return (
        (one.arguments, one.outputs, one.state, one.through)
        == (other.arguments, other.outputs, other.state, other.through)
        and one.in_tree == other.in_tree
        and one.out_tree == other.out_tree
        and digest(one.graph) == digest(other.graph)
    )


def explain_miss(new: Signature, paths: Sequence[str], planned: Mapping[Signature, Sequence[str]]) -> str:
    """Describes the differences of a new signature from the planned one with which it has most in common.

    Args:
      new: the new signature.
      paths: of its leaves.
      planned: the planned signatures, at least one, with the paths of their leaves; of equals, the last counts.
    """
    found = min((_differences(old, planned[old], new, paths) for old in reversed([*planned])), key=len)
    more = len(found) - LISTED
    return "; ".join(found[:LISTED]) + (f"; and {more} more" if more > 0 else "")


def _differences(old: Signature, paths: Sequence[str], new: Signature, new_paths: Sequence[str]) -> list[str]:
    found = _form_differences(old, new)
    settings = _jax.named_settings(old.settings)
    for name, value in _jax.named_settings(new.settings).items():
        if name not in settings:
            found.append(f"{name} is a new setting of JAX")
        elif value != settings[name]:
            found.append(f"{name} is {value}, planned was {settings[name]}")
    before, after = dict(zip(paths, old.types, strict=False)), dict(zip(new_paths, new.types, strict=False))
    for path in [*after, *(path for path in before if path not in after)]:
        if path not in before:
            found.append(f"{shown(path)} is new")
        elif path not in after:
            found.append(f"{shown(path)} is missing")
        elif before[path] != after[path]:
            found.append(f"{shown(path)} is {_text(after[path])}, planned was {_text(before[path])}")
    return found or ["the containers of the arguments have other types or other static fields"]


def _form_differences(old: Signature, new: Signature) -> list[str]:
    out = []
    if old.form[:2] != new.form[:2]:
        out.append(f"{_called(new)}, planned was {_called(old)}")
    before = {place: value for place, _, value in old.form[2]}
    for place, _, value in new.form[2]:
        if place in before and (type(before[place]), before[place]) != (type(value), value):
            which = f"static argument {place}" if isinstance(place, int) else f"the static argument {place}"
            out.append(f"{which} is {value!r}, planned was {before[place]!r}")
        elif place not in before:
            out.append(f"{place} is static")
    given = {place for place, _, _ in new.form[2]}
    return out + [f"{place} is not static any more" for place in before if place not in given]


def _called(signature: Signature) -> str:
    count, keywords, _ = signature.form
    return f"{count} positional arguments" + (f" and the keywords {', '.join(keywords)}" if keywords else "")


def _strong(signature: Signature) -> list[Any]:
    return [kind[:2] if isinstance(kind, tuple) else kind for kind in signature.types]


def _text(kind: Any) -> str:
    if not isinstance(kind, tuple):
        return f"no array but a {kind.__name__}"
    shape, dtype, weak = kind
    return f"{'weak ' if weak else ''}{dtype}[{','.join(map(str, shape))}]"
