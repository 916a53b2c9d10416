"""The plan: what was decided, what it costs, and why. A value without devices that prints, saves, loads and compares.

A plan is three things at once:

  a decision   `Stage.decisions` says which mesh axes shard each factor of each operation; with the shardings of the
               arguments (`Stage.arguments`) and the `Division` that is all that replaying needs, without solving;
  a prediction `Plan.collectives`, `Stage.memory` and `Plan.step_seconds` say what the decision costs;
  a reason     `Decision.alternatives` and `Plan.candidates` hold the other choices and their costs.

Units are seconds per step, bytes per device, and FLOPs, unless an attribute says otherwise. A file holds the plan as
JSON with a schema version (`SCHEMA`), never as a pickle.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from alpa_lite.compilation import placing
from alpa_lite.errors import PlanError
from alpa_lite.ir import json_codec
from alpa_lite.plan.records import PlanRecord
from alpa_lite.report import console, diff, explain, html, operations, summary, timeline

SCHEMA = 7
"""The version of the plan file. Raised whenever a file of the old version could no longer be read."""


@dataclass(frozen=True, eq=False, repr=False)  # the record compares and hashes
class Plan(PlanRecord):
    """A plan as users have it; the fields are those of `records.PlanRecord`, which passes and reports work on."""

    _deferred: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """Fields that are not evaluated yet: what makes of each its value. Plans that have any have their own."""

    def __str__(self) -> str:
        """Returns a summary that fits a screen; `details` is everything."""
        return console.render_plain(summary.render_summary(self.with_baselines()))

    def __repr__(self) -> str:
        return summary.line(self)

    def details(self) -> str:
        """Everything: shardings, collectives, memory, what was compared, the solver, checks and notes."""
        return console.render_plain(summary.render_plan(self))

    def activations(self) -> str:
        """The activations that wait for the backward pass: place, operation, type, layout and bytes a line, in an
        order that does not depend on the program's, for `diff`."""
        return operations.activations(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one HTML file that loads nothing: the mesh and each tensor's tiles, memory, time by module
        and operation, the schedule of a pipeline, and tables of tensors, collectives and activations to search in."""
        Path(path).write_text(html.document(self.with_baselines()), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Returns the same, for notebooks."""
        return html.fragment(self.with_baselines())

    def with_baselines(self) -> Plan:
        """Returns the plan with the figures of data parallelism, FSDP and tensor parallelism on the same devices.

        They are evaluated when they are asked for, once, by the plan that the compiler made; that takes some seconds
        for a large model. A plan that was read from a file has the figures that it was saved with.
        """
        return self._evaluated("comparisons")

    def with_alternatives(self) -> Plan:
        """Returns the plan with the alternatives of each decision (`decisions.Decision.alternatives`).

        They are weighed when they are asked for, once, by the plan that the compiler made; that takes some seconds for
        a large model. A file has them: a plan that was read from one has those that it was saved with.
        """
        return self._evaluated("stages")

    def with_deferred(self, **fields: Callable[[Any], Any]) -> Plan:
        """The plan that evaluates these fields, each by a function of its present value, when it is asked for them."""
        out = dataclasses.replace(self)
        out.__dict__["_deferred"] = {**self._deferred, **fields}
        return out

    def _evaluated(self, field: str) -> Plan:
        """This plan, with a field that was deferred."""
        deferred, before = self._deferred, getattr(self, field)
        if field in deferred:
            rest = {name: evaluate for name, evaluate in deferred.items() if name != field}
            # A memo, which no plan compares; of several threads, each has found the same.
            self.__dict__.update({field: deferred[field](before), "_deferred": rest})
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_deferred"}

    def explain(self, path_or_operation: str) -> str:
        """Explains the sharding of the named argument or operation, and which changes would make another choice win.

        Args:
          path_or_operation: the path of an argument or its last keys, in either notation, with or without indices; or
            (part of) the name or source line of an operation. One match is explained and the others are listed;
            `alpa_lite.report.explain.explain` describes which.

        Raises:
          PlanError: if nothing has that name; the message holds close matches.
        """
        return explain.explain(self.with_alternatives(), path_or_operation)

    def diff(self, other: Plan) -> str:
        """Returns the differences of `other`: mesh, shardings, collectives, memory, times."""
        return diff.diff(self, other)

    def save_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted timeline of one step as trace events, which Perfetto opens.

        Raises:
          PlanError: the plan has no pipeline, so there is nothing to lay out in time.
        """
        if not self.is_pipelined:
            raise PlanError(
                "the plan has one mesh and no pipeline, so there are no tasks to simulate; plan with Pipeline()"
            )
        timeline.write(path, self.division.timeline)

    def shardings(self, tree: Any, devices: Sequence[Any] | None = None) -> Any:
        """Returns where the plan has the leaves of a pytree: the same pytree with a `NamedSharding` for each.

        A leaf is found by the end of its path, its shape and its dtype, so that `params`, a whole `TrainState`, an NNX
        module or its state, and what a checkpoint holds all do. A leaf that the plan does not have is replicated on the
        mesh of the first stage. For restores (Orbax), data loaders, and `jax.jit`.

        Args:
          tree: arrays or `jax.ShapeDtypeStruct`s.
          devices: in the order of the cluster; by default all that there are.

        Raises:
          PlanError: there are too few devices, or several leaves of the plan with different shardings match.
        """
        return placing.planned_shardings(self, tree, devices)

    def to_json(self) -> dict:
        """Returns the plan as JSON values, with the schema version and with alternatives, which are weighed for it."""
        return {
            "format": "alpa_lite.Plan",
            "schema": SCHEMA,
            "plan": json_codec.encode_fields(self.with_alternatives()),
        }

    @staticmethod
    def from_json(data: object, source: str = "the given data") -> Plan:
        """Returns the inverse of `to_json`.

        Raises:
          PlanError: if `data` is not a plan of this schema; `source` is named in the message.
        """
        if not isinstance(data, dict) or data.get("format") != "alpa_lite.Plan":
            raise PlanError(f"{source} is not an alpa_lite plan; write one with Plan.save(path).")
        found = data.get("schema")
        if found != SCHEMA:
            raise PlanError(
                f"{source} has plan schema version {found!r}, and this alpa_lite reads version {SCHEMA}; "
                "plan again, or use the alpa_lite that wrote it."
            )
        try:
            return json_codec.decode_fields(Plan, data.get("plan"))
        except json_codec.DecodeError as error:
            raise PlanError(f"{source} is a damaged plan: {error}; plan again.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON to `path`; an existing file is replaced only after the new one is complete."""
        json_codec.write_json(Path(path), self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
          PlanError: if the file cannot be read, is not a plan, or has another schema version.
        """
        source = f"plan file {os.fspath(path)!r}"
        try:
            data = json_codec.read_json(Path(path))
        except OSError as error:
            raise PlanError(f"{source} cannot be read: {error.strerror}; give a file that Plan.save wrote.") from error
        except json_codec.DecodeError as error:
            raise PlanError(f"{source} is not valid JSON ({error}); it may be cut short: plan again.") from error
        return Plan.from_json(data, source)
