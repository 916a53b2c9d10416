"""Facts of a grouped step that methods use, each computed once for all methods and meshes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from alpa_lite.ir.graph import Op, Traced
from alpa_lite.passes.ir.primitives import CONSTRAINT
from alpa_lite.passes.sharding import connected, kinds
from alpa_lite.passes.sharding.groups import Grouping


@dataclass(eq=False)
class Facts:
    """Facts of a step in its groups."""

    traced: Traced
    grouping: Grouping

    @cached_property
    def examples(self) -> Mapping[int, Mapping[int, int]]:
        """As of `connected.examples`."""
        return connected.examples(self.traced, self.grouping)

    @cached_property
    def kinds(self) -> tuple[Mapping[int, str], Mapping[int, str]]:
        """As of `kinds.value_kinds`."""
        return kinds.value_kinds(self.traced, self.grouping)

    @cached_property
    def constraints(self) -> tuple[Op, ...]:
        """Operations of `ir.primitives.CONSTRAINT`, by which the user says where a value lies."""
        return tuple([op for op in self.traced.graph.ops() if op.primitive.name == CONSTRAINT])
