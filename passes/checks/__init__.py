"""Verification of plans: the communication and the memory of a compiled step against those that its plan states.

In: a plan and the program that it describes. Out: the same plan with a list of the checks; a difference raises. Shardy
checks every plan; the compiled HLO and the compiler's memory are checked where there is an executable.
"""

from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.passes.checks.shardy import check_shardy
from alpa_lite.passes.checks.verification import memory_of, verify_compiled, verify_partitioning

__all__ = ["check_shardy", "compare_hlo", "memory_of", "verify_compiled", "verify_partitioning"]
