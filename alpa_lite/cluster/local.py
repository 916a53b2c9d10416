"""The devices that JAX has here, as keyword arguments of `alpa_lite.cluster.Cluster`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alpa_lite.cluster import presets
from alpa_lite.errors import OptionError

ALLOCATOR_RESERVE = 0.05
"""The part of a device's memory that plans leave free where the runtime has said how much it may allocate:
fragmentation alone."""

HOST_RESERVE = 0.25
"""The part of a machine's memory that is left to the operating system, Python and the compiler."""


def arguments(devices: Sequence[Any]) -> dict[str, Any]:
    """The keyword arguments of a cluster of devices of one kind, evenly over processes.

    Raises:
      OptionError: they are not evenly over processes, or no preset describes them.
    """
    first = devices[0]
    processes = len({device.process_index for device in devices})
    if len(devices) % processes:
        raise OptionError(f"{len(devices)} devices do not divide over {processes} processes; give cluster=")
    per_node = len(devices) // processes
    if first.platform == "cpu":
        return _cpu(per_node, processes)
    kinds = presets.DATA["device_kinds"].items()
    name = next((preset for part, preset in kinds if part in first.device_kind.lower()), None)
    if name is None:
        raise OptionError(
            f"cluster=None: no preset describes devices of kind {first.device_kind!r}; give cluster=Cluster(...) "
            f"with its numbers, or one of {', '.join(presets.names())}"
        )
    stats = first.memory_stats() or {}
    limit = {"memory": int(stats["bytes_limit"]), "reserve": ALLOCATOR_RESERVE} if stats.get("bytes_limit") else {}
    if name in presets.SLICES:
        return _slice(name, devices) | limit
    fields = presets.arguments(name, processes) | {"devices_per_node": per_node} | limit
    return fields if per_node % fields.get("devices_per_card", 1) == 0 else fields | _WITHOUT_CARDS


_WITHOUT_CARDS: dict[str, Any] = {"card_link": None, "devices_per_card": 1}


def _slice(name: str, devices: Sequence[Any]) -> dict[str, Any]:
    """The slices that TPU devices form, from their coordinates; a line where these do not fill a box."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    coords = {tuple(device.coords) for device in devices}
    rank, cores = len(presets.SLICES[name]["default"]), presets.SLICES[name].get("cores", 1)
    dims = tuple(len({coord[i] for coord in coords}) for i in range(rank))
    if math.prod(dims) * cores * slices == len(devices):
        return presets.slice_arguments(name, slices, dims)
    line, per_slice = (1,) * (rank - 1), len(devices) // slices
    shape = {"topology": (per_slice, *line), "wraparound": (False,) * rank, "devices_per_node": per_slice}
    return presets.slice_arguments(name, slices, (1, *line)) | shape | _WITHOUT_CARDS


def _cpu(per_node: int, processes: int) -> dict[str, Any]:
    """Virtual CPU devices: equal shares of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rates = presets.DATA["local_cpu"]
    flops = rates["core_flops"] * cores / per_node
    link = rates["memory_bandwidth"] / per_node, rates["step_latency"]
    return {
        "device": "cpu",
        "platform": "cpu",
        "devices_per_node": per_node,
        "nodes": processes,
        "memory": _machine_memory() // per_node,
        "reserve": HOST_RESERVE,
        "peak_flops": {"bf16": flops, "f16": flops, "f32": flops, "f64": flops / 2},
        "memory_bandwidth": link[0],
        "node_link": link,
        "network_link": link if processes > 1 else None,
        "tile": 16,
        "dispatch": rates["dispatch"],
        "source": f"shares of {cores} cores and of the machine's memory; rates from presets.toml",
    }


def _machine_memory() -> int:
    """Bytes of this machine's memory, or of its control group where that has a lower limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
