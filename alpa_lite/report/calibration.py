"""The result of a calibration as text: for each fit its parameters and its errors (`alpa-lite calibrate`)."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from rich.console import Group
from rich.text import Text

from alpa_lite.calibration.fitting import Fit
from alpa_lite.calibration.storing import Calibration
from alpa_lite.report import console, units
from alpa_lite.report.tables import Column, Section, Table

_SHARE = partial(units.percent, whole=1.0)


def renderable(found: Calibration) -> Group:
    """The calibration as a Rich renderable."""
    machine = found.cluster
    head = Text(f"{machine.num_devices} {machine.device} calibrated", style="bold")
    head.append(
        f" in {units.seconds(found.seconds)} (JAX {found.jax}): {len(found.samples)} of {found.wanted} measurements",
        style="not bold",
    )
    columns = (
        Column("figure", attrgetter("name")),
        Column("found", _parameters),
        Column("samples", attrgetter("count"), str),
        Column("median error", attrgetter("error"), _SHARE),
        Column("worst error", attrgetter("worst"), _SHARE),
    )
    return console.render([head, Section("fits", "Fits", (Table.of(columns, found.fits),))])


def _parameters(fit: Fit) -> str:
    """The parameters of a fit in words."""
    values = fit.parameters
    if "first" in values:
        return f"{units.seconds(values['first'])} for little, {values['bytes/s'] / 1e9:.3g} GB/s for much"
    if "start" in values:
        return f"{units.seconds(values['start'])} a kernel"
    if "share" in values:
        return f"{100 * values['share']:.0f} % of the rate by themselves"
    if "forward" in values or "backward" in values:
        return ", ".join(f"{name} {100 * share:.0f} % of the peak" for name, share in values.items())
    if "bytes/s" in values:
        return f"{values['bytes/s'] / 1e9:.3g} GB/s"
    if "FLOP/s" in values:
        return f"{values['FLOP/s'] / 1e9:,.0f} GFLOP/s, tile {values['tile']:.0f}"
    return f"{units.seconds(values['task'])} a task + {units.seconds(values['device'])} a device"
