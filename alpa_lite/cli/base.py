"""Helpers that commands share: reporting of errors, the terminal, devices, files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import typer
from rich.console import Console
from rich.text import Text

from alpa_lite.cli import options
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, OptionError

VIRTUAL_DEVICES = 8
"""The number of CPU devices if there is no accelerator and the user gives no number."""

Command = TypeVar("Command", bound=Callable[..., None])


def clean(command: Command) -> Command:
    """Describes the parameters of a command (`options.PARAMETERS`), and words its errors.

    Errors that the user can mend are printed as one red message, with exit code 2; others keep their traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AlpaLiteError as error:
            Console(stderr=True, highlight=False).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None

    run.__signature__ = options.describe_parameters(command)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def console() -> Console:
    """Standard output: as wide as the terminal; without a terminal, as wide as a plan."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=100)


def local_cluster(devices: int | None, calibration: Literal["auto"] | None = "auto") -> Cluster:
    """Returns the cluster of the first `devices` devices here; None for all accelerators, or eight virtual CPU devices.

    The number of virtual CPU devices can only be set before JAX first looks for devices; accelerators are unaffected.

    Args:
      calibration: as for `Cluster.local`.

    Raises:
      OptionError: if there are fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # raised if JAX has already looked for devices: those must do
        jax.config.update("jax_num_cpu_devices", devices or VIRTUAL_DEVICES)
    found = jax.devices()
    if devices is not None and len(found) < devices:
        raise OptionError(
            f"--devices {devices}: there are {len(found)} {found[0].platform} devices here; give at most as many"
        )
    if devices is None and found[0].platform == "cpu":
        devices = min(VIRTUAL_DEVICES, len(found))
    return Cluster.local(found[:devices], calibration=calibration)


@contextlib.contextmanager
def report_unwritable(option: str, path: Path) -> Iterator[None]:
    """Words the error of a file that an option names and that cannot be written."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}; give another path") from error


def write(plan: Any, output: Path | None, simulate: Path | None, terminal: Console) -> None:
    """Saves the plan and its predicted timeline, each if a file is given for it."""
    perfetto = ": open it in https://ui.perfetto.dev"
    for option, path, save, saved, hint in (
        ("--output", output, plan.save, "saved", ""),
        ("--simulate", simulate, plan.save_timeline, "predicted timeline saved", perfetto),
    ):
        if path is not None:
            with report_unwritable(option, path):
                save(path)
            terminal.print(f"\n{saved} to {path}{hint}")
