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

Each command has one function here; the training loop is in `alpa_lite.training`. JAX is imported only by commands that
need it, and only after the number of virtual CPU devices is set, which JAX reads at its first use at the latest.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alpa_lite import command_values as values
from alpa_lite.errors import AlpaLiteError, OptionError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan how a JAX train step runs on many devices, read and compare such plans, and train with them.",
)

Command = TypeVar("Command", bound=Callable[..., None])

PlanFile = Annotated[
    Path, typer.Argument(help="A plan file, written by `alpa-lite plan -o` or Plan.save.", show_default=False)
]
Model = Annotated[
    str, typer.Argument(help="The model: gpt, mlp, ...; an unknown name lists all of them.", show_default=False)
]
Size = Annotated[str, typer.Option(help="The size of the model; an unknown one lists all of them.")]
Batch = Annotated[int, typer.Option(min=1, help="Number of examples in the batch of one step.")]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of devices to use; without an accelerator, virtual CPU devices (8).", show_default=False
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        help="auto, sharded, pipeline, data, zero1, zero2, zero3, tensor or off; sharded:4x2 fixes the mesh shape."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(min=1, help="Use a pipeline on this number of submeshes.", show_default="the method's choice"),
]
Microbatches = Annotated[
    int | None,
    typer.Option(min=1, help="Number of parts of the batch, computed one after another.", show_default="chosen"),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help="Use a pipeline with this schedule: gpipe, 1f1b, eager-1f1b, interleaved-1f1b or zb-h1.",
        show_default="chosen",
    ),
]
Simulate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the predicted timeline of one pipelined step, for Perfetto."),
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the executed and the predicted timeline of one pipelined step."),
]
Memory = Annotated[
    float | None,
    typer.Option(min=0.0, help="Memory per device that the plan may use, in GiB.", show_default="the device's"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set an attribute of the model, such as seq=2048; may be repeated."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the parameters and of the batches.")]
Arguments = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:NAME",
        help="The positional arguments of a step of your own: a tuple of arrays or jax.ShapeDtypeStructs, or a "
        "function that returns one.",
        show_default=False,
    ),
]
Keywords = Annotated[
    str | None,
    typer.Option("--kwargs", metavar="MODULE:NAME", help="Likewise its keyword arguments.", show_default=False),
]


def _version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        from importlib import metadata

        _console().print(f"alpa-lite {metadata.version('alpa-lite')} (JAX {metadata.version('jax')})")
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


def _clean(command: Command) -> Command:
    """Prints errors that the user can mend as one red message, with exit code 2; other errors keep their traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AlpaLiteError as error:
            Console(stderr=True, highlight=False).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def _console() -> Console:
    """Standard output: as wide as the terminal; without a terminal, as wide as a plan."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=100)


@app.command()
@_clean
def demo(
    devices: Devices = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Number of training steps on one mesh; the pipeline takes half as many.")
    ] = 120,
    stages: Stages = 2,
    microbatches: Microbatches = 8,
    schedule: ScheduleName = None,
    trace: Trace = None,
) -> None:
    """Train a tiny GPT on the sources of Python's standard library, first as planned by `auto`, then as a pipeline.

    Without an accelerator it runs on 8 virtual CPU devices. The pipeline continues from the state of the first plan.
    """
    shared: dict[str, Any] = {"devices": devices, "batch": 32, "text": None, "settings": None}
    first = _train("gpt", "tiny", steps=steps, method="auto", seed=0, **shared)
    if (stages or 1) > 1:
        _console().print(f"\nthe same training, now as a pipeline of {stages} stages\n", style="bold")
        _train(
            "gpt", "tiny", steps=max(1, steps // 2), method="pipeline", seed=1, stages=stages, schedule=schedule,
            microbatches=microbatches, trace=trace, state=first.state, brief=True, **shared,
        )  # fmt: skip


@app.command(context_settings={"allow_extra_args": True})
@_clean
def train(
    context: typer.Context,
    model: Model,
    size: Size = "tiny",
    devices: Devices = None,
    batch: Batch = 32,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 200,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Text files to train on.", show_default="Python's standard library"),
    ] = None,
    method: MethodName = "auto",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    memory: Memory = None,
    settings: Settings = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run this plan file instead of solving.", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the plan to this file.")] = None,
    simulate: Simulate = None,
    trace: Trace = None,
    seed: Seed = 0,
) -> None:
    """Train a model on the devices of this machine; prints the plan, then the loss."""
    if context.args and not text:  # `--text a b` leaves b unparsed
        raise OptionError(f"unexpected argument {context.args[0]!r}; text files follow --text")
    files = None if text is None else [*text, *map(Path, context.args)]
    _train(
        model, size, devices=devices, batch=batch, steps=steps, text=files, method=method, stages=stages,
        microbatches=microbatches, schedule=schedule, memory=memory, settings=settings, plan=plan, output=output,
        simulate=simulate, trace=trace, seed=seed,
    )  # fmt: skip


def _train(
    model: str,
    size: str,
    *,
    devices: int | None,
    method: str,
    settings: list[str] | None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    memory: float | None = None,
    output: Path | None = None,
    simulate: Path | None = None,
    brief: bool = False,
    **options: Any,
) -> Any:
    """Sets the devices up, then trains; prints the plan, or with `brief` its beginning, and saves it if asked."""
    from alpa_lite import training

    console = _console()
    chosen = values.method_of(method, stages, schedule)
    cluster = training.local_cluster(devices)
    from alpa_lite.report import summary, timeline
    from alpa_lite.report import text as report

    def show(plan: Any) -> None:
        console.print(report.overview(plan) if brief else summary.renderable(plan.compared()))
        _write(plan, output, simulate, console)
        console.print()

    return training.train(
        model,
        size,
        cluster=cluster,
        settings=values.settings_of(settings),
        method=chosen,
        memory_per_device=values.bytes_of(memory),
        num_microbatches=microbatches or "auto",
        on_plan=show,
        on_line=console.print,
        on_trace=lambda executed: console.print("\n", timeline.draw(executed), "\n", sep=""),
        **options,
    )


@app.command()
@_clean
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="STEP",
            help="A model (gpt, mlp, ...), or a step of your own as package.module:function, with --args.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="A name that `alpa-lite clusters` lists, local, or a file of `alpa-lite calibrate`.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Of a model, the number of examples in the batch of one step.", show_default=False),
    ] = None,
    size: Size = "small",
    args: Arguments = None,
    kwargs: Keywords = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes, or of TPU slices.", show_default="the machine's")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="AxBxC", help="Shape of a TPU slice, such as 4x4x4.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the plan to this file.")] = None,
    method: MethodName = "auto",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    memory: Memory = None,
    settings: Settings = None,
    simulate: Simulate = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write the value after each pass into this directory, as text.")
    ] = None,
) -> None:
    """Plan a model, or any train step, for a cluster that need not be attached; nothing is executed.

    A step of your own is looked for in the current directory first:
    alpa-lite plan train:step --args train:abstract_args --cluster h100
    """
    shape = None if topology is None else values.shape_of(topology, "--topology")
    from alpa_lite import steps, training
    from alpa_lite.cluster import Cluster
    from alpa_lite.report import summary as report

    if cluster.lower() == "local":
        machine = training.local_cluster(None)
    elif nodes is None and shape is None:
        machine = Cluster.named(cluster)
    else:
        machine = Cluster.preset(cluster, nodes=nodes, topology=shape)
    named = values.named_step(model, size, batch, settings, args, kwargs)
    step, positional, keywords = named.load()
    given = {
        "method": values.method_of(method, stages, schedule), "memory_per_device": values.bytes_of(memory),
        "num_microbatches": microbatches or "auto", "dump_dir": dump,
    }  # fmt: skip
    from alpa_lite import verifying
    from alpa_lite.api import make_plan

    own = verifying.options_of(step)
    if own:  # what is not given here is as the step was decorated
        usual = {"method": values.method_of("auto", None, None), "num_microbatches": "auto"}
        given = own | {name: value for name, value in given.items() if value not in (None, usual.get(name))}
    given["cluster"] = machine
    found = make_plan(step, *positional, kwargs=keywords, **given)
    console = _console()
    console.print(report.renderable(found.compared()))
    _write(found, output, simulate, console)
    if output is not None:
        steps.remember(output, named)


@app.command()
@_clean
def show(
    file: PlanFile,
    full: Annotated[bool, typer.Option("--full", help="Print everything: shardings, collectives, checks.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as one page for a browser instead.")
    ] = None,
) -> None:
    """Print a plan: what was chosen, what it yields, and how other methods would do; with --full everything."""
    from alpa_lite.plan import Plan
    from alpa_lite.report import summary, text

    found = Plan.load(file)
    if html is None:
        _console().print((text if full else summary).renderable(found))
        return
    try:
        found.to_html(html)
    except OSError as error:
        raise OptionError(f"--html {str(html)!r} cannot be written: {error.strerror}") from error
    _console().print(f"saved to {html}: open it in a browser")


@app.command()
@_clean
def verify(
    file: PlanFile,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[STEP]",
            help="The step that was planned, as for `alpa-lite plan`; a file of `alpa-lite plan -o` names its own.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The machine to compile for: v5e:2x4, or cuda:FILE with XLA's description of a GPU.",
            show_default="the plan's own cluster",
        ),
    ] = None,
    size: Size = "small",
    batch: Annotated[int | None, typer.Option(min=1, help="As for `alpa-lite plan`.", show_default=False)] = None,
    settings: Settings = None,
    args: Arguments = None,
    kwargs: Keywords = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was found as JSON; - prints it.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds for planning again and compiling.")] = 600.0,
) -> None:
    """Compile a plan with the compiler of its target, without the hardware, and compare.

    Prints the collectives and the memory of the compiled program beside the plan's. Ends with exit code 1 if the
    program communicates what the plan does not say. For TPUs install alpa-lite[tpu-verify], for CUDA
    alpa-lite[cuda-verify].
    """
    from alpa_lite import steps, verifying
    from alpa_lite.plan import Plan
    from alpa_lite.report import compiled

    Plan.load(file)
    named = steps.remembered(file) if step is None else values.named_step(step, size, batch, settings, args, kwargs)
    if named is None:
        raise OptionError(
            f"{str(file)!r} does not name its step; give it: alpa-lite verify {file} package.module:function --args "
            "package.module:abstract_args, or a model with --size and --batch"
        )
    found = verifying.verify(file, named, target, time_limit)
    text = json.dumps(found, indent=1)
    if str(json_file) == "-":
        print(text)
    else:
        if json_file is not None:
            _save(json_file, "--json", text + "\n")
        _console().print(compiled.renderable(found))
    if not found["communicates"]:
        raise typer.Exit(1)


@app.command()
@_clean
def explain(
    file: PlanFile,
    path: Annotated[
        str,
        typer.Argument(
            help="An argument's path or its last keys (layers/3/ffn/up/kernel, ffn/up/kernel), an operation, "
            "or a source line.",
            show_default=False,
        ),
    ],
) -> None:
    """Explain why something is sharded as it is, and what would make another choice win."""
    from alpa_lite.plan import Plan

    _console().print(Plan.load(file).explain(path))


@app.command()
@_clean
def diff(before: PlanFile, after: PlanFile) -> None:
    """Compare two plans: mesh, shardings, collectives, memory, times."""
    from alpa_lite.plan import Plan

    _console().print(Plan.load(before).diff(Plan.load(after)))


@app.command()
@_clean
def clusters() -> None:
    """List the clusters that `alpa-lite plan --cluster` accepts."""
    from alpa_lite.cluster import Cluster
    from alpa_lite.report import units

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("cluster", "device", "per node", "nodes", "memory", "16-bit FLOP/s", "memory GB/s", "link GB/s"):
        table.add_column(name, justify="left" if name in ("cluster", "device") else "right", no_wrap=True)
    rows: dict[Cluster, list[str]] = {}
    for name in Cluster.preset_names():
        rows.setdefault(Cluster.preset(name), []).append(name)
    for machine, names in rows.items():
        table.add_row(
            ", ".join(names),
            machine.device,
            "x".join(map(str, machine.topology)) or str(machine.devices_per_node),
            str(machine.nodes),
            units.nbytes(machine.memory),
            f"{max(machine.peak('bfloat16'), machine.peak('float16')) / 1e12:.3g} T",
            f"{machine.memory_bandwidth / 1e9:,.0f}",
            f"{machine.node_link.bandwidth / 1e9:,.0f}",
        )
    _console().print(table)


@app.command()
@_clean
def calibrate(
    devices: Devices = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="About how long it may take; what there is no time for is not measured.")
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write what was found to this file.",
            show_default="~/.cache/alpa_lite/calibration-DEVICE-NUMBER.json",
        ),
    ] = None,
) -> None:
    """Measure the devices of this machine: products, memory, collectives, the start of tasks; fit the cost model.

    Plans use the file by ALPA_LITE_CALIBRATION=FILE, by Cluster.calibrated(FILE), or by cluster=FILE. Nothing else
    should run meanwhile.
    """
    from alpa_lite import training
    from alpa_lite.calibration import measuring, storing
    from alpa_lite.cluster import CALIBRATION
    from alpa_lite.report import calibration, progress

    count = training.local_cluster(devices, calibration=None).num_devices
    with progress.planning("calibrating") as report:
        found = measuring.calibrate(devices=count, seconds=seconds, progress=report.count)
    console = _console()
    console.print(calibration.renderable(found))
    path = storing.default_path(found.cluster) if out is None else out
    found.save(path)
    console.print(f"\nsaved to {path}: set {CALIBRATION} to it, or give cluster={str(path)!r}", soft_wrap=True)


@app.command(context_settings={"allow_interspersed_args": False})
@_clean
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
    from alpa_lite import launching

    raise typer.Exit(
        launching.launch(
            script, processes=processes, devices_per_process=devices_per_process, platform=platform, port=port,
            grace=grace,
        )
    )  # fmt: skip


def _save(path: Path, option: str, text: str) -> None:
    """Writes a file that an option names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def _write(plan: Any, output: Path | None, simulate: Path | None, console: Console) -> None:
    """Saves the plan and its predicted timeline, each if a file is given for it."""
    for option, path, write in (("--output", output, plan.save), ("--simulate", simulate, plan.simulate)):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error
    if output is not None:
        console.print(f"\nsaved to {output}")
    if simulate is not None:
        console.print(f"\npredicted timeline saved to {simulate}: open it in https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
