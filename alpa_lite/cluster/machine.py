"""The machine that a plan is made for: a value without devices.

A `Cluster` states what the cost model and the memory constraint need: devices and how they are joined, memory, peak
rates and bandwidths, each with its source. Presets describe machines that need not be here; `Cluster.local()` describes
the devices of this process. Nothing here asks JAX for devices but `Cluster.local()` without devices, when it is called.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alpa_lite.calibration import files
from alpa_lite.cluster import presets, topology
from alpa_lite.cluster.rates import RULES, USUAL_DISPATCH, Curve, Dispatch, Link, attention_shares, make
from alpa_lite.cluster.topology import Level
from alpa_lite.errors import OptionError
from alpa_lite.ir import json_codec

DEVICE_RESERVE = 0.1
"""The part of a device's memory that plans leave free: runtime context, fragmentation, transfer buffers."""

CALIBRATION = "ALPA_LITE_CALIBRATION"
"""The environment variable that names the file of a calibration for `Cluster.local()`."""

GIVEN = "given by the caller"
"""`Cluster.source` where the caller names none."""

_WIDE_INTEGERS = 1 / 8
"""The share of the f32 rate, that of TF32, which vector units reach with integers: 19.5 of 156 T/s on an A100."""

_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


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
        platform (`presets.toml`). A kernel that is not listed is priced like a large matrix product.
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
    dispatch: Dispatch = USUAL_DISPATCH
    overlap: bool = False
    collectives: tuple[Curve, ...] = ()
    measured: tuple[str, ...] = ()
    source: str = GIVEN

    def __post_init__(self) -> None:
        """Takes links, `dispatch` and curves as their fields, too: as presets and files have them."""
        put = functools.partial(object.__setattr__, self)
        # A tuple in place of the mapping makes clusters hashable, which caches rely on.
        put("peak_flops", tuple(sorted((str(k), float(v)) for k, v in dict(self.peak_flops).items())))
        shares = self.attention_efficiency
        if shares is None:
            shares = presets.platform_table(self.platform).get("attention_efficiency", {})
        put("attention_efficiency", attention_shares(shares))
        for name in ("topology", "wraparound", "measured"):
            put(name, tuple(getattr(self, name)))
        put("collectives", tuple(make(Curve, curve) for curve in self.collectives))
        for name in ("node_link", "network_link", "card_link"):
            put(name, make(Link, getattr(self, name)))
        host: Any = self.dispatch
        put("dispatch", Dispatch(float(host)) if isinstance(host, int | float) else make(Dispatch, host))
        for names, is_valid, remedy in RULES:
            for name in names.split():
                if not is_valid(self, getattr(self, name)):
                    raise OptionError(f"Cluster {name}={getattr(self, name)!r}: {remedy}")

    @classmethod
    def local(
        cls, devices: Sequence[Any] | None = None, calibration: str | os.PathLike[str] | Literal["auto"] | None = "auto"
    ) -> Cluster:
        """Returns the cluster of `devices`, by default all that JAX has here.

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
        here = cls(**presets.local_arguments(devices))
        given = os.environ.get(CALIBRATION) if calibration == "auto" else calibration
        return _measured(given, here) if given else here

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Cluster:
        """Returns the cluster that `alpa-lite calibrate` measured and wrote to a file. The devices need not be here.

        Raises:
          OptionError: the file cannot be read, or is damaged.
        """
        return files.read(file, lambda data: cls.from_json(data["cluster"]))

    @classmethod
    def from_name(cls, name: str) -> Cluster:
        """Returns the preset of a name, or with a name that ends in ".json" the cluster of a calibration's file.

        Raises:
          OptionError: there is neither.
        """
        return cls.load(name) if name.endswith(".json") else cls.preset(name)

    @classmethod
    def preset(cls, name: str, nodes: int | None = None, topology: Sequence[int] | None = None) -> Cluster:
        """Returns a known machine.

        Args:
          name: one of `Cluster.preset_names()`, in any case.
          nodes: how many nodes, or TPU slices joined by the data-centre network; None for the machine's usual number.
          topology: for TPUs the slice, such as (4, 4, 4); None for one of eight chips.

        Raises:
          OptionError: for an unknown name, or a number of nodes or a topology that the machine cannot have.
        """
        return cls(**presets.arguments(name, nodes, topology))

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """Returns the names that `preset` takes, aliases included."""
        return presets.names()

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
        """Returns the fraction of the peak that a pass of an attention kernel reaches; None for an unknown kernel."""
        shares: Any = dict(self.attention_efficiency or ()).get(kernel)
        return None if shares is None else shares[backward]

    def levels(self, num_devices: int | None = None) -> tuple[Level, ...]:
        """Returns the machine as a tower of levels, outermost first, as far as the first `num_devices` devices use it.

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
        host = presets.CHIPS_PER_HOST * self.devices_per_card
        return node * -(-self.devices_per_node // host) + inside // host

    @property
    def hidden_kinds(self) -> frozenset[str]:
        """The kinds of collectives that plans take to hide behind computing: asked for, and done by the compiler."""
        return frozenset(presets.platform_table(self.platform).get("hides", ()) if self.overlap else ())

    @property
    def has_overlap(self) -> bool:
        """Whether there are any."""
        return bool(self.hidden_kinds)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options for these devices, as of `jax.stages.Lowered.compile`."""
        return dict(presets.platform_table(self.platform).get("overlapping", {})) if self.has_overlap else {}

    def part(self, num_devices: int) -> Cluster:
        """Returns the first `num_devices` devices as a cluster of their own.

        Raises:
          OptionError: for more devices than there are.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise OptionError(
                f"num_devices={num_devices}: the cluster has {self.num_devices}; give 1 to {self.num_devices}"
            )
        nodes, *inner = topology.fit_sizes((self.nodes, *(self.topology or (self.devices_per_node,))), num_devices)
        is_torus = bool(self.topology)
        card = inner[-1] if is_torus and self.card_link is not None else math.gcd(self.devices_per_card, inner[-1])
        ring = tuple(w and u == t for w, u, t in zip(self.wraparound, inner, self.topology, strict=False))
        return dataclasses.replace(
            self, nodes=nodes, devices_per_node=math.prod(inner), topology=tuple(inner) if is_torus else (),
            wraparound=ring, devices_per_card=card, card_link=self.card_link if card > 1 else None,
        )  # fmt: skip

    def mesh_shapes(self, max_axes: int = 3, num_devices: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Returns the logical mesh shapes worth trying, axes ordered from between nodes to within a node.

        Shapes that differ by a permutation of axes that costs the same on this machine are listed once: eight devices
        on one switch give (8,), (4, 2) and (2, 2, 2). See `alpa_lite.cluster.topology.mesh_shapes` for the choice.

        Args:
          max_axes: the most axes of a mesh.
          num_devices: use only this many devices; None for all.
        """
        return topology.mesh_shapes(self.levels(num_devices), max_axes)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        tables = {"peak_flops": self.peak_flops, "attention_efficiency": self.attention_efficiency or ()}
        return json_codec.encode_fields(self) | json_codec.encode({name: dict(table) for name, table in tables.items()})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """Returns the cluster that `to_json` wrote.

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


def _measured(file: str | os.PathLike[str], here: Cluster) -> Cluster:
    """Returns the cluster of a calibration for the devices here, with the memory that they have now.

    Of accelerators, fewer devices are as fast as those that were measured; CPU devices share one machine.
    """
    found = Cluster.load(file)
    fewer = here.num_devices < found.num_devices and here.platform != "cpu"
    if found.device != here.device or not (fewer or here.num_devices == found.num_devices):
        raise OptionError(
            f"the calibration {str(file)!r} is of {found.num_devices} {found.device}, and here are {here.num_devices} "
            f"{here.device}; write one of these with `alpa-lite calibrate`, or unset {CALIBRATION}"
        )
    return dataclasses.replace(found.part(here.num_devices), memory=here.memory, reserve=here.reserve)
