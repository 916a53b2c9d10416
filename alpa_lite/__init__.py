"""alpa_lite: automatic parallelisation of JAX train steps on stock JAX."""

import importlib
from types import ModuleType

from alpa_lite.api import ParallelStep, make_plan, parallelize
from alpa_lite.checking import CheckResult, check
from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import (
    AlpaLiteError,
    CheckpointError,
    DonatedError,
    ExecutionError,
    InfeasibleError,
    MicrobatchError,
    OptionError,
    PlanError,
    ProcessError,
    RuleError,
    SignatureError,
    TracingError,
    VerificationError,
)
from alpa_lite.ir.registration import register_rule
from alpa_lite.options import Auto, DataParallel, Manual, Off, Pipeline, Sharded, TensorParallel, Zero
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Collective
from alpa_lite.processes.initialization import initialize
from alpa_lite.runtime.debug.watchdog import Watchdog
from alpa_lite.version import __version__

__all__ = [
    "AlpaLiteError",
    "Auto",
    "CheckResult",
    "CheckpointError",
    "Cluster",
    "Collective",
    "DataParallel",
    "DonatedError",
    "ExecutionError",
    "InfeasibleError",
    "Link",
    "Manual",
    "MicrobatchError",
    "Off",
    "OptionError",
    "ParallelStep",
    "Pipeline",
    "Plan",
    "PlanError",
    "ProcessError",
    "RuleError",
    "Sharded",
    "SignatureError",
    "TensorParallel",
    "TracingError",
    "VerificationError",
    "Watchdog",
    "Zero",
    "__version__",
    "check",
    "initialize",
    "make_plan",
    "parallelize",
    "register_rule",
]


def __getattr__(name: str) -> ModuleType:
    """`alpa_lite.checkpoint` is imported when it is first asked for: Orbax takes a second to import."""
    if name == "checkpoint":
        return importlib.import_module("alpa_lite.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
