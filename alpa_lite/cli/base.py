"""Helpers that commands share: reporting of errors, the terminal, files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from alpa_lite.errors import AlpaLiteError, OptionError

Command = TypeVar("Command", bound=Callable[..., None])


def clean(command: Command) -> Command:
    """Prints errors that the user can mend as one red message, with exit code 2; other errors keep their traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except AlpaLiteError as error:
            Console(stderr=True, highlight=False).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def console() -> Console:
    """Standard output: as wide as the terminal; without a terminal, as wide as a plan."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=100)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Words the error of a file that an option names and that cannot be written."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def write(plan: Any, output: Path | None, simulate: Path | None, terminal: Console) -> None:
    """Saves the plan and its predicted timeline, each if a file is given for it."""
    perfetto = ": open it in https://ui.perfetto.dev"
    for option, path, save, saved, hint in (
        ("--output", output, plan.save, "saved", ""),
        ("--simulate", simulate, plan.simulate, "predicted timeline saved", perfetto),
    ):
        if path is not None:
            with writing(option, path):
                save(path)
            terminal.print(f"\n{saved} to {path}{hint}")
