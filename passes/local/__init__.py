"""Local forms: the computation of one device for an operation whose factors are sharded.

In: an operation and which mesh axes shard its factors. Out: a function of the blocks that one device holds, with the
collectives that it needs, or the reason why there is none. A micro-batch is a block in time, so the loop over
micro-batches uses the same forms.
"""

from alpa_lite.passes.local.forms import local_form

__all__ = ["local_form"]
