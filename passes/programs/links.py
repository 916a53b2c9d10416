"""Resources that a message between two devices occupies, and the time that a set of messages takes.

A message from device s to device d occupies *resources*: the port by which s sends, the port by which d receives, and,
between nodes, the uplinks of both nodes, which all devices of a node share. On a torus it occupies every link of the
route that goes dim by dim, in the shorter direction round a ring. A resource is busy for the sum over its messages of

    seconds of message m on resource r  =  bytes of m / bandwidth of r  (+ the latency of m, on the ports)

and all resources work at once, so a set of messages takes as long as the busiest of them. (This is the postal model
with one port a device: Bar-Noy and Kipnis, "Designing broadcasting algorithms in the postal model", 1992.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from alpa_lite.cluster import Cluster

Resource = tuple[Any, ...]
Route = tuple[tuple[Resource, float, float], ...]
"""The resources of a message, each with its seconds per byte and its seconds per message."""


def route(cluster: Cluster, source: int, destination: int) -> Route:
    """Returns the resources that a message between two devices, by number, occupies; none where they are the same.

    Raises:
      ValueError: a device is not in the cluster.
    """
    for device in (source, destination):
        if not 0 <= device < cluster.num_devices:
            raise ValueError(f"device {device}: the cluster has devices 0 to {cluster.num_devices - 1}")
    if source == destination:
        return ()
    nodes = source // cluster.devices_per_node, destination // cluster.devices_per_node
    send, receive = ("send", source), ("receive", destination)
    if nodes[0] != nodes[1]:
        network = cluster.network_link
        assert network is not None
        slowness = 0.0 if cluster.topology else 1 / cluster.node_link.bandwidth
        uplinks = (("up", nodes[0]), 1 / network.bandwidth, 0.0), (("down", nodes[1]), 1 / network.bandwidth, 0.0)
        return ((send, slowness, network.latency), (receive, slowness, network.latency), *uplinks)
    if cluster.topology:
        ends = source % cluster.devices_per_node, destination % cluster.devices_per_node
        links = _torus_links(cluster.topology, cluster.wraparound, *ends)
        latency = cluster.node_link.latency * len(links)
        hops = tuple((("link", nodes[0], *link), 1 / cluster.node_link.bandwidth, 0.0) for link in links)
        return ((send, 0.0, latency), (receive, 0.0, latency), *hops)
    link = cluster.node_link
    if cluster.card_link is not None and source // cluster.devices_per_card == destination // cluster.devices_per_card:
        link = cluster.card_link
    return ((send, 1 / link.bandwidth, link.latency), (receive, 1 / link.bandwidth, link.latency))


class Loads:
    """How long each resource of a cluster is busy with the messages added so far."""

    def __init__(self, cluster: Cluster) -> None:
        """Nothing is busy at first."""
        self._cluster = cluster
        self._busy: dict[Resource, float] = {}

    def add(self, source: int, destination: int, count: int) -> None:
        """Adds a message of `count` bytes."""
        for resource, slowness, latency in route(self._cluster, source, destination):
            self._busy[resource] = self._busy.get(resource, 0.0) + slowness * count + latency

    def sender(self, holders: Sequence[int], destination: int, count: int) -> int:
        """The one of `holders` that should send `count` bytes: its way is the least busy, the busiest part first."""
        if destination in holders:
            return destination
        if len(holders) == 1:
            return holders[0]

        def busy(source: int) -> tuple[list[float], int]:
            way = route(self._cluster, source, destination)
            parts = [self._busy.get(resource, 0.0) + slow * count + latency for resource, slow, latency in way]
            return sorted(parts, reverse=True), source

        return min(self._least_busy_ports(holders), key=busy)

    def _least_busy_ports(self, holders: Sequence[int]) -> Iterable[int]:
        """Of holders that differ in their ports alone, as those of a node without a torus do, the least busy one."""
        cluster = self._cluster
        if cluster.topology:
            return holders
        alike = cluster.devices_per_node if cluster.card_link is None else cluster.devices_per_card
        best: dict[int, tuple[float, int]] = {}
        for source in holders:
            port = self._busy.get(("send", source), 0.0), source
            best[source // alike] = min(best.get(source // alike, port), port)
        return [source for _, source in best.values()]

    @property
    def seconds(self) -> float:
        """Starting the transfer, and the busiest resource; 0 where nothing is sent."""
        return self._cluster.node_link.latency + max(self._busy.values()) if self._busy else 0.0


@functools.lru_cache(maxsize=200_000)
def _torus_links(
    topology: tuple[int, ...], wraparound: tuple[bool, ...], source: int, destination: int
) -> tuple[tuple[int, int, bool], ...]:
    """The links of the way between two devices of a slice: (the device that it leaves, the dim, whether upwards)."""
    strides, stride = [], 1
    for size in reversed(topology):
        strides.insert(0, stride)
        stride *= size
    links, here = [], source
    for dim, (size, step, ring) in enumerate(zip(topology, strides, wraparound, strict=True)):
        have, want = here // step % size, destination // step % size
        upwards = (want - have) % size <= size // 2 if ring else want > have
        while have != want:
            links.append((here, dim, upwards))
            following = (have + (1 if upwards else -1)) % size
            here += (following - have) * step
            have = following
    return tuple(links)
