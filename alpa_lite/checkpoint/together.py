"""How processes save and restore together."""

from __future__ import annotations

from alpa_lite.errors import CheckpointError
from alpa_lite.processes.channel import Collective


def operation(what: str, timeout: float) -> Collective:
    """Returns a collective on a checkpoint, named by `what` in a CheckpointError; others have `timeout` seconds."""
    remedy = "it has ended, or is not at the same checkpoint; timeout= waits longer"
    return Collective("checkpoint", what, seconds=timeout, error=CheckpointError, remedy=remedy)
