"""Commands about devices: `clusters`, `calibrate`, `launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alpa_lite.calibration import fitting, measuring
from alpa_lite.cli import base, options, tables
from alpa_lite.cluster import CALIBRATION
from alpa_lite.processes import local_launch
from alpa_lite.report import progress


def clusters() -> None:
    """List the clusters that `alpa-lite plan --cluster` accepts."""
    base.console().print(tables.clusters())


def calibrate(
    devices: options.Devices = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="About how long it may take; what there is no time for is not measured.")
    ] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write what was found to this file.",
            show_default="~/.cache/alpa_lite/calibration-DEVICE-NUMBER.json",
        ),
    ] = None,
) -> None:
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
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT ARGS...", help="A Python file, -m and a module, or a program, with arguments."),
    ],
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="Number of processes.")] = 2,
    devices_per_process: Annotated[
        int, typer.Option(min=1, help="Virtual CPU devices of each process, or its share of the accelerators.")
    ] = 1,
    platform: Annotated[
        str | None, typer.Option(help="The platform that JAX shall use, such as cpu.", show_default="what JAX finds")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the coordinator.", show_default="a free one")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds to end in, after a signal or the failure of another process.")
    ] = 10.0,
) -> None:
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
