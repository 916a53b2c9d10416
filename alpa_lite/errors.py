"""Exceptions that users see. Each message names the argument, the value received, and the remedy."""

from __future__ import annotations


class AlpaLiteError(Exception):
    """Base class of every error that alpa_lite raises on purpose."""


class OptionError(AlpaLiteError, ValueError):
    """An option of `parallelize` has a value that cannot be used."""


class SignatureError(AlpaLiteError, TypeError):
    """The arguments of a step do not have the structure that planning needs (state, batch, static)."""


class TracingError(AlpaLiteError, TypeError):
    """The step function cannot be traced, for example because it branches on a traced value."""


class InfeasibleError(AlpaLiteError, RuntimeError):
    """No plan satisfies the constraints, such as the memory budget or the device count.

    Attributes:
      smallest_budget: the least bytes per device with which a plan is known; None if none is, or memory is not the
        reason.
    """

    def __init__(self, message: str, smallest_budget: float | None = None):
        super().__init__(message)
        self.smallest_budget = smallest_budget


class PlanError(AlpaLiteError, ValueError):
    """A plan cannot be loaded or does not belong to this program, cluster or version."""


class OrderError(PlanError):
    """The stages of a pipeline wait for each other under a schedule; names the schedule."""


class VerificationError(AlpaLiteError, RuntimeError):
    """The compiler does something else than the plan says."""


class MicrobatchError(AlpaLiteError, ValueError):
    """A step cannot be cut into the given number of micro-batches without changing its results."""


class DonatedError(AlpaLiteError, RuntimeError):
    """An array was donated to an earlier call, or deleted, and is given to a step again; names the leaf."""


class ExecutionError(AlpaLiteError, RuntimeError):
    """A task of a pipelined step failed while it ran; names the stage and the micro-batch."""


class RuleError(AlpaLiteError, ValueError):
    """A rule that was given to `register_rule` cannot be read, or does not fit the function that it describes."""


class CheckpointError(AlpaLiteError, RuntimeError):
    """A checkpoint cannot be saved, or cannot be restored: damaged, of another model, no room; names the folder."""


class ProcessError(AlpaLiteError, RuntimeError):
    """A divergence of the processes of one program, or a process that does not answer; names it, and the difference."""
