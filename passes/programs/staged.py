"""A step in planned stages, with the program that runs it: what every plan is made from.

One mesh is a pipeline of one stage: its program has one submesh, one executable, and one run, in which micro-batches
are a loop. Several stages have instruction lists written by a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.ir import schedules
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.program import Buffer, Program, Submesh, keep_owned_buffers, peak_bytes
from alpa_lite.ir.schedules import Schedule, Task
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs import simulation, transfers, writing
from alpa_lite.passes.programs.calls import Calls, mesh_of
from alpa_lite.passes.programs.crossings import crossing_bytes
from alpa_lite.passes.programs.writing import WrittenProgram
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.figures import Comparison
from alpa_lite.plan.records import Division


@dataclass(frozen=True, eq=False)
class Verdict:
    """Why these stages: what chose them, and what else there was.

    Attributes:
      model: what `seconds` and `bound` are of: "step", the integer program of the whole step, or "layers", sums over
        layers, by which stages are chosen.
      status: "optimal", "feasible" or "replayed".
      seconds, bound: of the choice in that model, and of the best that there can be.
      candidates: what was weighed.
      others: one mesh beside a pipeline, or a pipeline beside one mesh, where planning met both or says why not.
    """

    model: str
    status: str
    seconds: float
    bound: float
    candidates: tuple[Candidate, ...] = ()
    others: tuple[Comparison, ...] = ()


@dataclass(frozen=True, eq=False)
class Staged:
    """A step in planned stages.

    Attributes:
      loop: the step as it runs: a loop over micro-batches, cut where stages begin; `loop.scan` is -1 without a loop.
      written: the program, and the functions that its executables stand for.
      division: as in its plan; bytes include the blocks that transfers between processes need (`programs.crossings`).
    """

    loop: Accumulated
    stages: tuple[PlannedStage, ...]
    written: WrittenProgram
    division: Division
    verdict: Verdict

    @property
    def traced(self) -> Traced:
        """The step as it runs."""
        return self.loop.traced

    @property
    def program(self) -> Program:
        """The instruction lists."""
        return self.written.program

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.division.timeline.seconds

    @property
    def bytes(self) -> tuple[tuple[int, int], ...]:
        """Per device of each submesh, those of buffers at their peak, and of the largest temporaries."""
        return tuple(zip(self.division.buffer_bytes, self.division.temporary_bytes, strict=True))

    @property
    def needed_bytes(self) -> int:
        """Bytes per device of the fullest submesh."""
        return max(map(sum, self.bytes))


def stage_whole_step(loop: Accumulated, stage: PlannedStage, verdict: Verdict, remat: str = "none") -> Staged:
    """Returns one mesh: the whole step as one stage, run once."""
    loop = replace(loop, traced=stage.graph.traced)  # the folded step, if that is what was planned
    schedule = Schedule("none", 1, loop.num_microbatches, 1, ((Task("step", 0, -1),),))
    written = write(loop.traced, (stage,), (0,), schedule, stage.cluster)
    timeline, peak = simulation.simulate(written.program, cluster=stage.cluster), int(stage.mesh_solution.solution.peak)
    division = Division(1, 1, 1, (0,), (0,), (0,), (remat,), (peak,), (0,), timeline)
    return Staged(loop, (stage,), written, division, verdict)


def stage_pipeline(
    loop: Accumulated,
    stages: Sequence[PlannedStage],
    first_devices: Sequence[int],
    schedule: Schedule,
    cluster: Cluster,
    *,
    verdict: Verdict,
    **layers: Any,
) -> Staged:
    """Returns several stages: the instruction lists of a schedule, simulated; the state is donated.

    Args:
      first_devices: see `Division`.
      layers: the fields of `Division` about layers and stages.
    """
    written = write(loop.traced, stages, first_devices, schedule, cluster)
    buffers, temporaries = zip(*_bytes(written, stages, cluster), strict=True)
    division = Division(
        virtual=schedule.virtual,
        submeshes=written.mesh_of,
        first_devices=tuple(first_devices),
        buffer_bytes=buffers,
        temporary_bytes=temporaries,
        timeline=simulation.simulate(written.program, cluster=cluster),
        **layers,
    )
    return Staged(loop, tuple(stages), written, division, verdict)


def write(
    traced: Traced, stages: Sequence[PlannedStage], first_devices: Sequence[int], schedule: Schedule, cluster: Cluster
) -> WrittenProgram:
    """Returns the program of planned stages, ordered by their predicted seconds."""
    seconds = {segment: seconds for stage in stages for segment, seconds in stage.seconds.items()}

    def transfer(sent: Buffer, source: Submesh, destination: Submesh, layout: Layout) -> float:
        return transfers.price(sent.shape, sent.dtype, sent.layout, source, layout, destination, cluster)

    meshes = dict(zip(mesh_of(schedule), (stage.mesh_solution.mesh for stage in stages), strict=True))
    submeshes = [Submesh(meshes[m], first) for m, first in enumerate(first_devices)]
    calls = Calls([stage.segments for stage in stages], submeshes, schedule, seconds, transfer)
    return writing.build(traced, calls, donated=[argument for _, argument in traced.state])


def add_notes(staged: Staged, *notes: str) -> Staged:
    """Returns the same with notes in its plan."""
    return replace(staged, loop=replace(staged.loop, notes=(*staged.loop.notes, *notes)))


def donate_only(staged: Staged, arguments: Collection[int]) -> Staged:
    """Returns the step that consumes no arguments but these. One executable is told by the runtime, and stays as it is.

    Args:
      arguments: the numbers of flat arguments of the user's step that the caller gives away.
    """
    if staged.program.schedule == "none":
        return staged
    stacked = staged.traced.stacked
    if stacked is not None:
        arguments = {n for i in arguments for n in stacked.arguments[i].numbers}
    program = staged.program
    owned = {b for i, buffers in enumerate(program.inputs) if i not in arguments for b in buffers}
    spared = keep_owned_buffers(program, owned)
    before, after = peak_bytes(program), peak_bytes(spared)
    used = tuple(size + b - a for a, b, size in zip(before, after, staged.division.buffer_bytes, strict=True))
    division = replace(staged.division, buffer_bytes=used)
    return replace(staged, written=replace(staged.written, program=spared), division=division)


def estimated_bytes(stages: Sequence[PlannedStage], mesh_of: Sequence[int], schedule: Schedule) -> list[float]:
    """Estimates the bytes per device of each submesh that its stages need: as in `Staged.bytes`, without a program.

    Buffers that wait to be sent are left out. Where the backward pass is split, a micro-batch counts with the larger of
    the bytes that its backward task and its weight task read.
    """
    meshes, strategy = schedule.num_meshes, schedules.STRATEGIES[schedule.name]
    flying = [strategy.in_flight(meshes, schedule.num_microbatches, m, schedule.virtual) for m in range(meshes)]
    fixed, each, most = ([0.0] * meshes for _ in range(3))
    for mesh, stage in zip(mesh_of, stages, strict=True):
        fixed[mesh] += stage.held.fixed_bytes
        each[mesh] = max(each[mesh], stage.held.saved_bytes + stage.held.entering_bytes, stage.held.weight_bytes)
        most[mesh] = max([most[mesh], *stage.temporary_bytes.values()])
    return [a + n * b + c for a, n, b, c in zip(fixed, flying, each, most, strict=True)]


def _bytes(written: WrittenProgram, stages: Sequence[PlannedStage], cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """Returns bytes per device of buffers at their peak and of the largest temporaries, for each submesh.

    Blocks that transfers between processes keep count with the buffers, those that a send drops with the temporaries.
    """
    crossing = crossing_bytes(written.program, cluster)
    peaks = [peak + kept for peak, (kept, _) in zip(peak_bytes(written.program), crossing, strict=True)]
    most = [dropped for _, dropped in crossing]
    for stage, mesh in zip(stages, written.mesh_of, strict=True):
        most[mesh] = max([most[mesh], *stage.temporary_bytes.values()])
    return tuple(zip(peaks, most, strict=True))
