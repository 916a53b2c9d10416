"""Known machines (`presets.toml` has them, with sources) and the devices here, as keyword arguments of a `Cluster`."""

from __future__ import annotations

import functools
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from alpa_lite.errors import OptionError

CHIPS_PER_HOST = 4
"""Of TPUs."""

_PAYLOAD_RATIO = 4
"""Of a payload of `nvlink.toml` to the one before."""


@functools.cache
def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("alpa_lite.cluster").joinpath(file).read_text(encoding="utf-8"))


DATA: Mapping[str, Any] = _read("presets.toml")
NODES: Mapping[str, Mapping[str, Any]] = DATA["nodes"]
SLICES: Mapping[str, Mapping[str, Any]] = DATA["slices"]


def names() -> tuple[str, ...]:
    """Returns the names of presets, aliases included."""
    return (*NODES, *SLICES, *DATA["aliases"])


def platform_table(platform: str) -> Mapping[str, Any]:
    """Returns the table of a platform in `presets.toml`."""
    return DATA["platforms"].get(platform, {})


def arguments(name: str, nodes: int | None = None, topology: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of a preset; arguments and errors as of `Cluster.preset`."""
    key = DATA["aliases"].get(name.lower(), name.lower())
    if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
        raise OptionError(f"nodes={nodes!r}: give a positive number of nodes, or None")
    if key in SLICES:
        return slice_arguments(key, nodes or 1, topology)
    if key not in NODES:
        raise OptionError(f"cluster={name!r} is not a known preset; choose one of {', '.join(names())}")
    if topology is not None:
        raise OptionError(f"topology={topology!r}: {name!r} has nodes, not a torus; give nodes= instead")
    fields = {"nodes": 1, "devices_per_node": 8, **_fields(NODES[key])}
    if (curves := _read("nvlink.toml").get(key)) is not None:
        fields["collectives"] = tuple(_curves(curves, fields["devices_per_node"]))
    return fields if nodes is None else fields | {"nodes": nodes}


def slice_arguments(key: str, nodes: int, shape: Sequence[int] | None) -> dict[str, Any]:
    """Returns the keyword arguments of TPU slices: a torus each, joined by the network of their hosts."""
    fields = _fields(SLICES[key])
    default, largest, wrap = fields.pop("default"), fields.pop("largest"), fields.pop("wrap")
    dims = tuple(default if shape is None else shape)
    if len(dims) != len(default) or not all(isinstance(d, int) and 1 <= d <= largest for d in dims):
        raise OptionError(
            f"topology={shape!r}: {key} slices have {len(default)} dims of 1 to {largest} chips; give such as {default}"
        )
    (bandwidth, latency), cores, chips = fields.pop("host_network"), fields.pop("cores", 1), math.prod(dims)
    inner = (cores,) if cores > 1 else ()
    return fields | {
        "devices_per_node": chips * cores,
        "devices_per_card": cores,
        "nodes": nodes,
        "topology": (*dims, *inner),
        "wraparound": (*(d % wrap == 0 for d in dims), *(False for _ in inner)),
        "network_link": (bandwidth * max(1, chips // CHIPS_PER_HOST), latency),
    }


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a preset with those that all presets of its platform have, and its memory in bytes."""
    fields = {**platform_table(data.get("platform", "tpu")).get("presets", {}), **data}
    return fields | {"memory": fields.pop("gib") * 2**30}


def _curves(kinds: Mapping[str, Any], devices: int) -> Iterator[tuple[str, tuple[int], Any]]:
    """Yields the measured collectives of groups of devices that a node has."""
    rows = [(int(size), kind, *row) for kind, sizes in kinds.items() for size, row in sizes.items()]
    for size, kind, least, *microseconds in sorted(rows):
        if size <= devices:
            yield kind, (size,), tuple((least * _PAYLOAD_RATIO**i, 1e-6 * us) for i, us in enumerate(microseconds))


ALLOCATOR_RESERVE = 0.05
"""The part of a device's memory that plans leave free where the runtime has said how much it may allocate:
fragmentation alone."""

HOST_RESERVE = 0.25
"""The part of a machine's memory that is left to the operating system, Python and the compiler."""


def local_arguments(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a cluster of devices of one kind, evenly over processes.

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
    kinds = DATA["device_kinds"].items()
    name = next((preset for part, preset in kinds if part in first.device_kind.lower()), None)
    if name is None:
        raise OptionError(
            f"cluster=None: no preset describes devices of kind {first.device_kind!r}; give cluster=Cluster(...) "
            f"with its numbers, or one of {', '.join(names())}"
        )
    stats = first.memory_stats() or {}
    limit = {"memory": int(stats["bytes_limit"]), "reserve": ALLOCATOR_RESERVE} if stats.get("bytes_limit") else {}
    if name in SLICES:
        return _slice(name, devices) | limit
    fields = arguments(name, processes) | {"devices_per_node": per_node} | limit
    return fields if per_node % fields.get("devices_per_card", 1) == 0 else fields | _WITHOUT_CARDS


_WITHOUT_CARDS: dict[str, Any] = {"card_link": None, "devices_per_card": 1}


def _slice(name: str, devices: Sequence[Any]) -> dict[str, Any]:
    """Returns the slices that TPU devices form, from their coordinates; a line where these do not fill a box."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    coords = {tuple(device.coords) for device in devices}
    rank, cores = len(SLICES[name]["default"]), SLICES[name].get("cores", 1)
    dims = tuple(len({coord[i] for coord in coords}) for i in range(rank))
    if math.prod(dims) * cores * slices == len(devices):
        return slice_arguments(name, slices, dims)
    line, per_slice = (1,) * (rank - 1), len(devices) // slices
    shape = {"topology": (per_slice, *line), "wraparound": (False,) * rank, "devices_per_node": per_slice}
    return slice_arguments(name, slices, (1, *line)) | shape | _WITHOUT_CARDS


def _cpu(per_node: int, processes: int) -> dict[str, Any]:
    """Virtual CPU devices: equal shares of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rates = DATA["local_cpu"]
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
    """Returns bytes of this machine's memory, or of its control group where that has a lower limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
