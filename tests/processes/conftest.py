"""Threads in place of processes."""

from __future__ import annotations

import pytest

from tests.processes.fake_store import Processes


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    """Three processes with one key-value store."""
    return Processes(monkeypatch, 3)
