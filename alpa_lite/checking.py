"""`check`: whether a planned step computes what the step as written computes, and if not, where it begins to differ.

The planned step and the step as written, on one device, run once each on copies of the arguments. Every leaf of the
results is compared on every device, by

    error = max |planned - written| / max |written|.

Two runs that are both right differ by rounding, and a step may enlarge it without bound: Adam divides a gradient by its
own size, so a gradient that is zero but for rounding moves its weight by the learning rate in either direction. So the
step as written also runs on arguments that are changed in their last place, and a leaf that this changes may differ by
thirty times as much. Where a leaf differs by more, operations are compared too, each *on the inputs that the planned
step gives it*: the first one whose result is not that of the operation as written, on one device, is named with its
place and its layouts. Collectives between operations are compared in the same way: they must not change the value that
they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.api import ParallelStep
from alpa_lite.errors import OptionError
from alpa_lite.ir.paths import format_path
from alpa_lite.options import Off
from alpa_lite.processes.channel import Collective
from alpa_lite.report import prose
from alpa_lite.runtime.debug import reference
from alpa_lite.runtime.debug.first_divergence import Difference

_ENLARGED = 30.0
"""How much more than a change of the arguments in their last place may change a leaf, rounding within the step may."""


@dataclass(frozen=True)
class LeafError:
    """One leaf of the results.

    Attributes:
      path: as plans print it.
      dtype, shape: of it.
      error: relative, as of the module; inf where one of the two is not finite and the other is.
      tolerance: what counts as rounding.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is rounding."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class CheckResult:
    """The result of `check`.

    Attributes:
      leaves: of the results, in their order.
      difference: the first operation, or collective, that differs on the inputs that it gets; None if there is none, or
        if all leaves are equal, so that none was looked for.
      unchecked_reason: why operations could not be compared, where they should have been; else empty.
    """

    leaves: tuple[LeafError, ...]
    difference: Difference | None = None
    unchecked_reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the results of the planned step equal those of the step as written, within the tolerances."""
        return self.difference is None and all(leaf.ok for leaf in self.leaves)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(prose.text("checked", self, sorted(self.leaves, key=lambda leaf: -leaf.error)))


def check(step: ParallelStep, *args: Any, rtol: float | None = None, **kwargs: Any) -> CheckResult:
    """Runs a planned step and the step as written once, on copies of the arguments, and compares every leaf.

    Nothing is donated, and NNX objects are not updated. Where leaves differ, the first operation that differs is
    searched for, which compiles each kind of operation once and holds the values of the step that it compares in
    memory. Functions that the step calls on the host are called by both runs.

    In a multi-process run all call it, with the same arguments. Each runs the step as written by itself and compares
    its own blocks; the largest error of all counts in each. Operations are not compared then.

    Args:
      step: of `parallelize`.
      args, kwargs: of the step.
      rtol: the relative error that counts as rounding; by default 1e-9 for float64, 1e-3 for float32, 1e-2 for float16
        and 5e-2 for bfloat16, of the least exact dtype of which a leaf is made. Integers must be equal.

    Returns:
      A `CheckResult`, which is true if nothing differs, and prints the differences.

    Raises:
      OptionError: `step` is not a planned step.
    """
    if not isinstance(step, ParallelStep) or isinstance(step.options.method, Off):
        raise OptionError(f"step={step!r}: give a step of parallelize that is planned, so without method='off'")
    compiled, executable = step.prepare_call(args, kwargs)
    written = reference.ReferenceRun(compiled.source, args, kwargs)
    planned = executable.results(*args, **kwargs)
    limits = reference.tolerances(compiled.source, rtol)
    pairs = list(zip(compiled.source.outputs, written.results, planned, strict=True))
    here = [reference.error(b, a) for _, a, b in pairs]
    everywhere = Collective("check", "alpa_lite.check").gather("errors", lambda: here)
    worst = [max(errors) for errors in zip(*everywhere, strict=True)]
    leaves = tuple(
        LeafError(format_path(output.path), str(a.dtype), tuple(a.shape), error, limit)
        for (output, a, _), error, limit in zip(pairs, worst, limits, strict=True)
    )
    if not all(leaf.ok for leaf in leaves):
        changes = written.conditioning()
        leaves = tuple(
            replace(leaf, tolerance=max(leaf.tolerance, _ENLARGED * change)) if leaf.tolerance else leaf
            for leaf, change in zip(leaves, changes, strict=True)
        )
    if all(leaf.ok for leaf in leaves):
        return CheckResult(leaves)
    limit = reference.least_exact_tolerance(compiled.source) if rtol is None else rtol
    return _searched(leaves, compiled.staged, written.leaves, limit)


def _searched(leaves: tuple[LeafError, ...], staged: Any, arguments: Sequence[Any], limit: float) -> CheckResult:
    try:
        found = reference.first_difference(staged, arguments, limit)
    except reference.NotComparable as reason:
        return CheckResult(leaves, unchecked_reason=str(reason))
    return CheckResult(leaves, found)
