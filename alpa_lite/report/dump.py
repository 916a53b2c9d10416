"""The value after each pass as a text file: 01_tracing.txt, 02_factors.txt, ... in a directory of the user's choice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Write = Callable[[str, Any], None]


@contextmanager
def stages(directory: str | os.PathLike[str] | None) -> Iterator[Write]:
    """A function `write(name, value)` that writes one value into `directory`; it does nothing if that is None.

    Files are numbered in the order of writing. Numbers continue after the files in the directory, so that several plans
    can share it. Values are only turned into text (`report.listing`) if they are written, and a part that an earlier
    file has is named by that file.

    Args:
      directory: created if it does not exist.

    Raises:
      OSError: if the directory cannot be made or written.
    """
    if directory is None:
        yield lambda name, value: None
        return
    from alpa_lite.report import listing

    folder, printed = Path(directory), listing.Listing()
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, value: Any) -> None:
        number = 1 + max((int(m.group(1)) for f in folder.iterdir() if (m := re.match(r"(\d+)_", f.name))), default=0)
        file = folder / f"{number:02d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.txt"
        file.write_text(printed.text(value, file.stem).rstrip("\n") + "\n", encoding="utf-8")

    yield write
