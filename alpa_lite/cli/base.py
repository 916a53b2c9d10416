"""Helpers that commands share: reporting of errors, the terminal, files."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def save(path: Path, option: str, text: str) -> None:
    """Writes a file that an option names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def write(plan: Any, output: Path | None, simulate: Path | None, terminal: Console) -> None:
    """Saves the plan and its predicted timeline, each if a file is given for it."""
    for option, path, write in (("--output", output, plan.save), ("--simulate", simulate, plan.simulate)):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise OptionError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error
    if output is not None:
        terminal.print(f"\nsaved to {output}")
    if simulate is not None:
        terminal.print(f"\npredicted timeline saved to {simulate}: open it in https://ui.perfetto.dev")
