"""The machine that a plan is made for: a value without devices.

A `Cluster` states what the cost model and the memory constraint need: devices and how they are joined, memory, peak
rates and bandwidths, each with its source. Presets describe machines that need not be here; `Cluster.local()` describes
the devices of this process. Nothing here asks JAX for devices but `Cluster.local()` without devices, when it is called.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alpa_lite.calibration import files
from alpa_lite.cluster import nvlink, presets, topology
from alpa_lite.cluster.topology import Level
from alpa_lite.errors import OptionError
from alpa_lite.ir import json_codec

#: The part of a device's memory that plans leave free: runtime context, fragmentation, transfer buffers.
DEVICE_RESERVE = 0.1
#: The same where the runtime itself has said how much it may allocate: fragmentation alone.
ALLOCATOR_RESERVE = 0.05
#: The part of a machine's memory that is left to the operating system, Python and the compiler.
HOST_RESERVE = 0.25

#: The environment variable that names the file of a calibration for `Cluster.local()`.
CALIBRATION = "ALPA_LITE_CALIBRATION"

_TPU_CHIPS_PER_HOST = 4
#: What is left of the f32 rate, that of TF32, for integers on vector units: 19.5 of 156 T/s on an A100.
_WIDE_INTEGERS = 1 / 8
_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Link:
    """A connection, one direction.

    Attributes:
      bandwidth: bytes/s.
      latency: seconds of one step of a collective over it.
    """

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Dispatch:
    """The seconds that a process takes to start a task of a pipeline, a run or a transfer: it starts one at a time.

    Attributes:
      task: seconds for each task.
      device: seconds more for each device of the process that takes part.
    """

    task: float = 0.0
    device: float = 0.0

    def seconds(self, devices: int) -> float:
        """Of a task on so many devices of a process."""
        return self.task + self.device * devices


@dataclass(frozen=True)
class Curve:
    """The measured seconds of a collective over groups of devices, interpolated between payloads.

    Seconds are linear in the payload between two points. Below the first they are those of the first; beyond the last
    they are proportional to the payload. (Linear in log payload instead, they are no nearer to XLA's tables.)

    Attributes:
      kind: as `alpa_lite.cluster.cost.CollectiveKind`.
      group: the devices of a group on each level, as `alpa_lite.cluster.cost.MeshCost.group` says.
      points: (bytes of payload, seconds), both ascending.
    """

    kind: str
    group: tuple[int, ...]
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", tuple(self.group))
        object.__setattr__(self, "points", tuple((float(p), float(s)) for p, s in self.points))

    def tangent(self, payload: float) -> tuple[float, float]:
        """(alpha, beta): seconds = alpha + payload * beta at a payload; neither is negative."""
        points = self.points
        if payload <= points[0][0]:
            return points[0][1], 0.0
        if payload >= points[-1][0]:
            return 0.0, points[-1][1] / points[-1][0]
        after = bisect.bisect_right(points, payload, key=lambda point: point[0])
        (p, s), (q, t) = points[after - 1 : after + 1]
        slope = (t - s) / (q - p)
        seconds = s + (payload - p) * slope
        beta = min(slope, seconds / payload)
        return seconds - payload * beta, beta


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, how they are joined, and how fast everything is.

    Attributes:
      device: the name of the kind of device.
      platform: "cpu", "cuda", "rocm" or "tpu", as JAX names the backend that compiles for it.
      devices_per_node: devices joined by `node_link`; of a TPU slice all its chips.
      nodes: nodes joined by `network_link`; of TPUs the slices.
      memory: bytes per device.
      reserve: the fraction of `memory` that plans leave free.
      peak_flops: FLOP/s of matrix products by dtype name ("bf16", "f16", "f32", "f64", ...). "f32" is needed.
      memory_bandwidth: bytes/s of one device.
      node_link: what one device sends to the others of its node; with a `topology`, one torus link.
      network_link: what a whole *node* sends to others, shared by its devices; None only with one node.
      card_link: what one device sends to the others of its card, where cards are faster than the node.
      devices_per_card: 1 where there are no such cards.
      topology: the sizes of the torus dims within a node, major to minor; () where a switch joins the devices.
      wraparound: for each torus dim, whether it is a ring.
      matmul_efficiency: the fraction of the peak that large matrix products reach by themselves.
      sustained_efficiency: the fraction of that rate that they keep within whole steps, where power limits the clock.
      attention_efficiency: kernel of fused attention -> the fractions of the peak that its forward and its backward
        pass reach, such as {"cudnn": (0.55, 0.45)}, or one number for both; None for the kernels that JAX has for the
        platform (`presets.ATTENTION_EFFICIENCY`). A kernel that is not listed is priced like a large matrix product.
      memory_efficiency: the fraction of `memory_bandwidth` that operations bound by memory reach within whole steps.
      kernel_start: seconds that each kernel takes to start within a compiled step.
      kernel_start_alone: the same of a kernel by itself, as products are measured by.
      tile: the elements that the matrix unit handles at once along m and n.
      parallel_units: tiles worked on at once (streaming multiprocessors); 1 where the compiler splits tiles.
      dispatch: what starting a task takes; a number stands for seconds of a task on however many devices.
      overlap: whether plans count on communication that hides behind computing, where the compiler can do that
        (`passes.lowering.overlap`).
      collectives: measured, in place of what the links say of these kinds and groups, and of what groups over more
        levels do on the innermost of them. A group of another size within a node takes those of the next larger one.
      measured: what of all this was measured on the devices themselves, in words. Not part of the fingerprint.
      source: where the numbers are from. Not part of the fingerprint.
    """

    device: str
    devices_per_node: int
    nodes: int = 1
    memory: int
    peak_flops: Mapping[str, float] | tuple[tuple[str, float], ...]
    memory_bandwidth: float
    node_link: Link
    network_link: Link | None = None
    card_link: Link | None = None
    devices_per_card: int = 1
    topology: tuple[int, ...] = ()
    wraparound: tuple[bool, ...] = ()
    platform: str = "cuda"
    reserve: float = DEVICE_RESERVE
    matmul_efficiency: float = 0.8
    sustained_efficiency: float = 1.0
    attention_efficiency: (
        Mapping[str, float | tuple[float, float]] | tuple[tuple[str, tuple[float, float]], ...] | None
    ) = None
    memory_efficiency: float = 1.0
    kernel_start: float = 0.0
    kernel_start_alone: float = 0.0
    tile: int = 128
    parallel_units: int = 1
    dispatch: Dispatch = Dispatch(presets.TASK_SECONDS)
    overlap: bool = False
    collectives: tuple[Curve, ...] = ()
    measured: tuple[str, ...] = ()
    source: str = "given by the caller"

    def __post_init__(self) -> None:
        peaks = self.peak_flops.items() if isinstance(self.peak_flops, Mapping) else self.peak_flops
        # A tuple in place of the mapping makes clusters hashable, which caches rely on.
        object.__setattr__(self, "peak_flops", tuple(sorted((str(k), float(v)) for k, v in peaks)))
        object.__setattr__(self, "attention_efficiency", _attention_efficiency(self))
        for name in ("topology", "wraparound", "collectives", "measured"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.dispatch, int | float):
            object.__setattr__(self, "dispatch", Dispatch(float(self.dispatch)))
        _validate(self)

    @classmethod
    def local(
        cls, devices: Sequence[Any] | None = None, calibration: str | os.PathLike[str] | Literal["auto"] | None = "auto"
    ) -> Cluster:
        """The cluster of `devices`, by default all that JAX has here.

        CPU devices share the machine's memory (or the control group's limit), cores and memory bandwidth evenly. GPUs
        and TPUs are looked up in the presets by `device_kind`; their memory is what the allocator reports, if it does.

        Args:
          devices: of one kind.
          calibration: a file that `alpa-lite calibrate` wrote for these devices, whose figures count in place of the
            presets'; "auto" stands for that which the environment variable `ALPA_LITE_CALIBRATION` names, if any.

        Raises:
          OptionError: for a kind of device that no preset describes, or a calibration of other devices.
        """
        if devices is None:
            import jax

            devices = jax.devices()
        given = os.environ.get(CALIBRATION) if calibration == "auto" else calibration
        return _measured(given, _local(devices)) if given else _local(devices)

    @classmethod
    def calibrated(cls, file: str | os.PathLike[str]) -> Cluster:
        """The cluster that `alpa-lite calibrate` measured and wrote to a file. The devices need not be here.

        Raises:
          OptionError: the file cannot be read, or is damaged.
        """
        return files.read(file, lambda data: cls.from_json(data["cluster"]))

    @classmethod
    def named(cls, name: str) -> Cluster:
        """The preset of a name, or with a name that ends in ".json" the cluster of a calibration's file.

        Raises:
          OptionError: there is neither.
        """
        return cls.calibrated(name) if name.endswith(".json") else cls.preset(name)

    @classmethod
    def preset(cls, name: str, nodes: int | None = None, topology: Sequence[int] | None = None) -> Cluster:
        """A known machine.

        Args:
          name: one of `Cluster.preset_names()`, in any case.
          nodes: how many nodes, or TPU slices joined by the data-centre network; None for the machine's usual number.
          topology: for TPUs the slice, such as (4, 4, 4); None for one of eight chips.

        Raises:
          OptionError: for an unknown name, or a number of nodes or a topology that the machine cannot have.
        """
        key = presets.ALIASES.get(name.lower(), name.lower())
        if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
            raise OptionError(f"nodes={nodes!r}: give a positive number of nodes, or None")
        if key in presets.NODES:
            if topology is not None:
                raise OptionError(f"topology={topology!r}: {name!r} has nodes, not a torus; give nodes= instead")
            given: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
            return cls(**(_arguments(key, presets.NODES[key]) | given))
        if key in presets.SLICES:
            return _slice(key, 1 if nodes is None else nodes, topology)
        raise OptionError(f"cluster={name!r} is not a known preset; choose one of {', '.join(cls.preset_names())}")

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """The names that `preset` takes, aliases included."""
        return (*presets.NODES, *presets.SLICES, *presets.ALIASES)

    @property
    def num_devices(self) -> int:
        """All devices of all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def usable_memory(self) -> int:
        """Bytes per device that a plan may fill: `memory` less the reserve."""
        return int(self.memory * (1 - self.reserve))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over every field but `source` and `measured`."""
        fields = self.to_json()
        del fields["source"], fields["measured"]
        if not self.overlap:
            del fields["overlap"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def peak(self, dtype: Any) -> float:
        """FLOP/s of matrix products in `dtype` (a NumPy or JAX dtype, or its name, long or short).

        A dtype that is not listed counts as bf16 up to two bytes, as f32 at four, and at half the f32 rate above.
        Integers of more than one byte have no matrix unit: an eighth of the f32 rate, unless "int32" is listed.
        """
        peaks, name = dict(self.peak_flops), str(getattr(dtype, "name", dtype))
        name = _DTYPE_NAMES.get(name, name)
        if name in peaks:
            return peaks[name]
        if name.startswith(("int", "uint")) and not name.endswith(("int2", "int4", "int8")):
            return peaks.get("int32", peaks["f32"] * _WIDE_INTEGERS)
        bits = int("".join(c for c in name.split("_")[0].split("e")[0] if c.isdigit()) or 8)  # "bool" has no digits
        if bits <= 16:
            return peaks.get("bf16", peaks["f32"])
        return peaks["f32"] / (1 if bits <= 32 else 2)

    @property
    def step_efficiency(self) -> float:
        """The fraction of the peak that large matrix products reach within whole steps."""
        return self.matmul_efficiency * self.sustained_efficiency

    def attention(self, kernel: str, *, backward: bool) -> float | None:
        """The fraction of the peak that a pass of an attention kernel reaches; None for an unknown kernel."""
        shares: Any = dict(self.attention_efficiency or ()).get(kernel)
        return None if shares is None else shares[backward]

    def levels(self, num_devices: int | None = None) -> tuple[Level, ...]:
        """The machine as a tower of levels, outermost first, as far as the first `num_devices` devices use it.

        A node's share of the network is divided among the devices of it that are in use.
        """
        count = self.num_devices if num_devices is None else num_devices
        if not 1 <= count <= self.num_devices:
            raise OptionError(f"{count} devices: the cluster has {self.num_devices}; use at most these, or more nodes")
        if self.topology:
            inner = self.topology  # its last dim is that of the devices of a card, if there are cards
        elif self.card_link is not None:
            inner = (self.devices_per_node // self.devices_per_card, self.devices_per_card)
        else:
            inner = (self.devices_per_node,)
        used = topology.fit_sizes((self.nodes, *inner), count)
        network = self.network_link or Link(math.inf)
        levels = [Level("network", used[0], network.bandwidth / math.prod(used[1:]), network.latency)]
        for i, (whole, size) in enumerate(zip(inner, used[1:], strict=True)):
            card = self.card_link is not None and i == len(inner) - 1
            if self.topology and not card:
                kind = "ring" if self.wraparound[i] and size == whole else "line"
                levels.append(Level(kind, size, self.node_link.bandwidth, self.node_link.latency))
            else:
                link = self.card_link if card and self.card_link is not None else self.node_link
                levels.append(Level("switch", size, link.bandwidth, link.latency))
        return tuple(levels)

    def controller(self, device: int) -> int:
        """Returns the number of the process that dispatches to a device: there is one per node, or per host of TPUs."""
        node, inside = divmod(device, self.devices_per_node)
        if not self.topology:
            return node
        host = _TPU_CHIPS_PER_HOST * self.devices_per_card
        return node * -(-self.devices_per_node // host) + inside // host

    @property
    def hides(self) -> frozenset[str]:
        """The kinds of collectives that plans take to hide behind computing: asked for, and done by the compiler."""
        return presets.HIDES.get(self.platform, frozenset()) if self.overlap else frozenset()

    @property
    def overlaps(self) -> bool:
        """Whether there are any."""
        return bool(self.hides)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options for these devices, as of `jax.stages.Lowered.compile`."""
        return dict(presets.OVERLAPPING.get(self.platform, {})) if self.overlaps else {}

    def part(self, num_devices: int) -> Cluster:
        """The first `num_devices` devices as a cluster of their own.

        Raises:
          OptionError: for more devices than there are.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise OptionError(f"num_devices={num_devices}: the cluster has {self.num_devices}")
        nodes, *inner = topology.fit_sizes((self.nodes, *(self.topology or (self.devices_per_node,))), num_devices)
        is_torus = bool(self.topology)
        card = inner[-1] if is_torus and self.card_link is not None else math.gcd(self.devices_per_card, inner[-1])
        ring = tuple(w and u == t for w, u, t in zip(self.wraparound, inner, self.topology, strict=False))
        return dataclasses.replace(
            self, nodes=nodes, devices_per_node=math.prod(inner), topology=tuple(inner) if is_torus else (),
            wraparound=ring, devices_per_card=card, card_link=self.card_link if card > 1 else None,
        )  # fmt: skip

    def mesh_shapes(self, max_axes: int = 3, num_devices: int | None = None) -> tuple[tuple[int, ...], ...]:
        """The logical mesh shapes worth trying, axes ordered from between nodes to within a node.

        Shapes that differ by a permutation of axes that costs the same on this machine are listed once: eight devices
        on one switch give (8,), (4, 2) and (2, 2, 2). See `alpa_lite.cluster.topology.mesh_shapes` for the choice.

        Args:
          max_axes: the most axes of a mesh.
          num_devices: use only so many devices; None for all.
        """
        return topology.mesh_shapes(self.levels(num_devices), max_axes)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        tables = {"peak_flops": self.peak_flops, "attention_efficiency": self.attention_efficiency or ()}
        return json_codec.encode_fields(self) | json_codec.encode({name: dict(table) for name, table in tables.items()})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_json` wrote.

        Raises:
          OptionError: if fields are missing, unknown or of another type.
        """
        rates = {"sustained_efficiency": 1.0, "memory_efficiency": 1.0, "kernel_start": 0.0, "kernel_start_alone": 0.0}
        data = {"overlap": False, "attention_efficiency": None, **rates, **data}  # data of earlier versions lack these
        try:
            return json_codec.decode_fields(cls, data)
        except json_codec.DecodeError as error:
            raise OptionError(f"cluster data: {error}; write it with to_json()") from error

    def __str__(self) -> str:
        if self.topology:
            shape = "x".join(map(str, self.topology))
            machine = f"{self.device} {shape}" + (f", {self.nodes} slices" if self.nodes > 1 else "")
        elif self.nodes > 1:
            machine = f"{self.nodes} nodes x {self.devices_per_node} {self.device}"
        else:
            machine = f"{self.devices_per_node} {self.device}"
        return f"{machine}, {self.usable_memory / 2**30:.1f} of {self.memory / 2**30:.1f} GiB usable per device"


def _attention_efficiency(cluster: Cluster) -> tuple[tuple[str, tuple[float, float]], ...]:
    """`Cluster.attention_efficiency` as pairs, with the defaults of the platform."""
    given: Any = cluster.attention_efficiency
    if given is None:
        given = presets.ATTENTION_EFFICIENCY.get(cluster.platform, {})
    items = given.items() if isinstance(given, Mapping) else given
    try:
        pairs: list[tuple[str, tuple[float, ...]]] = [
            (str(name), (float(x), float(x)) if isinstance(x, int | float) else tuple(map(float, x)))
            for name, x in items
        ]
    except (TypeError, ValueError):
        pairs = [("", ())]
    if not all(len(shares) == 2 and all(0 < share <= 1 for share in shares) for _, shares in pairs):
        raise OptionError(
            f"Cluster attention_efficiency={given!r}: give kernel -> (forward, backward), fractions of the peak above "
            "0, at most 1"
        )
    return tuple(sorted((name, (shares[0], shares[-1])) for name, shares in pairs))


def _validate(cluster: Cluster) -> None:
    """Raises OptionError for values that no machine has."""

    def require(condition: bool, field: str, remedy: str) -> None:
        if not condition:
            raise OptionError(f"Cluster {field}={getattr(cluster, field)!r}: {remedy}")

    for field in ("devices_per_node", "nodes", "memory", "devices_per_card", "tile", "parallel_units"):
        value = getattr(cluster, field)
        require(isinstance(value, int) and value >= 1, field, "give a positive whole number")
    require(0 <= cluster.reserve < 1, "reserve", "give a fraction of the memory, at least 0 and below 1")
    for field in ("matmul_efficiency", "sustained_efficiency", "memory_efficiency"):
        require(0 < getattr(cluster, field) <= 1, field, "give a fraction above 0, at most 1")
    for field in ("kernel_start", "kernel_start_alone"):
        require(getattr(cluster, field) >= 0, field, "give seconds >= 0")
    require(cluster.memory_bandwidth > 0, "memory_bandwidth", "give bytes/s above 0")
    peaks = dict(cluster.peak_flops)
    require("f32" in peaks and min(peaks.values()) > 0, "peak_flops", 'give FLOP/s above 0, for "f32" at least')
    for field in ("node_link", "network_link", "card_link"):
        link = getattr(cluster, field)
        require(link is None or isinstance(link, Link), field, "give a Link(bytes per second, seconds of latency)")
        require(link is None or (link.bandwidth > 0 and link.latency >= 0), field, "give bytes/s above 0, seconds >= 0")
    require(cluster.network_link is not None or cluster.nodes == 1, "network_link", "several nodes need a network")
    host = cluster.dispatch
    right = isinstance(host, Dispatch) and host.task >= 0 and host.device >= 0
    require(
        right, "dispatch", "give Dispatch(seconds of a task, seconds for each of its devices), or seconds of a task"
    )
    for curve in cluster.collectives:
        ascending = all(p < q and s <= t * (1 + 1e-9) for (p, s), (q, t) in itertools.pairwise(curve.points))
        right = bool(curve.points) and min(curve.points[0]) > 0 and ascending
        require(right, "collectives", f"{curve} needs points (bytes, seconds) above 0, both ascending")
    cards = cluster.devices_per_card
    require(cluster.devices_per_node % cards == 0, "devices_per_card", "it must divide devices_per_node")
    require(
        (cards > 1) == (cluster.card_link is not None), "card_link", "give it with devices_per_card above 1, else not"
    )
    if cluster.topology:
        product = math.prod(cluster.topology)
        require(product == cluster.devices_per_node, "topology", "its product must be devices_per_node")
        fits = cluster.card_link is None or cluster.topology[-1] == cards
        require(fits, "devices_per_card", "the last dim of a topology is that of the devices of a card")
    same = len(cluster.wraparound) == len(cluster.topology)
    require(same, "wraparound", "give one truth value for each dim of the topology")


def _arguments(key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a preset: with its rates within steps, and pairs turned into links and `dispatch`."""
    sustained, memory = presets.STEP_RATES.get(key, (1.0, 1.0))
    rates: dict[str, Any] = {"sustained_efficiency": sustained, "memory_efficiency": memory}
    if fields.get("platform") in ("cuda", "rocm"):
        rates |= {"kernel_start": presets.KERNEL_START, "kernel_start_alone": presets.KERNEL_START_ALONE}
    if key in nvlink.NVLINK:
        rates["collectives"] = tuple(_curves(key, fields["devices_per_node"]))
    if key in presets.SLICES:
        rates["matmul_efficiency"] = presets.TPU_MATMUL_EFFICIENCY
    kinds = {"node_link": Link, "network_link": Link, "card_link": Link, "dispatch": Dispatch}
    return rates | {name: kinds[name](*value) if name in kinds else value for name, value in fields.items()}


def _curves(key: str, devices: int) -> Iterator[Curve]:
    """The measured collectives of a preset, as far as groups of a node have so many devices."""
    for (kind, size), (least, microseconds) in nvlink.NVLINK[key].items():
        if size <= devices:
            points = tuple((least * nvlink.STEP**i, 1e-6 * us) for i, us in enumerate(microseconds))
            yield Curve(kind, (size,), points)


def _slice(key: str, nodes: int, shape: Sequence[int] | None) -> Cluster:
    """TPU slices: a torus each, joined by the network of their hosts."""
    fields = dict(presets.SLICES[key])
    default, largest, wrap = fields.pop("default"), fields.pop("largest"), fields.pop("wrap")
    dims = tuple(default if shape is None else shape)
    if len(dims) != len(default) or not all(isinstance(d, int) and 1 <= d <= largest for d in dims):
        raise OptionError(f"topology={shape!r}: {key} slices have {len(default)} dims of 1 to {largest} chips")
    bandwidth, latency = fields.pop("host_network")
    cores = fields.pop("cores", 1)
    chips = math.prod(dims)
    hosts = max(1, chips // _TPU_CHIPS_PER_HOST)
    inner = (cores,) if cores > 1 else ()
    return Cluster(
        **_arguments(key, fields),
        platform="tpu",
        devices_per_node=chips * cores,
        devices_per_card=cores,
        nodes=nodes,
        topology=(*dims, *inner),
        wraparound=(*(d % wrap == 0 for d in dims), *(False for _ in inner)),
        network_link=Link(bandwidth * hosts, latency),
    )


def _local(devices: Sequence[Any]) -> Cluster:
    """`Cluster.local` for given devices: all of one kind, evenly over processes."""
    first = devices[0]
    processes = len({device.process_index for device in devices})
    if len(devices) % processes:
        raise OptionError(f"{len(devices)} devices do not divide over {processes} processes; give cluster=")
    per_node = len(devices) // processes
    if first.platform == "cpu":
        return _local_cpu(per_node, processes)
    name = next((preset for part, preset in presets.DEVICE_KINDS if part in first.device_kind.lower()), None)
    if name is None:
        raise OptionError(
            f"cluster=None: no preset describes devices of kind {first.device_kind!r}; give cluster=Cluster(...) "
            f"with its numbers, or one of {', '.join(Cluster.preset_names())}"
        )
    stats = first.memory_stats() or {}
    limit = {"memory": int(stats["bytes_limit"]), "reserve": ALLOCATOR_RESERVE} if stats.get("bytes_limit") else {}
    if name in presets.SLICES:
        return dataclasses.replace(_local_slice(name, devices), **limit)
    cluster = Cluster.preset(name, nodes=processes)
    if per_node % cluster.devices_per_card:
        cluster = dataclasses.replace(cluster, card_link=None, devices_per_card=1)
    return dataclasses.replace(cluster, devices_per_node=per_node, **limit)


def _measured(file: str | os.PathLike[str], here: Cluster) -> Cluster:
    """The cluster of a calibration for the devices here, with the memory that they have now.

    Of accelerators, fewer devices are as fast as those that were measured; CPU devices share one machine.
    """
    found = Cluster.calibrated(file)
    fewer = here.num_devices < found.num_devices and here.platform != "cpu"
    if found.device != here.device or not (fewer or here.num_devices == found.num_devices):
        raise OptionError(
            f"the calibration {str(file)!r} is of {found.num_devices} {found.device}, and here are {here.num_devices} "
            f"{here.device}; write one of these with `alpa-lite calibrate`, or unset {CALIBRATION}"
        )
    return dataclasses.replace(found.part(here.num_devices), memory=here.memory, reserve=here.reserve)


def _local_slice(name: str, devices: Sequence[Any]) -> Cluster:
    """The slices that TPU devices form, from their coordinates; a line where these do not fill a box."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    coords = {tuple(device.coords) for device in devices}
    sizes = [len({coord[i] for coord in coords}) for i in range(len(next(iter(coords))))]
    fields = presets.SLICES[name]
    rank, cores = len(fields["default"]), fields.get("cores", 1)
    dims = tuple(sizes[:rank])
    box = math.prod(dims) * cores * slices == len(devices)
    if not box:
        dims = (len(devices) // slices, *(1,) * (rank - 1))
    ring = tuple(box and d % fields["wrap"] == 0 for d in dims)
    cluster = _slice(name, slices, (1,) * rank)
    apart: dict[str, Any] = {} if box else {"devices_per_card": 1, "card_link": None}
    if box and cores > 1:
        dims, ring = (*dims, cores), (*ring, False)
    return dataclasses.replace(cluster, topology=dims, wraparound=ring, devices_per_node=math.prod(dims), **apart)


def _local_cpu(per_node: int, processes: int) -> Cluster:
    """Virtual CPU devices: equal shares of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flops = presets.CPU_CORE_FLOPS * cores / per_node
    link = Link(presets.CPU_MEMORY_BANDWIDTH / per_node, presets.CPU_STEP_LATENCY)
    return Cluster(
        device="cpu",
        platform="cpu",
        devices_per_node=per_node,
        nodes=processes,
        memory=_machine_memory() // per_node,
        reserve=HOST_RESERVE,
        peak_flops={"bf16": flops, "f16": flops, "f32": flops, "f64": flops / 2},
        memory_bandwidth=link.bandwidth,
        node_link=link,
        network_link=link if processes > 1 else None,
        tile=16,
        dispatch=Dispatch(*presets.CPU_DISPATCH),
        source=f"shares of {cores} cores and of the machine's memory; rates from presets.py",
    )


def _machine_memory() -> int:
    """Bytes of this machine's memory, or of its control group where that has a lower limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
