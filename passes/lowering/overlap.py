"""Communication that overlaps with computing: the seconds of one run of some instructions on two streams.

Compilers for GPUs and TPUs start a collective and go on computing until its result is needed (XLA's latency hiding
scheduler). Communication can hide if computing does not wait for it at once: the *synchronisation of gradients*, which
only the update reads (Li et al. 2020, "PyTorch Distributed", section 3.2.3), and *gathers of parameters*, whose
operands are there from the start (Zhao et al. 2023, "PyTorch FSDP", section 3.3). The model is a list of instructions
on two streams, one that computes and one that sends, each of which does one thing at a time and in order:

    computing     starts when the stream is free and the operands are there; the update comes last
    reductions    gradients are joined as they are made, until a bucket has `BUCKET` bytes or is needed; it starts when
                  its last gradient is there and the links are free, and takes one latency and the bytes of all
    gathers       start when the links are free and the gather before has been started: one gather ahead
    the rest      waits for both streams, and both wait for it: reductions of activations, exchanges, resharding

    hidden = seconds one after another - seconds on two streams, at least 0

Nothing crosses the iterations of a loop, or the beginning and the end of a task of a pipeline. A loop that communicates
itself waits for both streams. Which kinds of collectives a compiler runs so is a fact of its platform
(`presets.toml`): those for GPUs all of these, that for TPUs gathers, that for CPUs none.

Errors. Sending takes memory bandwidth and a few cores from computing, which is not counted. A gather ahead of its use
holds one more gathered tensor than without overlap; the plan states its size, and its memory does not count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpa_lite.passes.ir.loops import body_runs
from alpa_lite.passes.lowering.prices import FREE, Prices
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, Reshard
from alpa_lite.passes.sharding.kinds import OverlapCandidates
from alpa_lite.passes.sharding.space import block_count

BUCKET = 30 * 2**20
"""Bytes of sums per device from which on they are sent: from which on XLA joins no further collectives on GPUs."""


@dataclass(frozen=True)
class Overlap:
    """The communication that hides in one run of some instructions.

    Attributes:
      hidden_seconds: seconds of communication that take no time of their own.
      hideable_seconds: seconds of the gradient synchronisation and the parameter gathers.
      prefetched_bytes: bytes per device of the largest tensor that is gathered ahead of its use.
    """

    hidden_seconds: float = 0.0
    hideable_seconds: float = 0.0
    prefetched_bytes: int = 0

    def times(self, count: int) -> Overlap:
        """That of this many runs."""
        return Overlap(self.hidden_seconds * count, self.hideable_seconds * count, self.prefetched_bytes)

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(
            self.hidden_seconds + other.hidden_seconds,
            self.hideable_seconds + other.hideable_seconds,
            max(self.prefetched_bytes, other.prefetched_bytes),
        )


class OverlapSearch:
    """A search for the communication that can hide in the instructions of a step."""

    def __init__(self, prices: Prices) -> None:
        self._prices, self._hiding = prices, OverlapCandidates(prices.traced, prices.cost.cluster.hidden_kinds)

    def find_overlap(self, items: Sequence[Instruction]) -> Overlap:
        """Returns the communication that hides in one run of some instructions."""
        streams, prices = _Streams(), self._prices
        serial, inner = 0.0, Overlap()
        for item in self._issued(items):
            at = streams.wait_for(item.reads)
            computing, sent = self._computing((item,)), self._sending((item,))
            if isinstance(item, Loop):
                runs = body_runs(item.op)
                inner = sum([self.find_overlap(body.instructions).times(runs) for body in item.bodies], inner)
                sent = runs * sum(self._sending(body.instructions) for body in item.bodies)
            serial += computing + sent
            kind = self._hidden_kind(item)
            if kind is None or not isinstance(item, Reshard):
                streams.run(item, at, computing + sent, "computing", *(("links",) if sent else ()))
                continue
            value, layout = prices.traced.graph.values[item.value], item.steps[-1].target
            size = value.nbytes // block_count(layout, prices.program.mesh)
            inner += Overlap(hideable_seconds=sent, prefetched_bytes=size if kind == "gather" else 0)
            if kind == "gather":
                streams.run(item, at, sent, "links")
                continue
            links = list(prices.links((item,)))
            latency = sum(prices.cost.coefficients(c.kind, c.axes, c.bytes)[0] for (c, *_), *_ in links)
            streams.join(item, at, latency, sum(moving for *_, moving in links), size)
        return inner + Overlap(hidden_seconds=max(0.0, serial - streams.end()))

    def _issued(self, items: Sequence[Instruction]) -> list[Instruction]:
        """Returns the instructions in the order in which they start: those that can hide as early as they may.

        The update, which depends on sums of gradients, comes after everything else.
        """
        written = {register: i for i, item in enumerate(items) for register in item.results}
        keys, before = [], -1
        updates: set[int] = set()
        for i, item in enumerate(items):
            update = not updates.isdisjoint(item.reads)
            key = (len(items) if update else i, 0, i)
            kind = self._hidden_kind(item)
            source = written.get(item.reads[0], -1) if kind is not None else -1
            if kind == "gradient":
                key = (len(items), 0, i) if update else (source, 1, i)
                update = True
            elif kind == "gather" and not update:
                key, before = (max(before, source), 1, i), i
            if update:
                updates.update(item.results)
            keys.append(key)
        return [items[i] for *_, i in sorted(keys)]

    def _hidden_kind(self, item: Instruction) -> str | None:
        """Returns the kind of communication of an instruction that can hide: a gradient's sum, or a parameter's gather.

        A gradient is a result of a reverse pass that only the update of the state reads.
        """
        hides = self._prices.cost.cluster.hidden_kinds
        if not isinstance(item, Reshard) or not {step.kind for step in item.steps} - {"slice"} <= hides:
            return None
        if not self._sending((item,)):
            return None
        if self._hiding.is_gradient(item.value):
            return "gradient"
        return "gather" if self._hiding.is_weight(item.value) else None

    # -- seconds of one run -------------------------------------------------------------------------------------------

    def _computing(self, items: Sequence[Instruction]) -> float:
        total = 0.0
        for item in items:
            match item:
                case Compute(op=op):
                    price = self._prices.operations.get(op.index, FREE)
                    total += price.seconds / max(1, price.runs)
                case Loop(op=op, bodies=bodies):
                    total += body_runs(op) * sum(self._computing(body.instructions) for body in bodies)
        return total

    def _sending(self, items: Sequence[Instruction]) -> float:
        return sum(seconds for _, seconds in self._prices.collectives(items))


@dataclass
class _Bucket:
    """Gradients that are sent together."""

    latency: float
    ready_seconds: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    results: list[int] = field(default_factory=list)


class _Streams:
    """The clocks of the two streams, and when each register is there."""

    def __init__(self) -> None:
        self._clock = {"computing": 0.0, "links": 0.0}
        self._ready: dict[int, float] = {}
        self._open: dict[tuple[tuple[str, ...], float], _Bucket] = {}

    def wait_for(self, registers: Sequence[int]) -> float:
        """Returns the seconds at which some registers are there; sends gradients among them that wait for others."""
        if any(register in bucket.results for bucket in self._open.values() for register in registers):
            self._flush()
        return max((self._ready.get(register, 0.0) for register in registers), default=0.0)

    def run(self, item: Instruction, at: float, seconds: float, *streams: str) -> None:
        """Runs an instruction that some streams wait for, and that waits for these."""
        end = max(at, *(self._clock[stream] for stream in streams)) + seconds
        self._clock.update(dict.fromkeys(streams, end))
        self._ready.update(dict.fromkeys(item.results, end))

    def join(self, item: Reshard, at: float, latency: float, seconds: float, size: int) -> None:
        """Puts a gradient into the bucket of its kind, and sends that if it is full."""
        kinds = tuple(step.kind for step in item.steps)
        bucket = self._open.setdefault((kinds, latency), _Bucket(latency))
        bucket.ready_seconds, bucket.seconds = max(bucket.ready_seconds, at), bucket.seconds + seconds
        bucket.bytes += size
        bucket.results.append(item.result)
        if bucket.bytes >= BUCKET:
            self._flush()

    def end(self) -> float:
        """Returns the seconds at which everything is done."""
        self._flush()
        return max(self._clock.values())

    def _flush(self) -> None:
        for bucket in self._open.values():
            self._clock["links"] = max(self._clock["links"], bucket.ready_seconds) + bucket.latency + bucket.seconds
            self._ready.update(dict.fromkeys(bucket.results, self._clock["links"]))
        self._open = {}
