"""The rematerialisation of the backward pass of one mesh: a choice, for all layers or for the first of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from alpa_lite.passes.layers.rematerialisation import Choice


@dataclass(frozen=True)
class Remat:
    """The layers that are rematerialised, and the choice for them.

    Attributes:
      choice: the values of a layer that are recomputed, as in `rematerialisation`.
      first: (k, n): in the first k of n layers alone, whose activations wait longest for the backward pass; None: in
        all layers.
    """

    choice: Choice = "none"
    first: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.choice if self.first is None else "{} in the first {} of {} layers".format(self.choice, *self.first)

    @classmethod
    def parse(cls, text: str) -> Remat | None:
        """The one that is written so; None if there is none."""
        found = re.fullmatch(r"(\w+)(?: in the first (\d+) of (\d+) layers)?", text)
        choice = next((c for c in get_args(Choice) if found and c == found[1]), None)
        if found is None or choice is None:
            return None
        return cls(choice, None if found[2] is None else (int(found[2]), int(found[3])))


NOTHING = Remat()
"""Nothing is computed again."""
