"""Blocks of transfers between processes: as many bytes as the runtime keeps, and none within a process."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.ir.program import Program, peak_bytes
from alpa_lite.passes.programs import staged, transfers
from alpa_lite.passes.programs.crossings import crossing_bytes
from alpa_lite.runtime.multihost.permute import CrossProcessTransfer
from tests import pipeline_driver
from tests.passes.layers.division_cases import deep, driven


def nodes(count: int, devices: int) -> Cluster:
    return dataclasses.replace(Cluster.preset("h100", nodes=count), devices_per_node=devices)


def kept(program: Program, cluster: Cluster) -> Counter[int]:
    """Bytes of zeros that the runtime keeps on each device, were every transfer one between processes."""
    edges = {transfers.plans_of(program, number, cluster) for number in range(len(program.transfers))}
    movers = [CrossProcessTransfer(plans, jax.devices()) for plans in edges]
    blocks = {id(block): block for mover in movers for one in mover._zeros for block in one}
    found: Counter[int] = Counter()
    for block in blocks.values():
        found[block.device.id] += block.nbytes
    return found


@pytest.mark.parametrize("devices", [1, 2])
def test_blocks_that_stay_are_those_of_the_runtime(devices: int) -> None:
    """The plain model's stages hand on an activation of 8 x 8 floats; each device has a part of its rows or all."""
    cluster = nodes(2, devices)
    pipeline = pipeline_driver.drive(*deep(2), devices=(devices, devices), cuts=(1,), cluster=cluster)
    program = pipeline.pipeline.program
    found = crossing_bytes(program, cluster)
    zeros = kept(program, cluster)
    for mesh, submesh in enumerate(program.submeshes):
        assert {zeros[device] for device in submesh.devices} == {found[mesh][0]}
        assert found[mesh][0] > 0
        assert found[mesh][1] == 8 * 8 * 4 // devices  # it lands in parts, which the destination gathers


def test_submeshes_of_one_process_need_none_and_those_of_two_add_to_their_memory() -> None:
    pipeline = driven("plain", 2, "1f1b")
    program = pipeline.pipeline.program
    assert crossing_bytes(program, nodes(1, 8)) == ((0, 0), (0, 0))
    plain = peak_bytes(program)
    for cluster in (nodes(1, 8), nodes(2, 1)):
        used = staged._bytes(pipeline.pipeline, pipeline.stages, cluster)
        blocks = crossing_bytes(program, cluster)
        assert [peak for peak, _ in used] == [a + b for a, (b, _) in zip(plain, blocks, strict=True)]
        assert all(rest >= dropped for (_, rest), (_, dropped) in zip(used, blocks, strict=True))
