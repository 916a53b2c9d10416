"""Fits the parameters of a cluster to measurements.

Relative errors are made small, since operations of a microsecond and of a second matter in their own plans.

    products      peak * efficiency of each dtype, and one tile for all (and for one dtype after the other the same
                  parallel units as the preset has): the formula of `MeshCost.matmul`, with the least mean |log ratio|
    elementwise   bytes/s of memory: twice the bytes of all arrays over all seconds, so that large arrays decide: those
                  that fit a cache take little time in either case
    sustained     seconds of a large product by itself over those after seconds of nothing else
    kernel        seconds that a kernel takes to start within a program
    attention     FLOPs of a pass, as `passes.costs.attention` counts them, over its seconds and the peak
    collectives   of each kind and group its seconds by payload, made monotone by isotonic regression of log seconds
    dispatch      seconds of a task and of each of its devices, >= 0: likewise over runs and transfers
    links         where permutations between the devices of a node were measured: their bandwidth and latency, for
                  transfers and for groups that were not measured

Parameters that were not measured keep their values.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from alpa_lite.calibration import files
from alpa_lite.calibration.samples import PASSES, Sample
from alpa_lite.cluster import Cluster, Curve, Dispatch, Link
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import OptionError
from alpa_lite.ir import json_codec
from alpa_lite.ir.layout import LogicalMesh

TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The tiles that are tried."""

LARGEST = 0.9
"""The share of the peak that large products are taken to reach where no peak is known: of CPU devices, and where the
measured rate exceeds that of the data sheet."""

_ITEMSIZE = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}


@dataclass(frozen=True)
class Fit:
    """One fit.

    Attributes:
      name: of what, such as "all_reduce over 8".
      parameters: what was found, by name, in seconds, bytes and FLOP.
      error: the median of |predicted / measured - 1|; worst: the greatest.
      count: of samples.
    """

    name: str
    parameters: Mapping[str, float]
    error: float
    worst: float
    count: int

    @classmethod
    def from_samples(
        cls, name: str, parameters: Mapping[str, float], predicted: float | Sequence[float], measured: Sequence[float]
    ) -> Fit:
        """Returns the fit with the errors of its predictions, one for all samples or one for each."""
        each = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(name, parameters, float(np.median(each)), float(each.max()), len(each))


FittedFields = tuple[list[Fit], dict[str, Any]]
"""The fits of some samples, and fields of the cluster with their parameters."""


def fit_cluster(cluster: Cluster, samples: Sequence[Sample], missing: int = 0) -> tuple[tuple[Fit, ...], Cluster]:
    """Returns the cluster with every parameter for which there are samples, and the fits.

    Args:
      cluster: what is known without measuring.
      missing: how many further samples there was no time for.
    """
    by: dict[str, list[Sample]] = {}
    for sample in samples:
        by.setdefault("dispatch" if sample.figure in ("run", "transfer") else sample.figure, []).append(sample)
    fits: list[Fit] = []
    said: list[str] = []
    for figure, (label, fit) in _FITTERS.items():
        if figure in by:
            found, fields = fit(cluster, by[figure])
            cluster = dataclasses.replace(cluster, **fields)
            fits += found
            dtypes = sorted({sample.dtype for sample in by[figure]})
            said.append(label.format(dtypes=", ".join(dtypes), count=len(found)))
    if missing:
        said.append(f"{missing} of {len(samples) + missing} measurements did not fit into the time")
    return tuple(fits), dataclasses.replace(cluster, measured=tuple(said))


def _memory(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    rates = [2 * sample.sizes[0] / sample.seconds for sample in samples]
    rate = 2 * sum(sample.sizes[0] for sample in samples) / sum(sample.seconds for sample in samples)
    fit = Fit.from_samples("memory", {"bytes/s": rate}, rate, rates)
    return [fit], {"memory_bandwidth": rate, "memory_efficiency": 1.0}


def _kernels(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    start = samples[0].seconds
    return [Fit("kernel", {"start": start}, 0.0, 0.0, 1)], {"kernel_start": start, "kernel_start_alone": start}


def _sustained(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    """Returns the rate of products after seconds of nothing else, over that of products by themselves."""
    cost = _one(cluster)
    shares = [min(1.0, _product(cost, sample) / sample.seconds) for sample in samples]
    share = float(np.median(shares))
    return [Fit.from_samples("sustained", {"share": share}, share, shares)], {"sustained_efficiency": share}


def _attention(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    """Shares of the peak of cuDNN's passes; samples of the backward pass have run the forward pass, too."""
    from alpa_lite.passes.costs.attention import pairs

    seconds = {(sample.kind, sample.sizes): sample.seconds for sample in samples}
    shares: dict[str, list[float]] = {}
    for sample in samples:
        examples, tokens, heads, features = sample.sizes
        own, products = sample.seconds, 4
        if sample.kind == "backward":
            own, products = own - seconds.get(("forward", sample.sizes), math.inf), 10
        work = products * examples * heads * features * pairs(tokens, tokens, causal=True)
        if own > 0:
            shares.setdefault(sample.kind, []).append(min(1.0, work / own / cluster.peak(sample.dtype)))
    found = {kind: float(np.median(each)) for kind, each in shares.items()}
    each = [share / found[kind] for kind, own in shares.items() for share in own]
    known = dict(cluster.attention_efficiency or ())
    if set(found) == set(PASSES):
        known["cudnn"] = found["forward"], found["backward"]
    return [Fit.from_samples("attention", found, 1.0, each)], {"attention_efficiency": known}


def _products(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    """Returns the tile that explains all dtypes best, each with a rate of its own."""
    dtypes = sorted({sample.dtype for sample in samples})
    groups = [[sample for sample in samples if sample.dtype == dtype] for dtype in dtypes]

    def rated(tile: int) -> tuple[float, list[float]]:
        shaped = dataclasses.replace(cluster, tile=tile)
        found = [_rate(shaped, group) for group in groups]
        return sum(loss * len(group) for (loss, _), group in zip(found, groups, strict=True)), [r for _, r in found]

    (_, rates), tile = min(((rated(tile), tile) for tile in TILES), key=lambda one: one[0][0])
    peaks = dict(cluster.peak_flops)
    largest = max(rate / cluster.peak(dtype) for dtype, rate in zip(dtypes, rates, strict=True))
    share = largest if largest <= 1 and cluster.platform != "cpu" else LARGEST
    peaks |= {dtype: rate / share for dtype, rate in zip(dtypes, rates, strict=True)}
    fields = {"tile": tile, "peak_flops": peaks, "matmul_efficiency": share}
    cost = _one(dataclasses.replace(cluster, **fields))
    out = []
    for dtype, rate, group in zip(dtypes, rates, groups, strict=True):
        predicted, measured = [_product(cost, sample) for sample in group], [sample.seconds for sample in group]
        out.append(Fit.from_samples(f"products in {dtype}", {"FLOP/s": rate, "tile": tile}, predicted, measured))
    return out, fields


def _rate(cluster: Cluster, samples: Sequence[Sample]) -> tuple[float, float]:
    """(loss, FLOP/s) of large products of one dtype, for the tile of the cluster."""
    peak = cluster.peak(samples[0].dtype)
    best = (math.inf, peak)
    reached = [2.0 * math.prod(s.sizes) / s.seconds for s in samples]
    for rate in np.geomspace(min(reached), 8 * max(reached), 121):
        cost = _one(dataclasses.replace(cluster, peak_flops={"f32": rate, samples[0].dtype: rate}, matmul_efficiency=1))
        loss = float(np.mean([abs(math.log(_product(cost, sample) / sample.seconds)) for sample in samples]))
        best = min(best, (loss, float(rate)))
    return best


def _one(cluster: Cluster) -> MeshCost:
    return MeshCost(cluster, LogicalMesh((1,), ("x",)))


def _product(cost: MeshCost, sample: Sample) -> float:
    m, n, k = sample.sizes
    return cost.matmul(m, n, k, 1, sample.dtype, _ITEMSIZE[sample.dtype])


def affine(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 with the least sum of squares of (a + amount * b) / seconds - 1."""
    times, x = np.asarray(seconds, dtype=np.float64), np.asarray(amounts, dtype=np.float64)
    scale = max(float(x.max()), 1e-300)
    (a, b), _ = nnls(np.stack([1 / times, x / scale / times], axis=1), np.ones(len(times)))
    return float(a), float(b) / scale


def _collectives(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    """Returns a curve for each kind and group with two payloads or more; the link of a node from permutations.

    The error of a fit is that of a curve without the payload in question, of payloads between others.
    """
    fits, curves = [], []
    samples = sorted(samples, key=lambda s: (s.kind, s.group, s.sizes))
    for (kind, group), some in itertools.groupby(samples, key=lambda s: (s.kind, s.group)):
        own = list(some)
        if len({sample.sizes for sample in own}) < 2:
            continue
        payloads, seconds = [float(sample.sizes[0]) for sample in own], [sample.seconds for sample in own]
        curves.append(curve := curve_of(kind, group, payloads, seconds))
        size = " x ".join(map(str, reversed(group)))
        found = {"first": curve.points[0][1], "bytes/s": curve.points[-1][0] / curve.points[-1][1]}
        fits.append(Fit.from_samples(f"{kind} over {size}", found, predict_left_out(curve, payloads, seconds), seconds))
    near = [curve for curve in curves if curve.kind == "collective_permute" and len(curve.group) == 1]
    fields: dict[str, Any] = {"collectives": tuple(curves)}
    for curve in sorted(near, key=lambda curve: curve.group)[:1]:
        latency, per_byte = affine(*zip(*curve.points, strict=True))
        if per_byte > 0:
            fields["node_link"] = Link(1 / per_byte, latency / 2)
    return fits, fields


def curve_of(kind: str, group: tuple[int, ...], payloads: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Returns the curve through measured seconds, made monotone."""
    return Curve(kind, group, tuple(zip(payloads, np.exp(isotonic_regression(np.log(seconds)).x), strict=True)))


def predict_left_out(curve: Curve, payloads: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Seconds of each payload by the curve of all others; those of the first and the last by the curve itself."""
    found = []
    for i, payload in enumerate(payloads):
        used = curve
        if 0 < i < len(payloads) - 1:
            used = curve_of(curve.kind, curve.group, *([*x[:i], *x[i + 1 :]] for x in (payloads, seconds)))
        alpha, beta = used.tangent(payload)
        found.append(alpha + payload * beta)
    return found


def _dispatch(cluster: Cluster, samples: Sequence[Sample]) -> FittedFields:
    devices, seconds = [sample.sizes[0] for sample in samples], [sample.seconds for sample in samples]
    task, device = affine(devices, seconds)
    found = Dispatch(task, device)
    fit = Fit.from_samples(
        "dispatch", {"task": task, "device": device}, [found.seconds(count) for count in devices], seconds
    )
    return [fit], {"dispatch": found}


_FITTERS: dict[str, tuple[str, Callable[[Cluster, Sequence[Sample]], FittedFields]]] = {
    "elementwise": ("memory bandwidth", _memory),
    "kernel": ("the start of kernels", _kernels),
    "product": ("products in {dtypes}", _products),
    "sustained": ("sustained products", _sustained),
    "attention": ("attention", _attention),
    "collective": ("{count} kinds and groups of collectives", _collectives),
    "dispatch": ("the start of tasks", _dispatch),
}
"""Figure of samples -> the words for it, and the function that fits; later fits use the parameters of earlier ones."""


@dataclass(frozen=True)
class Calibration:
    """The results of measuring devices.

    Attributes:
      cluster: the devices, with the measured parameters.
      fits: the parameters and their errors.
      samples: the measurements.
      wanted: how many samples there would be with more time.
      seconds: how long it took.
      jax: the version of JAX.
      date: when, in ISO format.
    """

    cluster: Cluster
    fits: tuple[Fit, ...]
    samples: tuple[Sample, ...]
    wanted: int
    seconds: float
    jax: str
    date: str

    @classmethod
    def create(
        cls, cluster: Cluster, fits: tuple[Fit, ...], samples: tuple[Sample, ...], wanted: int, seconds: float
    ) -> Calibration:
        """Returns the calibration of this moment and this JAX."""
        import jax

        date = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
        source = f"measured on {date[:10]} with JAX {jax.__version__}; else: {cluster.source}"
        cluster = dataclasses.replace(cluster, source=source)
        return cls(cluster, fits, samples, wanted, seconds, jax.__version__, date)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and its folder if there is none. Raises OptionError if it cannot be written."""
        head = {"format": files.FORMAT, "version": files.VERSION, "device": self.cluster.device}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            json_codec.write_json(Path(path), {**head, **json_codec.encode_fields(self)})
        except OSError as error:
            raise OptionError(
                f"the calibration {str(path)!r} cannot be written: {error.strerror}; give another path"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file. Raises OptionError if it cannot be read, is damaged, or has another version."""
        names = [field.name for field in dataclasses.fields(cls)]
        return files.read(path, lambda data: json_codec.decode_fields(cls, {name: data[name] for name in names}))


def default_path(cluster: Cluster) -> Path:
    """Returns where `alpa-lite calibrate` writes without `--output`: in `$XDG_CACHE_HOME`, by default ~/.cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    device = re.sub(r"[^a-z0-9]+", "-", cluster.device.lower()).strip("-")
    return home / "alpa_lite" / f"calibration-{device}-{cluster.num_devices}.json"
