"""Every stage of compilation as a text file: 01_graph.txt, 02_factors.txt, ... in a directory of the user's choice."""

from __future__ import annotations

import os
import re
from pathlib import Path


class Dump:
    """Writes numbered texts into a directory; does nothing without one.

    Attributes:
      directory: where to write, made if it is not there; None writes nothing, and costs nothing if `active` is asked
        before a text is made.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        """Numbering goes on after what the directory already holds, so that several plans can share it."""
        self.directory = None if directory is None else Path(directory)
        self._number = 0
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            numbers = (re.match(r"(\d+)_", file.name) for file in self.directory.iterdir())
            self._number = max((int(match.group(1)) for match in numbers if match), default=0)

    @property
    def active(self) -> bool:
        """Whether anything is written."""
        return self.directory is not None

    def write(self, name: str, content: str) -> Path | None:
        """Writes one stage.

        Args:
          name: of the stage; characters that file names cannot hold everywhere become "_".
          content: its text.

        Returns:
          the file, or None if nothing is written.
        """
        if self.directory is None:
            return None
        self._number += 1
        path = self.directory / f"{self._number:02d}_{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.txt"
        path.write_text(content if content.endswith("\n") else f"{content}\n", encoding="utf-8")
        return path
