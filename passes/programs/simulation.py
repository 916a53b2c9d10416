"""When everything of a program happens, by its predicted seconds: the instruction lists walked with a clock for each.

A run takes its executable's seconds on its submesh. A send starts a transfer and takes no time of the submesh; the
transfer takes its seconds on the link from source to destination, after the transfers that were sent there before. A
receive waits until its transfer has arrived. A free takes no time. These are the lists that the executor walks.

Processes dispatch what their devices do, one task after the other, in the order of the executor. A run or a transfer
starts no sooner than it has been dispatched, so that n tasks of one process take n - 1 dispatches at least. The clock
starts when the first task of each process has been dispatched: every step pays that, the one run of one mesh, too, and
a training loop that does not wait for results dispatches it while the step before computes.
"""

from __future__ import annotations

from collections import Counter

from alpa_lite.cluster import Cluster
from alpa_lite.ir.program import Executable, Free, Program, Receive, Run, Send, Transfer
from alpa_lite.ir.timeline import Event, Timeline


def simulate(program: Program, *, cluster: Cluster | None = None) -> Timeline:
    """Returns the timeline of one step. Takes time linear in the number of instructions.

    Args:
      cluster: whose processes dispatch; None where dispatching takes no time.

    Raises:
      PlanError: the lists wait for each other.
    """
    makers = producers(program)
    clocks, hosts = Clocks(len(program.lists)), DispatchClocks(program, cluster)
    arrivals: dict[int, float] = {}
    events: list[Event] = []
    for mesh, position in program.order:
        match program.lists[mesh][position]:
            case Run() as run:
                times = clocks.run(mesh, program.executables[run.executable].seconds, hosts.dispatch(mesh))
                events.append(run_event(program, run, *times))
            case Send(transfer=number):
                transfer = program.transfers[number]
                dispatched = hosts.dispatch(transfer.source, transfer.destination)
                start, arrivals[number] = clocks.transfer(transfer, max(clocks.meshes[mesh], dispatched))
                if transfer.seconds:
                    events.append(transfer_event(program, number, makers, start, arrivals[number]))
            case Receive(transfer=number):
                clocks.meshes[mesh] = max(clocks.meshes[mesh], arrivals[number])
            case Free():
                pass
    return Timeline(tuple(events), len(program.submeshes), "predicted")


class Clocks:
    """When submeshes and the links between them are free.

    Attributes:
      meshes: seconds, of each submesh.
    """

    def __init__(self, num_meshes: int) -> None:
        """All are free at zero."""
        self.meshes = [0.0] * num_meshes
        self._links: dict[tuple[int, int], float] = {}

    def run(self, mesh: int, seconds: float, earliest: float) -> tuple[float, float]:
        """Occupies a submesh; returns start and end."""
        start = max(self.meshes[mesh], earliest)
        self.meshes[mesh] = start + seconds
        return start, self.meshes[mesh]

    def transfer(self, transfer: Transfer, earliest: float) -> tuple[float, float]:
        """Occupies the link of a transfer; returns start and end."""
        link = transfer.source, transfer.destination
        start = max(earliest, self._links.get(link, 0.0))
        self._links[link] = start + transfer.seconds
        return start, self._links[link]


class DispatchClocks:
    """The clocks of the processes that dispatch a program."""

    def __init__(self, program: Program, cluster: Cluster | None) -> None:
        """Nothing is dispatched yet."""
        self._program, self._cluster = program, cluster
        self._clocks: dict[int, float] = {}
        self._costs: dict[tuple[int, ...], dict[int, float]] = {}  # submeshes -> process -> seconds

    def dispatch(self, *meshes: int) -> float:
        """Dispatches a task of some submeshes; returns when it is done, in seconds from the start of the step."""
        if self._cluster is None:
            return 0.0
        if meshes not in self._costs:
            # Of a transfer, the devices of the larger end count.
            counts: Counter[int] = Counter()
            for mesh in meshes:
                counts |= Counter(map(self._cluster.controller, self._program.submeshes[mesh].devices))
            self._costs[meshes] = {process: self._cluster.dispatch.seconds(n) for process, n in counts.items()}
        done = 0.0
        for process, seconds in self._costs[meshes].items():
            self._clocks[process] = self._clocks[process] + seconds if process in self._clocks else 0.0
            done = max(done, self._clocks[process])
        return done


def producers(program: Program) -> dict[int, Executable]:
    """Returns the executable of each buffer that a run defines."""
    return {
        buffer: program.executables[item.executable]
        for items in program.lists
        for item in items
        if isinstance(item, Run)
        for buffer in item.outputs
    }


def run_event(program: Program, run: Run, start: float, end: float) -> Event:
    """Returns the event of a run, with one name if predicted or measured. Times are seconds from the step's start."""
    executable = program.executables[run.executable]
    number = f"{run.microbatch}" if executable.slice < 0 else f"{run.microbatch}.{executable.slice}"
    name = f"{executable.kind} {number}" if run.microbatch >= 0 else executable.name
    return Event(executable.mesh, start, end, name, executable.kind, executable.stage, run.microbatch)


def transfer_event(program: Program, number: int, makers: dict[int, Executable], start: float, end: float) -> Event:
    """Returns the event of a transfer, named after the task of its first buffer; `makers` is `producers(program)`."""
    transfer = program.transfers[number]
    maker = makers.get(transfer.sent_buffers[0]) if transfer.sent_buffers else None
    part = f" {transfer.microbatch}" if transfer.microbatch >= 0 else ""
    return Event(
        mesh=transfer.source,
        start=start,
        end=end,
        name=f"{maker.kind}{part}" if maker else f"arguments{part}",
        kind="transfer",
        stage=maker.stage if maker else -1,
        microbatch=transfer.microbatch,
        destination=transfer.destination,
        bytes=sum(program.buffers[buffer].bytes for buffer in transfer.sent_buffers),
    )
