"""Is the plan true? What compilers made of a step, against what the plan says.

In: a plan and the program that it describes. Out: the same plan with what was checked; a difference raises. Shardy is
asked about every plan, the compiled HLO and the compiler's memory where there is an executable.
"""

from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.passes.checks.shardy import check_shardy
from alpa_lite.passes.checks.verification import memory_of, verified, verified_compiled

__all__ = ["check_shardy", "compare_hlo", "memory_of", "verified", "verified_compiled"]
