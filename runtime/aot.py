"""Compiles a planned step ahead of time, with the compiler of a machine that is not here.

A *target* is a kind of machine and its size. PJRT plugins describe its devices without the hardware
(`jax.experimental.topologies`), and compile for them:

    v5e:2x4            one TPU slice, by the plugin that the package `libtpu` holds (the extra `tpu-verify`)
    v5p:4x4x4*2        two slices
    cuda:h100.txtpb    GPUs of the kind that an XLA `GpuTargetConfigProto` describes, by JAX's CUDA plugin

Away from the machines that it drives, libtpu has to be told by variables, which it reads when it is loaded, not to ask
the metadata server of a cloud, of which kind the machine is, and that it shares nothing with other processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from alpa_lite.cluster import Cluster, presets
from alpa_lite.errors import OptionError, PlanError
from alpa_lite.ir.program import Submesh
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.load import load
from alpa_lite.runtime.step import LoadOptions

_TPU = re.compile(r"(?P<kind>[a-z0-9]+):(?P<shape>\d+(?:x\d+)*)(?:\*(?P<slices>\d+))?")
_LIBTPU_NAMES = {"v7": "tpu7x"}
"""Names that libtpu has for generations, where they are not those of the presets."""
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # of the machine here, which has none; any known one will do
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclass(frozen=True)
class Target:
    """A machine to compile for."""

    platform: str  # "tpu" or "cuda"
    kind: str  # the generation of the TPU, or the file that describes the GPU
    shape: tuple[int, ...]  # the devices along each dim of the slice; of GPUs the nodes, and the GPUs of each
    slices: int = 1  # of TPUs, joined by a network

    @property
    def num_devices(self) -> int:
        """All devices; of chips that JAX shows as several devices, all of these."""
        cores = presets.SLICES[self.kind].get("cores", 1) if self.platform == "tpu" else 1
        return math.prod(self.shape) * self.slices * cores

    def __str__(self) -> str:
        """As `target_of` reads it."""
        if self.platform == "cuda":
            return f"cuda:{self.kind}"
        return f"{self.kind}:{'x'.join(map(str, self.shape))}" + (f"*{self.slices}" if self.slices > 1 else "")


def target_of(text: str | None, cluster: Cluster) -> Target:
    """Returns the target that a text names; without one, the cluster of the plan itself.

    Raises:
      OptionError: the text names none, or one with another number of devices than the cluster; or there is no text and
        no compiler for the cluster.
    """
    if text is None:
        names = [name for name, fields in presets.SLICES.items() if fields["device"] == cluster.device]
        if not names:
            raise OptionError(
                f"--target: the plan is for {cluster}, whose kind of device does not say which compiler to take; "
                "give one, such as v5e:2x4 or cuda:h100.txtpb"
            )
        rank = len(presets.SLICES[names[0]]["default"])
        return Target("tpu", names[0], cluster.topology[:rank], cluster.nodes)
    kind, _, rest = text.partition(":")
    if kind.lower() in ("cuda", "gpu"):
        if not rest:
            raise OptionError(f"--target {text!r}: give the file that describes the GPU, as in cuda:h100.txtpb")
        return Target("cuda", rest, (cluster.nodes, cluster.devices_per_node))
    match = _TPU.fullmatch(text.lower().replace("tpu7x", "v7"))
    if match is None or match["kind"] not in presets.SLICES:
        known = ", ".join(presets.SLICES)
        raise OptionError(f"--target {text!r}: write KIND:SHAPE with a kind of {known}, as in v5e:2x4, or cuda:FILE")
    target = Target("tpu", match["kind"], tuple(map(int, match["shape"].split("x"))), int(match["slices"] or 1))
    if target.num_devices != cluster.num_devices:
        raise OptionError(
            f"--target {text!r} has {target.num_devices} devices, and the plan is for {cluster.num_devices} "
            f"({cluster}); give a target of as many devices, or plan for that one"
        )
    return target


def devices_of(target: Target) -> list[Any]:
    """Returns the devices of a target, which can be compiled for and hold nothing.

    Raises:
      OptionError: its compiler is not installed, or does not know such a machine; names what to install.
    """
    from jax.experimental import topologies

    name, options = _tpu_topology(target) if target.platform == "tpu" else _cuda_topology(target)
    try:
        devices = list(topologies.get_topology_desc(name, target.platform, **options).devices)
    except Exception as error:
        raise OptionError(
            f"--target {target}: the {target.platform} compiler that is installed here cannot describe it: "
            f"{type(error).__name__}: {error}; give another target"
        ) from error
    if len(devices) != target.num_devices:
        raise PlanError(
            f"--target {target}: this compiler describes {len(devices)} devices, not {target.num_devices}; give a "
            f"target of {len(devices)}"
        )
    return devices


def compile_for_devices(staged: Staged, plan: Plan, devices: Sequence[Any]) -> Iterator[Any]:
    """The `jax.stages.Compiled` of each executable of a planned step, in the program's order, for such devices."""
    if plan.is_pipelined:
        devices = _from_first_slices(staged.program.submeshes, devices)
    executable = load(staged, plan, LoadOptions(devices=devices))
    yield from (lowered.compile() for lowered in executable.lowered_executables())


def _from_first_slices(submeshes: Sequence[Submesh], devices: Sequence[Any]) -> list[Any]:
    """Returns the devices, with those of each submesh replaced by those of as many of the first slices.

    The TPU compiler refuses a program for devices of a later slice alone ("Slice is empty"). Slices are equal, so it
    makes the same program for an earlier one.
    """
    out = list(devices)
    if len({getattr(device, "slice_index", 0) for device in devices}) == 1:
        return out
    there = {(d.slice_index, tuple(d.coords), d.core_on_chip): d for d in devices}
    for submesh in submeshes:
        own = [devices[i] for i in submesh.devices]
        first = {number: rank for rank, number in enumerate(sorted({d.slice_index for d in own}))}
        moved = [there[first[d.slice_index], tuple(d.coords), d.core_on_chip] for d in own]
        out[submesh.devices.start : submesh.devices.stop] = moved
    return out


def compiler_version(target: Target) -> str:
    """Returns the package of a target's compiler, and its version."""
    names = ["libtpu"] if target.platform == "tpu" else ["jax-cuda12-pjrt", "jax-cuda13-pjrt"]
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return f"the {target.platform} plugin that the environment names"


def _tpu_topology(target: Target) -> tuple[str, dict[str, Any]]:
    """Returns the name of a topology of libtpu, and its options."""
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise OptionError(
            f"--target {target}: the TPU compiler is not installed; pip install 'alpa-lite[tpu-verify]', which is the "
            "libtpu of the installed JAX. It needs no TPU"
        )
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    shape = "x".join(map(str, target.shape))
    more: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.kind == "v4":  # the two cores of a chip as one device, as JAX has them where there are such chips
        more["chip_config_name"] = "megacore"
    return f"{_LIBTPU_NAMES.get(target.kind, target.kind)}:{shape}", more


def _cuda_topology(target: Target) -> tuple[str, dict[str, Any]]:
    """Returns the name of a topology of JAX's CUDA plugin, and its options."""
    try:
        config = Path(target.kind).read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--target {target}: {target.kind!r} cannot be read: {error.strerror}; give XLA's text of the GPU"
        ) from error
    names = ["jax_cuda12_plugin", "jax_cuda13_plugin"]
    if importlib.util.find_spec("jax_plugins") is not None:
        names += ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"]
    if not any(map(importlib.util.find_spec, names)):
        raise OptionError(
            f"--target {target}: JAX's CUDA plugin is not installed; pip install 'alpa-lite[cuda-verify]'"
        )
    return "", {"target_config": config, "topology": "1x" + "x".join(map(str, target.shape))}
