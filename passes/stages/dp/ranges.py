"""Costs of each range of layers as a stage, for each kind of submesh and variant, as `dp.slicing` reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite.errors import OptionError
from alpa_lite.ir.schedules import STRATEGIES

_SUMMED = ("forward", "backward", "update", "inflight_bytes", "split_bytes")
"""Costs of a range that are sums over its layers."""


@dataclass(frozen=True)
class Hosts:
    """Work that a process starts for each micro-batch, filled with stages on one kind of submesh. K kinds of submesh.

    Attributes:
      stages: [K], of a process.
      transfers: [K], that a process starts or ends for a micro-batch, both directions.
      seconds: [K], of starting a task.
    """

    stages: tuple[int, ...]
    transfers: tuple[int, ...]
    seconds: tuple[float, ...]

    def period(self, runs: int) -> np.ndarray:
        """Returns [K], seconds that a process takes to start one micro-batch's tasks, each stage run `runs` times."""
        return (runs * np.array(self.stages) + np.array(self.transfers)) * np.array(self.seconds)


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Arrays for one number of micro-batches B. L layers, K kinds of submesh, V variants.

    Attributes:
      num_microbatches: B.
      forward, backward: [L, L+1, K, V], seconds of layers [i, j) for one micro-batch; inf where there is no such stage.
        Entries with j <= i are not read.
      update: [L, L+1, K, V], seconds once a step: gradient synchronisation and optimizer.
      fixed_bytes: [L, L+1, K, V], per device: parameters, gradients, optimizer, temporaries.
      inflight_bytes: [L, L+1, K, V], per device and micro-batch, from forward to backward.
      boundary_seconds: [L+1, K, K], one transfer over the cut before layer i, one way, by the kinds of the stages
        before and behind it. Entries 0 and L are not read. The mean of such transfers, where some are within a node and
        others are not.
      slowest_seconds: as `boundary_seconds`, the slowest of such transfers.
      boundary_bytes: [L+1], per device, transfer buffers of the cut before layer i, held by both its stages.
      devices: the devices of each kind of submesh.
      total_devices, devices_per_node: of the cluster.
      split_bytes: [L, L+1, K, V], per device and micro-batch, from forward to the gradients of parameters where these
        are computed apart.
      hosts: what processes start for each micro-batch; None where that takes no time.
    """

    num_microbatches: int
    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    fixed_bytes: np.ndarray
    inflight_bytes: np.ndarray
    boundary_seconds: np.ndarray
    boundary_bytes: np.ndarray
    devices: tuple[int, ...]
    total_devices: int
    devices_per_node: int
    split_bytes: np.ndarray
    slowest_seconds: np.ndarray
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        node = self.devices_per_node
        if self.total_devices > node and self.total_devices % node:
            raise OptionError(f"total_devices={self.total_devices} are not whole nodes of {node}; give a multiple.")
        small = sorted(n for n in self.devices if n < node)
        chain = all(b % a == 0 for a, b in itertools.pairwise(small))
        whole = all(not (n < node and node % n) and not (n > node and n % node) for n in self.devices)
        if min(self.devices) < 1 or (self.total_devices > node and not (chain and whole)):
            raise OptionError(
                f"devices={self.devices}: with several nodes submeshes must divide a node of {node} devices and each "
                "other, or be whole nodes; others cannot always be placed side by side."
            )

    @property
    def step_seconds(self) -> np.ndarray:
        """[L, L+1, K, V], all passes of a stage, and its update."""
        return (self.forward + self.backward) * self.num_microbatches + self.update

    @property
    def num_layers(self) -> int:
        """L."""
        return self.forward.shape[0]

    def flight_bytes(self, schedule: str) -> np.ndarray:
        """Returns bytes per device of a micro-batch in flight under a schedule."""
        return self.split_bytes if STRATEGIES[schedule].splits_backward else self.inflight_bytes

    def cut_seconds(self, layer: int, before: int, after: int) -> tuple[float, float]:
        """Returns one transfer over the cut before `layer`, between stages of two kinds: the mean, and the slowest."""
        return float(self.boundary_seconds[layer, before, after]), float(self.slowest_seconds[layer, before, after])

    def buffer_bytes(self, first: int, stop: int) -> float:
        """Transfer buffers of a stage of layers [first, stop)."""
        before = float(self.boundary_bytes[first]) if first > 0 else 0.0
        return before + (float(self.boundary_bytes[stop]) if stop < self.num_layers else 0.0)


def sum_layer_costs(
    num_microbatches: int, *, fixed_bytes: np.ndarray, temporary_bytes: np.ndarray, **costs: Any
) -> StageCosts:
    """Costs of ranges as sums over their layers: arrays [L, K, V] in place of [L, L+1, K, V].

    Args:
      temporary_bytes: [L, K, V], of which a range needs the maximum, not the sum; added to the fixed bytes.
      num_microbatches, fixed_bytes, costs: see `StageCosts`.

    Raises:
      OptionError: as `StageCosts`.
    """
    fixed = _ranges(fixed_bytes, np.add) + _ranges(temporary_bytes, np.maximum)
    summed = {name: _ranges(costs[name], np.add) for name in _SUMMED}
    return StageCosts(num_microbatches, fixed_bytes=fixed, **{**costs, **summed})


def choose_fastest_forms(forms: Sequence[StageCosts]) -> StageCosts:
    """Returns the costs of the fastest form of each range, on each kind of submesh and in each variant."""
    names = (*_SUMMED, "fixed_bytes")
    best = forms[0]
    for form in forms[1:]:
        faster = form.step_seconds < best.step_seconds
        if faster.any():
            chosen = {name: np.where(faster, getattr(form, name), getattr(best, name)) for name in names}
            best = replace(best, **chosen)
    return best


def _ranges(layers: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """[L, L+1, ...]: `combine` over layers i to j-1. Equal runs of equal layers give bit-equal values.

    In memory, ranges that end with one layer lie side by side: they are written together.
    """
    length = len(layers)
    out = np.zeros((length + 1, length, *layers.shape[1:]))
    for i, layer in enumerate(layers):  # what ends with a layer, from what ends before it
        combine(out[i, :i], layer, out=out[i + 1, :i])
        out[i + 1, i] = layer
    return out.swapaxes(0, 1)
