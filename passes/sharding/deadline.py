"""Seconds that a search may take, divided over what it tries."""

from __future__ import annotations

import time


class Deadline:
    """A limit of wall-clock seconds that begins now. What one attempt leaves over is there for the next ones."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.perf_counter() + seconds

    def share(self, parts: int, reserve: float = 0.0) -> float:
        """Seconds for the first of so many equal parts of what is left, less a reserve; none if that is spent."""
        return max(self._end - time.perf_counter() - reserve, 0.0) / parts
