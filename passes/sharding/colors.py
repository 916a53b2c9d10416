"""Colours of groups: groups of equal colour are identical, and share one decision.

The first colour is what a group consists of. Two rounds of Weisfeiler-Lehman refinement over demands (Weisfeiler &
Leman 1968) add what its neighbours are, so that a model of any depth has a bounded number of classes. Values of a
neighbour that are alike are not told apart: each layer may make a mask for itself from the same batch, and it does not
matter which of them is its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from alpa_lite.passes.sharding.groups import Demand, Draft, Home


class Digests(dict[Any, str]):
    """Short texts of things that are equal, in every process, where the things have the same `repr`."""

    def __missing__(self, thing: Any) -> str:
        text = self[thing] = hashlib.blake2b(repr(thing).encode(), digest_size=10).hexdigest()
        return text


def colors_of(drafts: Sequence[Draft], demands: Sequence[Demand], homes: Mapping[int, Home]) -> list[str]:
    """The colour of each group; that of group 0 is "fixed"."""
    digests = Digests()
    colors = []
    for d in drafts:
        parts = [s if s[0] == "leaf" else (digests[s[0]], *s[1:]) for s in d.signature]
        colors.append(digests[d.kind, d.trips, tuple((f.size, f.kind) for f in d.factors), tuple(parts)])
    for _ in range(_ROUNDS):
        arriving: list[list[Any]] = [[] for _ in drafts]
        leaving: list[list[Any]] = [[] for _ in drafts]
        for demand in demands:
            home = homes[demand.value]
            arriving[demand.group].append((demand.likeness, colors[home.group], home.likeness if home.group else ""))
            wanted = demand.likeness if demand.group else ""
            leaving[home.group].append((home.likeness, colors[demand.group], wanted, demand.dims))
        colors = [
            digests[own, tuple(sorted(a)), tuple(sorted(b))] if i else "fixed"
            for i, (own, a, b) in enumerate(zip(colors, arriving, leaving, strict=True))
        ]
    return colors


_ROUNDS = 2  # of refinement
