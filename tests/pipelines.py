"""Programs made from schedules, with toy buffers: what the tests of programs, simulation and timelines run on."""

from collections.abc import Sequence

import numpy as np

from alpa_lite.ir import program, schedules
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.schedules import Schedule, Task
from tests import scheduling

FLOAT = np.dtype("float32")


class Toy:
    """Builds the program of a schedule. What a stage saves of a micro-batch takes a byte; nothing else takes any.

    Each stage has a parameter (an input of the step, replaced by its update) and a sum of gradients (made by its
    prologue). What goes to another submesh is sent at once and freed, and received just before it is needed.
    """

    def __init__(self, schedule: Schedule, seconds: dict[str, float], transfer: float) -> None:
        self.schedule, self.seconds, self.transfer = schedule, seconds, transfer
        self.buffers: list[program.Buffer] = []
        self.executables: list[program.Executable] = []
        self.transfers: list[program.Transfer] = []
        self.lists: list[list[program.Instruction]] = [[] for _ in range(schedule.num_meshes)]
        self.values: dict[tuple[str, int, int], int] = {}

    def build(self) -> program.Program:
        schedule, stages = self.schedule, range(self.schedule.num_stages)
        inputs = [self.define("parameter", stage) for stage in stages]
        for stage in stages:
            self.run("prologue", stage, -1, [], [], ["sum"])
        for _, task in scheduling.walk(schedule):
            self.task(task)
        for stage in stages:
            self.run("update", stage, -1, [], ["parameter", "sum"], ["parameter"])
        return program.Program(
            submeshes=tuple(program.Submesh(LogicalMesh((1,), ("data",)), m) for m in range(schedule.num_meshes)),
            executables=tuple(self.executables),
            buffers=tuple(self.buffers),
            transfers=tuple(self.transfers),
            lists=tuple(map(tuple, self.lists)),
            inputs=tuple((number,) for number in inputs),
            constants=(),
            outputs=tuple(self.values["parameter", stage, -1] for stage in stages),
            schedule=schedule.name,
            num_microbatches=schedule.num_microbatches,
        )

    def task(self, task: Task) -> None:
        stage, m, last = task.stage, task.microbatch, self.schedule.num_stages - 1
        if task.kind == "forward":
            taken = ["value"] if stage else []
            self.run("forward", stage, m, ["parameter"], taken, ["saved"] + ["value to"] * (stage < last))
            if stage < last:
                self.move("value", stage, stage + 1, m)
        elif task.kind == "backward":
            taken = ["saved"] + ["gradient"] * (stage < last)
            rest = ["kept"] if self.schedule.splits_backward else ["sum"]
            taken += [] if self.schedule.splits_backward else ["sum"]
            self.run("backward", stage, m, ["parameter"], taken, rest + ["gradient to"] * (stage > 0))
            if stage:
                self.move("gradient", stage, stage - 1, m)
        else:
            self.run("weight", stage, m, [], ["kept", "sum"], ["sum"])

    def run(self, kind: program.Kind, stage: int, m: int, read: list[str], taken: list[str], made: list[str]) -> None:
        mesh = self.schedule.mesh(stage)
        for name in ("value", "gradient"):
            number = self.values.pop((f"{name} transfer", stage, m), None) if name in taken else None
            if number is not None:
                self.lists[mesh].append(program.Receive(number))
        donated = tuple(range(len(read), len(read) + len(taken)))
        self.executables.append(
            program.Executable(f"stage {stage} {kind}", mesh, stage, kind, donated, self.seconds.get(kind, 0.0))
        )
        inputs = tuple(self.value(name, stage, m) for name in read + taken)
        outputs = tuple(self.define(name, stage, m) for name in made)
        self.lists[mesh].append(program.Run(len(self.executables) - 1, m, inputs, outputs))

    def move(self, name: str, stage: int, target: int, m: int) -> None:
        source, destination = self.schedule.mesh(stage), self.schedule.mesh(target)
        sent = self.values.pop((f"{name} to", stage, m))
        if source == destination:
            self.values[name, target, m] = sent
            return
        number = len(self.transfers)
        received = self.define(name, target, m)
        self.transfers.append(program.Transfer(source, destination, (sent,), (received,), self.transfer, m))
        self.values[f"{name} transfer", target, m] = number
        self.lists[source] += (program.Send(number), program.Free((sent,)))

    def define(self, name: str, stage: int, m: int = -1) -> int:
        m = -1 if name in ("parameter", "sum") else m
        size = 1 if name in ("saved", "kept") else 0
        layout = Layout(((),))
        self.buffers.append(
            program.Buffer(self.schedule.mesh(stage), layout, (4,), FLOAT, size, m, f"{name} of stage {stage}")
        )
        self.values[name, stage, m] = len(self.buffers) - 1
        return len(self.buffers) - 1

    def value(self, name: str, stage: int, m: int) -> int:
        return self.values[name, stage, -1 if name in ("parameter", "sum") else m]


def toy(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    prologue: float = 0.0,
    update: float = 0.0,
    transfer: float = 0.0,
) -> program.Program:
    """The program of a schedule; durations as in `scheduling.simulate`."""
    whole = backward if schedule.splits_backward else backward + weight
    seconds = {"forward": forward, "backward": whole, "weight": weight, "prologue": prologue, "update": update}
    return Toy(schedule, seconds, transfer).build()


def every(meshes: Sequence[int] = (1, 2, 3, 4), microbatches: Sequence[int] = (1, 2, 5, 12)) -> list[Schedule]:
    """Schedules of every name and several sizes."""
    return [
        schedules.schedule(name, s, b, virtual=v)
        for name in schedules.NAMES
        for v in ((1, 2, 3) if name == "interleaved-1f1b" else (1,))
        for s in meshes
        for b in microbatches
        if name != "interleaved-1f1b" or b % s == 0
    ]
