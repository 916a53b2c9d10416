"""Memory that transfers between processes need beyond the arrays that they move.

Such a transfer is one program over the devices of both submeshes (`runtime.multihost.permute`), in which every device
gives a block and gets one. A device of the destination, which sends nothing, gives a block of zeros as large as one at
the source; these are made once, shared by all transfers of such blocks, and stay. A device of the source, which
receives nothing, gets a block as large as one that lands; it is dropped as soon as the program has run. With g the
bytes of a block at the source and l those of one that lands, a device thus needs

    sum of g over the distinct blocks that it receives                            always
    max over its sends of (sum of l over the arrays of the send)                  while it sends

`Cluster.controller` determines which submeshes belong to one process: within one, blocks move singly, without either.
"""

from __future__ import annotations

import math

from alpa_lite.cluster import Cluster
from alpa_lite.ir.layout import local_shape
from alpa_lite.ir.program import Program
from alpa_lite.passes.programs import transfers


def crossing_bytes(program: Program, cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Returns bytes per device of blocks that stay on each submesh, and of the most that it holds while it sends."""
    count = len(program.submeshes)
    processes = [{cluster.controller(device) for device in one.devices} for one in program.submeshes]
    zeros: list[dict[tuple[tuple[int, ...], str], int]] = [{} for _ in range(count)]
    most, seen = [0] * count, set()
    for number, transfer in enumerate(program.transfers):
        source, destination = transfer.source, transfer.destination
        ends = [
            (program.buffers[a], program.buffers[b])
            for a, b in zip(transfer.sent_buffers, transfer.received_buffers, strict=True)
        ]
        arrays = tuple((a.shape, str(a.dtype), a.layout, b.layout) for a, b in ends)
        if len(processes[source] | processes[destination]) == 1 or (source, destination, arrays) in seen:
            continue
        seen.add((source, destination, arrays))
        landed = 0
        for plan in transfers.plans_of(program, number, cluster):
            given = local_shape(plan.shape, plan.src, plan.src_mesh.mesh)
            zeros[destination][given, str(plan.dtype)] = math.prod(given) * plan.dtype.itemsize
            landed += math.prod(local_shape(plan.shape, plan.landing_layout, plan.dst_mesh.mesh)) * plan.dtype.itemsize
        most[source] = max(most[source], landed)
    return tuple((sum(kept.values()), sent) for kept, sent in zip(zeros, most, strict=True))
