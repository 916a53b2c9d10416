"""alpa_lite: automatic parallelisation of JAX train steps on stock JAX."""

from alpa_lite.api import ParallelStep, make_plan, parallelize
from alpa_lite.checking import Checked, check
from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import (
    AlpaLiteError,
    DonatedError,
    ExecutionError,
    InfeasibleError,
    MicrobatchError,
    OptionError,
    PlanError,
    RuleError,
    SignatureError,
    TracingError,
    VerificationError,
)
from alpa_lite.joining import initialize
from alpa_lite.kernels import register_rule
from alpa_lite.options import Auto, DataParallel, Manual, Off, Pipeline, Sharded, TensorParallel, Zero
from alpa_lite.plan import Plan
from alpa_lite.records import Collective
from alpa_lite.version import __version__

__all__ = [
    "AlpaLiteError",
    "Auto",
    "Checked",
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
    "RuleError",
    "Sharded",
    "SignatureError",
    "TensorParallel",
    "TracingError",
    "VerificationError",
    "Zero",
    "__version__",
    "check",
    "initialize",
    "make_plan",
    "parallelize",
    "register_rule",
]
