"""Arguments by number or name: the options that name state, batch, and what is donated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.ir.calling import Calling
from alpa_lite.ir.graph import Traced
from alpa_lite.passes.tracing.calls import one_or_several, position_of
from alpa_lite.passes.tracing.leaves import Flat

Argnums = str | int | Sequence[int]
"""An option that names arguments by number: "auto", one, or several."""


def named_leaves(
    calling: Calling, inputs: Flat, kind: str, argnums: Argnums, argnames: str | Sequence[str]
) -> frozenset[int] | None:
    """The leaves of the arguments that the user named as the state or as the batch, or None for "auto".

    Args:
      kind: "state" or "batch".
      argnums, argnames: the options `state_argnums` and `state_argnames`, or those of the batch.

    Raises:
      SignatureError: a name or a number that is no argument of this call, or a static one.
    """
    names = set(one_or_several(argnames))
    automatic = isinstance(argnums, str)
    if automatic and argnums != "auto":
        raise SignatureError(f'{kind}_argnums is {argnums!r}; give "auto", an int or a tuple of ints')
    if automatic and not names:
        return None
    numbers = () if automatic else one_or_several(argnums)
    names |= {calling.names[position_of(i, len(calling.names), f"{kind}_argnums")] for i in numbers}
    trees = {tree.key: tree for tree in inputs.trees}
    unknown = sorted(names - set(trees))
    if unknown:
        raise SignatureError(
            f"{kind}_argnums or {kind}_argnames name {', '.join(unknown)}, but the traced arguments are "
            f"{', '.join(trees)}"
        )
    return frozenset(i for name in names for i in trees[name].leaves)


def donated_leaves(traced: Traced, donate: int | str | Sequence[int | str]) -> list[int]:
    """The numbers of the leaves of the arguments that `donate_argnums` and `donate_argnames` name.

    A name that is not passed, as that of a default, donates nothing.

    Raises:
      OptionError: there is no such argument, or it is static.
    """
    assert not isinstance(donate, str), "callers know what is donated automatically"
    calling = traced.calling
    assert calling is not None
    leaves = _argument_leaves(traced)
    positions = dict(zip(calling.dynamic, leaves, strict=False))
    roots: dict[int | str, range] = dict(zip(calling.roots(), leaves, strict=True))
    count = len(calling.names)
    chosen: set[int] = set()
    for one in one_or_several(donate):
        if isinstance(one, str):
            chosen.update(roots.get(one, ()))
        elif -count <= one < count and one % count in positions:
            chosen.update(positions[one % count])
        else:
            raise OptionError(
                f"donate_argnums names argument {one}, which is static or does not exist: the step was called "
                f"with {count} positional arguments"
            )
    return sorted(chosen - {argument for _, argument in traced.through})  # the caller gets these back


def _argument_leaves(traced: Traced) -> list[range]:
    """The numbers of the leaves of each argument that is not static: positional ones, then keywords."""
    trees = [tree for group in traced.in_tree.children() for tree in group.children()]
    ends = list(itertools.accumulate((tree.num_leaves for tree in trees), initial=0))
    return list(map(range, ends, ends[1:]))
