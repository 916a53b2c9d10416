"""Colours of groups: groups of equal colour are identical, and share one decision.

The first colour is what a group consists of. Two rounds of Weisfeiler-Lehman refinement over demands (Weisfeiler &
Leman 1968) add what its neighbours are, so that a model of any depth has a bounded number of classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from alpa_lite.passes.sharding.groups import Demand, Draft, Home


def colors_of(
    drafts: Sequence[Draft], demands: Sequence[Demand], homes: Mapping[int, Home], rounds: int = 2
) -> list[str]:
    """The colour of each group; that of group 0 is "fixed"."""
    digests: dict[Any, str] = {}

    def digest(thing: Any) -> str:
        if thing not in digests:
            digests[thing] = hashlib.blake2b(repr(thing).encode(), digest_size=10).hexdigest()
        return digests[thing]

    def part(item: Any) -> Any:
        return item if item[0] == "leaf" else (digest(item[0]), item[1], item[2])

    colors = [
        digest((d.kind, d.trips, tuple((f.size, f.kind) for f in d.factors), tuple(part(s) for s in d.signature)))
        for d in drafts
    ]
    for _ in range(rounds):
        arriving: list[list[Any]] = [[] for _ in drafts]
        leaving: list[list[Any]] = [[] for _ in drafts]
        for demand in demands:
            home = homes[demand.value]
            arriving[demand.group].append((demand.slot, colors[home.group], home.slot if home.group else 0))
            slot = demand.slot if demand.group else 0
            leaving[home.group].append((home.slot, colors[demand.group], slot, demand.dims))
        colors = [
            digest((own, tuple(a), tuple(sorted(b)))) if i else "fixed"
            for i, (own, a, b) in enumerate(zip(colors, arriving, leaving, strict=True))
        ]
    return colors
