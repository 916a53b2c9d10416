"""Tables that commands print: the clusters, a calibration, and the program of a target's compiler against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from rich.console import Group
from rich.text import Text

from alpa_lite.calibration.fitting import Calibration
from alpa_lite.cluster import Cluster
from alpa_lite.ir import units
from alpa_lite.report import console, grouping, prose
from alpa_lite.report.tables import Block, Column, Section, Table

_MAX_LINES = 20
_SHARE = partial(units.percent, whole=1.0)


def clusters() -> Group:
    """Returns every preset, with all its names."""
    rows = grouping.group_by_key(Cluster.preset_names(), Cluster.preset)
    columns = (
        Column("cluster", lambda row: ", ".join(row[1]), is_wide=True),
        Column("device", lambda row: row[0].device),
        Column("per node", lambda row: "x".join(map(str, row[0].topology)) or str(row[0].devices_per_node), str),
        Column("nodes", lambda row: row[0].nodes, str),
        Column("memory", lambda row: row[0].memory, units.nbytes),
        Column(
            "16-bit FLOP/s", lambda row: max(map(row[0].peak, ("bfloat16", "float16"))), lambda x: f"{x / 1e12:.3g} T"
        ),
        Column("memory GB/s", lambda row: row[0].memory_bandwidth, _gigabytes),
        Column("link GB/s", lambda row: row[0].node_link.bandwidth, _gigabytes),
    )
    return console.render([Table.from_items(columns, rows.items())])


def _gigabytes(value: float) -> str:
    """Whole gigabytes a second."""
    return f"{value / 1e9:,.0f}"


def calibration(found: Calibration) -> Group:
    """Returns the parameters and the errors of each fit."""
    machine = found.cluster
    head = Text(f"{machine.num_devices} {machine.device} calibrated", style="bold")
    head.append(
        f" in {units.seconds(found.seconds)} (JAX {found.jax}): {len(found.samples)} of {found.wanted} measurements",
        style="not bold",
    )
    columns = (
        Column("figure", attrgetter("name")),
        Column("found", lambda fit: prose.sentence("fit", fit.parameters)),
        Column("samples", attrgetter("count"), str),
        Column("median error", attrgetter("error"), _SHARE),
        Column("worst error", attrgetter("worst"), _SHARE),
    )
    return console.render([head, Section("fits", "Fits", (Table.from_items(columns, found.fits),))])


def verification(found: Mapping[str, Any]) -> Group:
    """Returns the result of `verifying.verify`: collectives and memory of the compiled program."""
    head = Text(f"{found['step']} compiled for {found['devices']} x {found['device']}", style="bold")
    seconds = found["seconds"]["compiling"]
    head.append(
        f" ({found['target']}, {found['compiler']}, JAX {found['jax']}) in {units.seconds(seconds)}", style="not bold"
    )
    worst = max(found["memory"], key=lambda row: row["compiler"], default=None)
    parts: dict[str, Sequence[Block]] = {
        "Collectives of one run of each executable": [_collectives(found["collectives"])],
        "Compiler rewrites": units.first(found["rewrites"], _MAX_LINES),
        "Differences": units.first(found["differences"], _MAX_LINES),
        "Memory per device": [_memory(found["memory"])] if found["memory"] else [],
        "Verdict": prose.lines("compiled_as_planned", found, worst),
    }
    return console.render([head, *(Section("", heading, tuple(body)) for heading, body in parts.items() if body)])


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Block:
    """Returns the collectives that are planned, and those that the compiled program has."""
    if not rows:
        return "none planned, and none to compare with"
    columns = (
        Column("collective", itemgetter("kind")),
        Column("axes", itemgetter("axes")),
        Column("payload", itemgetter("bytes"), units.nbytes),
        Column("planned", itemgetter("planned"), str),
        Column("found", itemgetter("found"), str),
    )
    return Table.from_items(columns, rows)


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the predicted bytes of each executable, and those that the compiler reports."""

    def ratio(row: Mapping[str, Any]) -> str:
        """Of the prediction to the bytes that the compiler needs."""
        return f"{row['predicted'] / row['compiler']:.2f}" if row["compiler"] else "-"

    names = "predicted", "compiler", "arguments", "temporaries", "code"
    sizes = [Column(name, itemgetter(name), units.nbytes) for name in names]
    executable = Column("executable", itemgetter("executable"))
    return Table.from_items((executable, *sizes[:2], Column("ratio", ratio, str), *sizes[2:]), rows)
