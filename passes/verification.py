"""Is the plan true? Three checks, each on what a compiler made of the step, and none on what we meant.

    check_shardy   the lowered StableHLO: exactly the planned collectives within the written regions, none besides
    compare_hlo    the optimised HLO of CPU, GPU or TPU: the planned collectives, up to rewrites listed by name
    memory_of      the compiler's own memory, against the bytes that the plan predicts

The first needs no devices and takes milliseconds, so every plan is checked with it; the others need a compiled
executable, for devices that are here or for a topology compiled ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alpa_lite.passes.hlo_compare import HloReport, Rewrite, compare_hlo
from alpa_lite.passes.hlo_text import HloCollective, parse_hlo
from alpa_lite.passes.shardy_check import ShardyReport, check_shardy, collectives_of_shardy

__all__ = [
    "HloCollective",
    "HloReport",
    "MemoryReport",
    "Rewrite",
    "ShardyReport",
    "check_shardy",
    "collectives_of_shardy",
    "compare_hlo",
    "memory_of",
    "parse_hlo",
]


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a compiled executable, in bytes per device.

    Attributes:
      arguments: what the caller passes.
      outputs: what the executable returns, donated buffers that it reuses included.
      aliased: outputs that live in donated arguments.
      temporaries: buffers that live only while it runs.
      code: the program itself, 0 where the backend does not say.
      predicted: the bytes that the plan predicts, None without a prediction.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    predicted: int | None = None

    @property
    def peak(self) -> int:
        """Bytes in use while it runs: arguments, outputs that are not aliased, temporaries and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: 1 is exact, below 1 the plan is too optimistic."""
        return None if self.predicted is None or self.peak == 0 else self.predicted / self.peak


def memory_of(compiled: Any, predicted: int | None = None) -> MemoryReport | None:
    """The compiler's memory statistics of one executable.

    Args:
      compiled: a `jax.stages.Compiled`.
      predicted: bytes per device that the plan predicts.

    Returns:
      The report, or None where the backend has no statistics.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryReport(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes),
        aliased=int(stats.alias_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        code=int(stats.generated_code_size_in_bytes),
        predicted=predicted,
    )
