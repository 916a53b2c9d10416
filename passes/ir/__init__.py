"""Tools for graphs: edit one, prune it, renumber it, run it, and tell when two operations are the same.

In and out: `alpa_lite.ir.graph.Graph`, the program that every other room works on. Nothing here knows of devices,
meshes or costs. A pass that changes a graph does it with `Rewriter`; `evaluate` runs a graph, so that a rewriting can
be tested against what it rewrote.
"""

from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.ir.pruning import prune
from alpa_lite.passes.ir.rewriting import Rewriter

__all__ = ["Rewriter", "evaluate", "prune"]
