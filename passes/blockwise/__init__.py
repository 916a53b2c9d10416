"""Operations and values in blocks along a factor: what micro-batches, cut scans and slices of the sequence share.

In: a graph that is rewritten. Out: functions of arrays as operations of it, and operations on parts of the operands of
others (`functions`); values that are stacked over the iterations of scans in pieces (`stacks`).
"""

from alpa_lite.passes.blockwise.functions import FunctionWriter

__all__ = ["FunctionWriter"]
