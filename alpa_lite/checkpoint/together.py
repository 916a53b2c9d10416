"""How processes save and restore together."""

from __future__ import annotations

from alpa_lite.errors import CheckpointError
from alpa_lite.processes.operations import Operation


def operation(what: str, timeout: float) -> Operation:
    """An operation on a checkpoint, named by `what` in a CheckpointError; others are awaited `timeout` seconds."""
    remedy = "it has ended, or is not at the same checkpoint; timeout= waits longer"
    return Operation("checkpoint", what, timeout, error=CheckpointError, remedy=remedy)
