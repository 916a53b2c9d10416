"""Figures of a plan beyond its decisions: its work, the activations held, and the predictions for other methods.

Units are seconds per step, bytes per device, and FLOPs per step, unless an attribute says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class AxisUse:
    """The uses of one axis of a mesh.

    Attributes:
      name, size: the axis, and its devices.
      products: what the axis divides in the matrix products and convolutions -> the share of their FLOPs: "data" (the
        batch's leading dim), "sequence", "space", "expert" or "tensor". The remainder to 1 is computed by all
        devices of the axis alike.
      params, optimizer: the share of the parameters' bytes, and of the optimizer state's, that is sharded over it.
    """

    name: str
    size: int
    products: Mapping[str, float]
    params: float
    optimizer: float


@dataclass(frozen=True)
class Residual:
    """An activation that the forward pass leaves for the backward pass. Equal ones of one place are one, counted.

    Attributes:
      where: the source line and the name scope of what makes it.
      operation: the name of its primitive; behind a collective, that too.
      shape, dtype: of the whole value.
      spec: how the mesh shards it.
      bytes: of one device's block of one of them; of one micro-batch.
      count: how many there are.
    """

    where: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes: int
    count: int


@dataclass(frozen=True)
class OpCost:
    """The predicted seconds per step of all operations of one kind in one place that the same resource bounds.

    Attributes:
      where: the source line and the name scope; numbers in scopes are written `#`, so that layers are one place.
      operation: the name of the primitive.
      flops: seconds that their FLOPs take at the rate that they reach.
      bytes: seconds that reading and writing memory takes.
      links, latency: seconds in which they wait for collectives, by whether faster links shorten them.
      starts: seconds that their kernels take to start.
      count: how many run.
    """

    where: str
    operation: str
    flops: float = 0.0
    bytes: float = 0.0
    links: float = 0.0
    latency: float = 0.0
    starts: float = 0.0
    count: int = 0

    @property
    def seconds(self) -> float:
        """Of computing."""
        return max(self.flops, self.bytes) + self.starts

    @property
    def total(self) -> float:
        """Seconds of computing and of waiting."""
        return self.seconds + self.links + self.latency

    @property
    def terms(self) -> dict[str, float]:
        """The seconds of each resource; latency is that of collectives and of kernels."""
        waiting = self.latency + self.starts
        return {"FLOPs": self.flops, "bytes": self.bytes, "links": self.links, "latency": waiting}

    @property
    def bound(self) -> str:
        """The longest of `terms`, which bounds them."""
        return max(self.terms, key=self.terms.__getitem__)


@dataclass(frozen=True)
class Products:
    """The FLOPs of a step's own matrix products and convolutions: without what is computed again.

    Attributes:
      flops: two for each multiply-add, of the whole step.
      peak: FLOP/s of one device at which it could do them: flops / sum over dtypes of (flops / peak of the dtype).
    """

    flops: float = 0.0
    peak: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Another way to run the step on the same devices, priced by the same integer program.

    Attributes:
      name: "data parallel", "FSDP (ZeRO-3)", "tensor parallel", "one device", "one mesh" or "pipeline".
      mesh_shape: its mesh, or the stages of a pipeline.
      step_seconds: None if it was not evaluated.
      bytes_per_device: None if unknown.
      reason: why there are no figures; empty if there are.
    """

    name: str
    mesh_shape: tuple[int, ...] = ()
    step_seconds: float | None = None
    bytes_per_device: int | None = None
    reason: str = ""
