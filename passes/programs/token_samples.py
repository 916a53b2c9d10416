"""Predicted seconds of slices in a planned pipeline over slices of the sequence."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from alpa_lite.cluster import Cluster
from alpa_lite.ir.program import Program, Run, Send
from alpa_lite.passes.programs.simulation import DispatchClocks, producers
from alpa_lite.passes.tokens.lengths import Sample


def samples(program: Program, lengths: Sequence[int]) -> tuple[Sample, ...]:
    """Returns the samples of a planned pipeline in slices of these lengths: one for each stage and slice."""
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for executable in program.executables:
        if executable.slice >= 0 and executable.kind in ("forward", "backward"):
            seconds[executable.stage, executable.slice] += executable.seconds
    makers = producers(program)
    for items in program.lists:
        for item in items:
            transfer = program.transfers[item.transfer] if isinstance(item, Send) else None
            maker = makers.get(transfer.sent_buffers[0]) if transfer is not None and transfer.sent_buffers else None
            if transfer is None or maker is None or maker.slice < 0:
                continue
            before = maker.stage if maker.kind == "forward" else maker.stage - 1
            sent[before, maker.slice] += transfer.seconds / program.num_microbatches
    starts = [0, *itertools.accumulate(lengths)]
    part = 1 / program.num_microbatches
    return tuple(Sample(s, part, lengths[i], starts[i], total, sent[s, i]) for (s, i), total in sorted(seconds.items()))


def dispatch_seconds(program: Program, cluster: Cluster) -> float:
    """Seconds that the busiest process spends on dispatching one slice of one micro-batch to all of its stages."""
    hosts, last = DispatchClocks(program, cluster), 0.0
    for mesh, items in enumerate(program.lists):
        for item in items:
            if isinstance(item, Run):
                last = max(last, hosts.dispatch(mesh))
            elif isinstance(item, Send):
                transfer = program.transfers[item.transfer]
                last = max(last, hosts.dispatch(transfer.source, transfer.destination))
    slices = max((executable.slice for executable in program.executables), default=0) + 1
    return last / (program.num_microbatches * max(slices, 1))
