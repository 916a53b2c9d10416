"""Commands about devices: `clusters`, `calibrate`, `launch`."""

from __future__ import annotations

from pathlib import Path

import typer

from alpa_lite.calibration import fitting, measuring
from alpa_lite.cli import base, tables
from alpa_lite.cluster import CALIBRATION
from alpa_lite.processes import local_launch
from alpa_lite.report import progress


def clusters() -> None:
    """List the clusters that `alpa-lite plan --cluster` accepts."""
    base.console().print(tables.clusters())


def calibrate(devices: int | None = None, seconds: float = 60.0, output: Path | None = None) -> None:
    """Measure the devices of this machine: products, memory, collectives, the start of tasks; fit the cost model.

    Plans use the file by ALPA_LITE_CALIBRATION=FILE, by Cluster.load(FILE), or by cluster=FILE. Nothing else
    should run meanwhile.
    """
    count = base.local_cluster(devices, calibration=None).num_devices
    with progress.show_progress("calibrating") as report:
        found = measuring.calibrate(devices=count, seconds=seconds, progress=report.count)
    console = base.console()
    console.print(tables.calibration(found))
    path = fitting.default_path(found.cluster) if output is None else output
    found.save(path)
    console.print(f"\nsaved to {path}: set {CALIBRATION} to it, or give cluster={str(path)!r}", soft_wrap=True)


def launch(
    script: list[str], processes: int = 2, devices_per_process: int = 1, platform: str | None = None,
    port: int | None = None, grace: float = 10.0,
) -> None:  # fmt: skip
    """Run a script in several processes on this machine, for development; a cluster's scheduler does it elsewhere.

    The script calls jax.distributed.initialize() or alpa_lite.initialize(), which find the other processes. Each line
    of output has the number of its process in front. If one process fails, the others are ended.
    """
    raise typer.Exit(
        local_launch.launch(
            script, echo=typer.echo, processes=processes, devices_per_process=devices_per_process, platform=platform,
            port=port, grace=grace,
        )
    )  # fmt: skip
