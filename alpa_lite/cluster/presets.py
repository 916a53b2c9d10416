"""Known machines, as keyword arguments of `alpa_lite.cluster.Cluster`; `presets.toml` has them, with their sources."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
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
    """The names of presets, aliases included."""
    return (*NODES, *SLICES, *DATA["aliases"])


def of_platform(platform: str) -> Mapping[str, Any]:
    """The table of a platform in `presets.toml`."""
    return DATA["platforms"].get(platform, {})


def arguments(name: str, nodes: int | None = None, topology: Sequence[int] | None = None) -> dict[str, Any]:
    """The keyword arguments of a preset; arguments and errors as of `Cluster.preset`."""
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
    """The keyword arguments of TPU slices: a torus each, joined by the network of their hosts."""
    fields = _fields(SLICES[key])
    default, largest, wrap = fields.pop("default"), fields.pop("largest"), fields.pop("wrap")
    dims = tuple(default if shape is None else shape)
    if len(dims) != len(default) or not all(isinstance(d, int) and 1 <= d <= largest for d in dims):
        raise OptionError(f"topology={shape!r}: {key} slices have {len(default)} dims of 1 to {largest} chips")
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
    """The fields of a preset with those that all presets of its platform have, and its memory in bytes."""
    fields = {**of_platform(data.get("platform", "tpu")).get("presets", {}), **data}
    return fields | {"memory": fields.pop("gib") * 2**30}


def _curves(kinds: Mapping[str, Any], devices: int) -> Iterator[tuple[str, tuple[int], Any]]:
    """The measured collectives of groups of devices that a node has."""
    rows = [(int(size), kind, *row) for kind, sizes in kinds.items() for size, row in sizes.items()]
    for size, kind, least, *microseconds in sorted(rows):
        if size <= devices:
            yield kind, (size,), tuple((least * _PAYLOAD_RATIO**i, 1e-6 * us) for i, us in enumerate(microseconds))
