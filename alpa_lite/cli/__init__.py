"""The command line: plan a model for a cluster, read and compare plans, and train on the devices of this machine.

    alpa-lite demo
    alpa-lite train gpt --size tiny --devices 8 --text a.txt b.txt --steps 200
    alpa-lite train gpt --devices 8 --stages 4 --microbatches 8 --schedule 1f1b --trace step.json
    alpa-lite plan gpt --size 2.6B --cluster p3.16xlarge --batch 64 -o plan.json
    alpa-lite plan my_package.train:step --args my_package.train:abstract_args --cluster h100 -o plan.json
    alpa-lite verify plan.json --target v5e:2x4
    alpa-lite show plan.json
    alpa-lite explain plan.json layers/3/ffn/up/kernel
    alpa-lite diff a.json b.json
    alpa-lite clusters
    alpa-lite calibrate --seconds 60 -o here.json
    alpa-lite launch -n 4 --devices-per-process 2 --platform cpu -- examples/pretrain.py --steps 100

Each command has one function, in the module of its kind. Those that use the devices here first set the number of
virtual CPU devices (`base.local_cluster`), which JAX reads once.
"""

from __future__ import annotations

import io
import sys
from importlib import metadata
from typing import Annotated

import typer

from alpa_lite.cli import base, machines, plans, trainings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _command, _settings in (
    (trainings.demo, {}),
    (trainings.train, {"allow_extra_args": True}),
    (plans.plan, {}),
    (plans.show, {}),
    (plans.verify, {}),
    (plans.explain, {}),
    (plans.diff, {}),
    (machines.clusters, {}),
    (machines.calibrate, {}),
    (machines.launch, {"allow_interspersed_args": False}),
):
    app.command(context_settings=_settings)(base.clean(_command))


def _version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        base.console().print(f"alpa-lite {metadata.version('alpa-lite')} (JAX {metadata.version('jax')})")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and that of JAX.")
    ] = False,
) -> None:
    """Plan how a JAX train step runs on many devices, read and compare such plans, and train with them."""


def main() -> None:
    """The `alpa-lite` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without block characters still gets the numbers
    app()
