"""Which submeshes the stages of a pipeline may have, and which logical mesh each.

Submeshes have powers of two of devices within a node, and whole nodes beyond (Alpa, section 5.2), unless the method
gives their shapes: powers of two of nodes, or all nodes halved any number of times, so that equal ones take up all.
"""

from __future__ import annotations

import math

from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.options import Pipeline, Sharded

FINEST = 512
"""Submeshes of a smaller part of all devices are not searched: a step has fewer layers."""


def kinds(cluster: Cluster, method: Pipeline) -> tuple[int, ...]:
    """Returns the numbers of devices of submeshes, rising.

    A node alone, of other than 2^k devices, has all numbers, up to eight, so that any number of stages
    can fill it.

    Raises:
      OptionError: the method asks for more devices than there are.
    """
    stages, shapes, total = method.num_stages, method.mesh_shapes, cluster.num_devices
    if shapes is not None and sum(map(math.prod, shapes)) > total:
        raise OptionError(
            f"submesh_shapes={method.submesh_shapes} needs {sum(map(math.prod, shapes))} devices, but the cluster has "
            f"{total}; leave out stages, or give smaller submeshes"
        )
    if stages is not None and stages > total:
        raise OptionError(
            f"num_stages={stages} needs as many devices, but the cluster has {total}; give {total} at most"
        )
    if shapes is not None:
        return tuple(sorted({math.prod(shape) for shape in shapes}))
    node = cluster.devices_per_node
    inside = [n for n in range(1, node + 1) if node % n == 0 and (n == node or n & (n - 1) == 0)]
    if cluster.nodes == 1 and node & (node - 1) and node < 8:
        inside = list(range(1, node + 1))
    halves = {cluster.nodes >> i for i in range(cluster.nodes.bit_length()) if cluster.nodes % (1 << i) == 0}
    nodes = [node * n for n in range(2, cluster.nodes + 1) if n & (n - 1) == 0 or n in halves]
    inside = [n for n in inside if n * FINEST >= total] or inside[-1:]
    most = total if stages in (None, 1) else total - (stages - 1)
    found = [n for n in (*inside, *nodes) if n <= most]
    if stages is not None and stages > 1:
        need = max(1, total // (2 * stages))  # far smaller ones leave most devices idle
        found = [n for n in found if n >= min(need, max(found))] or found
    return tuple(found)


def shape_of(method: Pipeline, devices: int, stage: int | None = None) -> Sharded:
    """The logical meshes that a stage may have on a submesh of this many devices; None for the first with this many."""
    shapes = method.mesh_shapes
    if shapes is None:
        return Sharded((1,)) if devices == 1 else Sharded()
    if stage is None:
        shape = next((shape for shape in shapes if math.prod(shape) == devices), shapes[0])
    else:
        shape = shapes[stage % len(shapes)]
    return Sharded(shape) if len(shape) > 1 else Sharded()
