"""How micro-batches that are not exact are combined into the results of a step, in the words of a plan's notes."""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite.paths import shown

AVERAGED = "averaged over micro-batches"
SUMMED = "summed over micro-batches"
LAST = "taken from the last micro-batch"
JOINED = "computed within each micro-batch"

COMBINED = (AVERAGED, LAST, SUMMED, JOINED)
"""A leaf that several of these have a part in is noted under the first."""

MAX_NAMED = 32
"""Leaves that one note names; of more, it names the first and the number of the others."""


def notes_on(kinds: Mapping[str, str]) -> list[str]:
    """A note for each of `COMBINED` that leaves of the result have.

    Args:
      kinds: path of a leaf -> one of `COMBINED`, or nothing for an exact one.
    """
    notes = []
    for kind in COMBINED:
        paths = [shown(path) for path, one in kinds.items() if one == kind]
        more = len(paths) - MAX_NAMED
        if paths:
            notes.append(f"{kind}: {', '.join(paths[:MAX_NAMED])}" + (f" and {more} others" if more > 0 else ""))
    return notes
