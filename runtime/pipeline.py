"""Runs a program: the lists of all submeshes, issued by one controller in an order that keeps each list's own.

Everything is dispatched without waiting: JAX starts a stage's executable when its inputs are there, so that stages run
side by side although one thread issues them. An instruction costs one call of a compiled executable or one of a
transfer; buffers are dropped, or donated, exactly where the program says.

A failure inside an executable names the stage, the micro-batch and the executable. An interrupt waits for what has been
dispatched, so that no device is left at work, and then goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.cluster import Cluster
from alpa_lite.errors import ExecutionError, PlanError
from alpa_lite.graph import Traced
from alpa_lite.passes import modules, segments, transfers
from alpa_lite.passes.local_program import spec_of
from alpa_lite.passes.pipelining import Pipeline
from alpa_lite.program import Free, Program, Run, Send, describe, order
from alpa_lite.runtime import placement
from alpa_lite.runtime.executor import NewSignature, mesh_of
from alpa_lite.runtime.transfer import Mover
from alpa_lite.timeline import Event, Timeline


class PipelineExecutable:
    """A pipelined step on devices that are here. Call it like the user's function."""

    def __init__(self, traced: Traced, pipeline: Pipeline, cluster: Cluster, devices: Sequence[Any] | None = None):
        """Prepares the executables; they are compiled by the first call, or by `hlo`.

        Args:
          traced: the step as the user wrote it.
          pipeline: of the same step.
          cluster: what transfers were planned for.
          devices: in the order of the cluster; by default `jax.devices()`.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        self._traced, self._pipeline, self._cluster = traced, pipeline, cluster
        self._program: Program = pipeline.program
        self._devices = list(jax.devices() if devices is None else devices)
        needed = max(submesh.devices.stop for submesh in self._program.submeshes)
        if len(self._devices) < needed:
            raise PlanError(f"the plan is for {needed} devices, but there are {len(self._devices)}")
        self._meshes = [
            mesh_of(s.mesh, self._devices[s.first : s.first + s.mesh.size]) for s in self._program.submeshes
        ]  # fmt: skip
        self._calling = traced.extra["calling"]
        self._match = self._calling.matches if self._calling.has_static else None
        self._compiled: list[Any] = []
        self._steps: list[tuple[int, Any, Sequence[int], Sequence[int], Sequence[int]]] = []
        self._kept: list[tuple[int, Any]] = []
        self._donated = self._donated_inputs()
        self._shardings: dict[Any, NamedSharding] = {}
        self._events: list[tuple[float, float, int, str]] | None = None

    # -- the user's side --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
          ExecutionError: an executable failed; names the stage and the micro-batch.
        """
        if self._match is not None:
            if not self._match(args, kwargs):
                raise NewSignature
            args, kwargs = self._calling.traced(args, kwargs)
        if not self._calling.modules:
            return self._traced.out_tree.unflatten(self._run((args, kwargs)))
        with modules.updating(self):
            pure = modules.split_arguments((args, kwargs), self)
            return modules.merge_results(self._traced.out_tree.unflatten(self._run(pure)), self)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments on the submeshes that read them first, in buffers of their own. As `Executable.place`."""
        if not self._calling.matches(args, kwargs):
            raise NewSignature

        def placed(leaves: list[Any]) -> list[Any]:
            self._check(leaves)
            out = list(leaves)
            for i, buffers in enumerate(self._program.inputs):
                if buffers:
                    (out[i],) = placement.copies([leaves[i]], [self._sharding(buffers[0])])
            return out

        new_args, new_kwargs = modules.replace_arrays(self._calling.traced(args, kwargs), placed)
        whole = dict(zip(self._calling.dynamic, new_args, strict=True)) | dict(self._calling.static_positions)
        positional = tuple(whole[i] for i in range(len(args)))
        return (positional, {**self._calling.static_keywords, **new_kwargs}) if kwargs else positional

    def hlo(self) -> tuple[str, ...]:
        """The optimised HLO text of each executable, in the program's order."""
        self.compile()
        return tuple(compiled.as_text() for compiled in self._compiled)

    def memory_analysis(self) -> tuple[Any, ...]:
        """The compiler's count of bytes per device of each executable; None where the backend gives none."""
        self.compile()
        return tuple(compiled.memory_analysis() for compiled in self._compiled)

    def trace(self, *args: Any, **kwargs: Any) -> Timeline:
        """Runs the step once, waiting for every task, and returns when each one ran. The result is dropped."""
        self.compile()
        self._events = []
        try:
            self(*args, **kwargs)
            events, self._events = self._events, None
        finally:
            self._events = None
        return self._timeline(events)

    # -- compiling --------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Compiles every executable and transfer, and writes the flat list of steps that a call walks."""
        if self._compiled:
            return
        program = self._program
        first_run = {item.executable: item for items in program.lists for item in items if isinstance(item, Run)}
        compiled = [self._compile(number, first_run[number]) for number in range(len(program.executables))]
        movers: dict[tuple[Any, ...], Mover] = {}
        steps: list[tuple[int, Any, Sequence[int], Sequence[int], Sequence[int]]] = []
        for mesh, position in order(program):
            item = program.lists[mesh][position]
            if isinstance(item, Run):
                dropped = program.consumed(item)
                steps.append((0, compiled[item.executable], item.inputs, item.outputs, dropped))
            elif isinstance(item, Send):
                transfer = program.transfers[item.transfer]
                plans = transfers.plans_of(program, item.transfer, self._cluster)
                if plans not in movers:
                    movers[plans] = Mover(plans, self._devices)
                steps.append((1, movers[plans], transfer.sent, transfer.received, ()))
            elif isinstance(item, Free):
                steps.append((2, None, (), (), item.buffers))
            else:
                continue  # a receive: the controller has issued the whole transfer where it was sent
        self._positions = [(m, p) for m, p in order(program) if isinstance(program.lists[m][p], Run | Send | Free)]
        self._kept = self._place_kept()
        self._steps, self._compiled = steps, compiled

    def _compile(self, number: int, run: Run) -> Any:
        program = self._program
        stage, position = self._pipeline.functions[number]
        parts = self._pipeline.stages[stage]
        segment = parts.items[position]
        mesh = self._meshes[program.executables[number].mesh]
        inner = segments.function_of(parts, segment, mesh)
        count = program.num_microbatches
        sizes = [count if wire.kind == "pieces" else 1 for wire in segment.inputs]

        def flat(*arrays: Any) -> Any:
            grouped, start = [], 0
            for wire, size in zip(segment.inputs, sizes, strict=True):
                grouped.append(arrays[start : start + size] if wire.kind == "pieces" else arrays[start])
                start += size
            return inner(*grouped)

        flat.__name__ = program.executables[number].name.replace(" ", "_")
        jitted = jax.jit(
            flat,
            in_shardings=tuple(self._sharding(b) for b in run.inputs),
            out_shardings=[self._sharding(b) for b in run.outputs],
            donate_argnums=program.executables[number].donated,
            keep_unused=True,
        )
        specs = [jax.ShapeDtypeStruct(program.buffers[b].shape, program.buffers[b].dtype) for b in run.inputs]
        return jitted.lower(*specs).compile()

    def _sharding(self, number: int) -> NamedSharding:
        item = self._program.buffers[number]
        key = item.mesh, item.layout
        if key not in self._shardings:
            self._shardings[key] = NamedSharding(self._meshes[item.mesh], spec_of(item.layout))
        return self._shardings[key]

    def _place_kept(self) -> list[tuple[int, Any]]:
        """Constants and micro-batch numbers, on their submeshes."""
        program, out = self._program, []
        for constant, buffers in zip(self._traced.graph.constants, program.constants, strict=False):
            for number in buffers:
                out.append((number, *placement.copies([constant], [self._sharding(number)])))
        for buffers in program.numbers:
            for i, number in enumerate(buffers):
                out.append((number, jax.device_put(np.int32(i), self._sharding(number))))
        return out

    # -- running ----------------------------------------------------------------------------------------------

    def _run(self, pure: Any) -> list[Any]:
        """The flat outputs."""
        leaves, tree = jax.tree_util.tree_flatten(pure)
        if tree != self._traced.in_tree:
            raise NewSignature
        self._check(leaves)
        self.compile()
        env: list[Any] = [None] * len(self._program.buffers)
        for number, array in self._kept:
            env[number] = array
        self._put(leaves, env)
        del leaves
        number = 0
        try:
            if self._events is None:
                for number, (kind, call, read, made, dropped) in enumerate(self._steps):  # noqa: B007
                    if kind == 0:
                        for i, array in zip(made, call(*[env[i] for i in read]), strict=True):
                            env[i] = array
                    elif kind == 1:
                        for i, array in zip(made, call([env[i] for i in read]), strict=True):
                            env[i] = array
                    for i in dropped:
                        env[i] = None
            else:
                self._run_timed(env, self._events)
        except KeyboardInterrupt:
            jax.block_until_ready([x for x in env if isinstance(x, jax.Array) and not x.is_deleted()])
            raise
        except Exception as error:
            raise self._failure(number, error) from error
        return [env[i] for i in self._program.outputs]

    def _run_timed(self, env: list[Any], events: list[tuple[float, float, int, str]]) -> None:
        """As the loop of `_run`, but waits for the outputs of each step and notes when it ran."""
        jax.block_until_ready([x for x in env if x is not None])
        begin = time.perf_counter()
        for number, (kind, call, read, made, dropped) in enumerate(self._steps):
            start = time.perf_counter()
            if kind < 2:
                arrays = [env[i] for i in read]
                results = call(*arrays) if kind == 0 else call(arrays)
                jax.block_until_ready(results)
                for i, array in zip(made, results, strict=True):
                    env[i] = array
                events.append((start - begin, time.perf_counter() - begin, number, ""))
            for i in dropped:
                env[i] = None

    def _timeline(self, events: Sequence[tuple[float, float, int, str]]) -> Timeline:
        program, out = self._program, []
        for start, end, number, _ in events:
            mesh, position = self._positions[number]
            item = program.lists[mesh][position]
            if isinstance(item, Run):
                executable = program.executables[item.executable]
                out.append(
                    Event(mesh, start, end, executable.name, executable.kind, executable.stage, item.microbatch)
                )  # fmt: skip
            elif isinstance(item, Send):
                transfer = program.transfers[item.transfer]
                out.append(Event(mesh, start, end, describe(program, item), "transfer", -1, transfer.microbatch))
        return Timeline(tuple(out), len(program.submeshes), "executed")

    def _put(self, leaves: Sequence[Any], env: list[Any]) -> None:
        """Places the arguments: those that are placed already stay, and what is donated is ours."""
        buffers, seen = self._program.buffers, set()
        donated: list[list[tuple[Any, int]]] = [[] for _ in self._meshes]  # one executable copies on one submesh
        for leaf, group in zip(leaves, self._program.inputs, strict=True):
            for number in group:
                if number in self._donated and id(leaf) not in seen:
                    seen.add(id(leaf))
                    donated[buffers[number].mesh].append((leaf, number))
                    continue
                sharding = self._sharding(number)
                if number in self._donated:  # a second leaf that shares the buffer of one before
                    (env[number],) = placement.copies([leaf], [sharding])
                else:
                    env[number] = leaf if placement.is_placed(leaf, sharding) else jax.device_put(leaf, sharding)
        for group in donated:
            ready = placement.settle([leaf for leaf, _ in group], [self._sharding(n) for _, n in group])
            for (_, number), array in zip(group, ready, strict=True):
                env[number] = array

    def _donated_inputs(self) -> frozenset[int]:
        """The argument buffers that some run consumes."""
        given = {b for group in self._program.inputs for b in group}
        return frozenset(
            b for items in self._program.lists for item in items if isinstance(item, Run)
            for b in self._program.consumed(item) if b in given
        )  # fmt: skip

    def _check(self, leaves: Sequence[Any]) -> None:
        values, block = self._traced.graph.values, self._traced.graph.block
        if len(leaves) != len(self._program.inputs):
            raise NewSignature
        for leaf, value in zip(leaves, block.inputs, strict=False):
            aval = values[value].aval
            try:
                have = jax.typeof(leaf)
            except TypeError:
                raise NewSignature from None
            if have.shape != aval.shape or have.dtype != aval.dtype:
                raise NewSignature

    def _failure(self, number: int, error: Exception) -> Exception:
        """The error with the stage and micro-batch in front."""
        mesh, position = self._positions[number]
        what = describe(self._program, self._program.lists[mesh][position])
        return ExecutionError(f"{what} (submesh {mesh}) failed: {error}")
